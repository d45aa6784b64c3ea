"""Routing-only cases of the MoE golden vectors: every method, ties, saturation, special values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

import numpy as np

import moe_files
import reference_moe as moe
import reference_routing as routing
from moe_files import Tensors
from reference_floats import decode_float, encode_float
from reference_routing import DEEPSEEK_V3, LLAMA4, METHODS, MINIMAX2, Routed, Router

GIVE_UP = 1000


def draw_logits(
    rng: np.random.Generator,
    shape: tuple[int, int],
    dtype: str,
    bias: np.ndarray | None,
    router: Router,
) -> tuple[np.ndarray, Routed]:
    """(raw logits, their routing); each row is drawn until its ids and weights are beyond doubt."""
    rows, parts = [], []
    for _ in range(shape[0]):
        for _ in range(GIVE_UP):
            raw = encode_float(rng.standard_normal((1, shape[1])) * 1.5, dtype)
            x = decode_float(raw, dtype)
            if not routing.is_robust(x, bias, router):
                continue
            try:
                parts.append(routing.route_logits(x, bias, router))
            except ValueError:  # A weight at the boundary of two bf16 numbers.
                continue
            rows.append(raw)
            break
        else:
            raise RuntimeError(f"no robust row for {router}")
    names = ("ids", "weights", "tolerance")
    fields = [np.concatenate([getattr(part, name) for part in parts]) for name in names]
    return np.concatenate(rows), Routed(*fields)


@dataclass
class Input:
    """Logits by a name, with a bias for the methods that take one."""

    name: str
    x: np.ndarray  # float64 [T, E]
    dtype: str = "F32"
    bias: np.ndarray | None = None
    bias_dtype: str = "F32"


def inputs(rng: np.random.Generator, experts: int) -> Iterator[Input]:
    """Distributions for every method; grids make ties, and are exact in all types."""
    for dtype in ("F32", "BF16", "F16"):
        yield Input("grid", rng.integers(-4, 5, (4, experts)) / 2, dtype)
    yield Input("constant", np.zeros((2, experts)))
    # Beyond 20 the sigmoid is exactly 0 or 1: methods 8 and 9 differ.
    saturated = rng.choice([-40.0, -25.0, 21.0, 22.0, 30.0, 0.5, 1.5], (4, experts))
    yield Input("saturated", saturated)
    signed = np.where(rng.random((3, experts)) < 0.5, 0.0, -0.0)
    yield Input("signed_zeros", signed)
    infinite = rng.choice([-np.inf, -np.inf, 0.25, 2.0], (4, experts))
    infinite[0] = -np.inf
    yield Input("minus_infinity", infinite)


def biased_inputs(rng: np.random.Generator, experts: int) -> Iterator[Input]:
    """For the methods with a bias: negative, in bf16, and one that swallows the sigmoid."""
    grid = rng.integers(-3, 4, (4, experts)) / 2
    coarse = rng.integers(-8, 9, experts) / 8
    yield Input("bias", grid, "BF16", coarse)
    yield Input("negative_bias", grid, "F32", coarse - 3.0, "BF16")
    yield Input("large_bias", grid, "F32", np.where(np.arange(experts) % 3 == 0, 1e4, 0.0))
    # 1 + 2^-9 and 1 are one number in bf16 and two in fp32.
    near = 1 + np.arange(experts) % 3 / 512
    yield Input("bias_between_bf16", np.zeros((2, experts)), "F32", near)


def nan_input(experts: int) -> Input:
    """NaN of both signs, for methods that compare logits."""
    x = np.tile(np.arange(experts) / 4.0, (3, 1))
    x[0, 2] = np.nan
    x[1, 3] = np.copysign(np.nan, -1.0)
    x[2, 1], x[2, 4] = np.copysign(np.nan, -1.0), np.inf
    return Input("nan", x)


def routers() -> Iterator[Router]:
    """Every method with several k; groups, options, shared experts."""
    for method in range(len(METHODS)):
        scale = 2.5 if method in (DEEPSEEK_V3, MINIMAX2) else 1.0
        for experts, k in ((8, 3), (13, 13), (6, 1)):
            yield Router(experts, 1 if method == LLAMA4 else k, method, scale=scale)
    yield Router(8, 2, 6, norm_topk=False)
    yield Router(8, 2, 1, shared=2)
    yield Router(8, 3, 2, n_group=4, topk_group=2, scale=2.5)
    yield Router(8, 3, 2, n_group=4, topk_group=2, scale=2.5, grouped_bias_bf16=True)
    yield Router(12, 4, 2, n_group=3, topk_group=2, scale=1.5, shared=1)
    yield Router(8, 3, 2, n_group=2, topk_group=1)
    yield Router(8, 4, 1, weights_bf16=True)
    yield Router(8, 4, 7, scale=2.0, weights_bf16=True)


def raw_logits(given: Input) -> np.ndarray:
    """Stored logits; NaN keeps its sign."""
    if given.name == "nan":
        return given.x.astype(np.float32).view(np.uint32)
    return encode_float(given.x, given.dtype)


def try_case(given: Input, router: Router) -> tuple[Tensors, Routed] | None:
    """Tensors of a case, or None where its ids or rounded weights are not beyond doubt."""
    raw = raw_logits(given)
    x = raw.view(np.float32) if given.name == "nan" else decode_float(raw, given.dtype)
    tensors: Tensors = {"logits": (given.dtype, raw)}
    bias = None
    if given.bias is not None:
        raw_bias = encode_float(given.bias, given.bias_dtype)
        tensors["bias"] = (given.bias_dtype, raw_bias)
        bias = decode_float(raw_bias, given.bias_dtype)
    keep = [t for t in range(len(x)) if routing.is_robust(x[t : t + 1], bias, router)]
    if not keep:
        return None
    tensors["logits"] = (given.dtype, raw[keep])
    try:
        return tensors, routing.route_logits(x[keep], bias, router)
    except ValueError:
        return None


def given_inputs(rng: np.random.Generator, router: Router) -> Iterator[Input]:
    """The inputs that a router takes."""
    yield from inputs(rng, router.experts)
    if METHODS[router.method].key == "biased":
        yield from biased_inputs(rng, router.experts)
    if METHODS[router.method].key == "logit":
        yield nan_input(router.experts)


def routing_file() -> bytes:
    """All routing cases, each with its permutation for two shards."""
    rng = np.random.default_rng(32)
    tensors: Tensors = {}
    cases: list[dict[str, object]] = []
    for router in routers():
        for given in given_inputs(rng, router):
            made = try_case(given, router)
            if made is None:
                continue
            case_tensors, routed = made
            prefix = f"{len(cases)}."
            tensors |= {prefix + name: tensor for name, tensor in case_tensors.items()}
            tensors[prefix + "expert_weights"] = ("F32", routed.with_tolerance())
            cases.append(describe(given.name, router, routed, len(cases)))
    return moe_files.safetensors_bytes(tensors, {"cases": moe_files.compact(cases)})


def describe(name: str, router: Router, routed: Routed, number: int) -> dict[str, object]:
    """JSON of a case, some with a permutation: of a shard without both ends, or of all experts."""
    case = {"name": name, "router": moe_files.non_default(router)}
    expect: dict[str, object] = {"topk_ids": routed.ids.reshape(-1).tolist()}
    if name in ("grid", "constant"):
        offset = 0 if router.shared else 1
        tile = (1, 2, 4, 8)[number % 4]
        local = router.experts + router.shared - 2 * offset
        case |= {"token_tile": tile, "expert_offset": offset, "local_experts": local}
        expect |= asdict(moe.permute(routed.ids, offset, local, tile))
    return {**case, "expect": expect}
