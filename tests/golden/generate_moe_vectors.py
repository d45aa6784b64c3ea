"""Generates tests/golden/vectors/moe/*.safetensors from the reference model of the MoE layer.

One file a mode, with twelve cases each, and one file of routing alone (moe_routing_cases.py). The
cases are a Latin square: every pair of mode, routing and activation occurs, with all gate orders,
and the rarer options are distributed in rotation. The weights of a file's cases are cut from common
pools of prime lengths that repeat cyclically (np.resize), which keeps the files small and every row
and block different. tests/golden/README.md describes the files. Never copy the library's output
into them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

import moe_files
import moe_routing_cases
import reference_moe as moe
import reference_routing as routing
from moe_files import Tensors
from reference_floats import encode_e4m3, encode_float
from reference_moe import BLOCK, GATED, MODES, NOT_GATED, Layer, Mode, Rows
from reference_routing import DEEPSEEK_V3, LLAMA4, MINIMAX2, SIGMOID_RENORM, Routed, Router

VECTORS = Path(__file__).resolve().parent / "vectors" / "moe"

FC1_ROWS = 4  # Rows of u and g that a file has; the intermediate judges the rest.
CASES = 12  # A mode: as many as there are routings, and activations with swiglu_oai.
ACTIVATIONS = (*NOT_GATED, *GATED, "swiglu_oai")
ORDERS = ("up_gate", "gate_up", "interleaved")
EXPERTS = 8
SHAPES = {  # (H, I) of the cases of a mode, in rotation.
    "bf16": [(48, 80), (112, 32), (64, 48)],
    "fp8_tensor": [(80, 48), (32, 112), (64, 48)],
    "fp8_block": [(256, 128), (128, 256), (128, 128)],
    "mxfp8": [(96, 64), (32, 96), (128, 32)],
    "mxfp4_mxfp8": [(64, 96), (96, 32), (32, 64)],
    "mxfp4_bf16": [(96, 32), (64, 64), (32, 96)],
    "mxfp4_fp8": [(160, 96), (96, 160), (288, 32)],
    "nvfp4": [(80, 48), (48, 80), (144, 32)],
    "nvfp4_per_token": [(48, 80), (80, 48), (144, 32)],
    "nvfp4_bf16": [(48, 80), (80, 48), (144, 32)],
    "nvfp4_fp8_exact": [(144, 48), (48, 144), (208, 32)],
    "nvfp4_fp8_rounded": [(144, 48), (48, 144), (272, 32)],
    "mxfp4_fp8_token": [(160, 96), (96, 160), (288, 32)],
    "nvfp4_fp8_token": [(144, 48), (48, 144), (272, 32)],
    "mxfp4_int8": [(96, 64), (64, 32), (32, 96)],
    "nvfp4_int8": [(96, 32), (64, 96), (32, 64)],
}
# (tokens, top_k, shared experts, token tile, (offset, local experts)), in rotation.
LOADS = [
    (3, 2, 0, 4, (0, 8)),
    (5, 1, 0, 2, (0, 8)),
    (2, 3, 1, 8, (0, 8)),
    (6, 2, 0, 8, (2, 5)),
    (9, 1, 0, 4, (0, 3)),
    (3, 2, 2, 2, (0, 8)),
    (4, 3, 0, 1, (5, 3)),
]
RAW_NAME = {"bf16": "BF16", "fp32": "F32"}


# --- Random tensors in stored formats -------------------------------------------------------------


def lognormal(rng: np.random.Generator, shape: tuple[int, ...], spread: float = 0.5) -> np.ndarray:
    """float32 positive numbers around 1."""
    return np.exp(rng.standard_normal(shape) * spread).astype(np.float32)


def random_elements(rng: np.random.Generator, fmt: str, shape: tuple[int, ...]) -> np.ndarray:
    """Stored elements: N(0, 1) in bf16, about N(0, 32) in E4M3, every code in E2M1 (rms 2.9)."""
    if fmt in moe.PACKED:
        return rng.integers(0, 256, shape, dtype=np.uint8)
    normal = rng.standard_normal(shape)
    if fmt in RAW_NAME:
        return encode_float(normal, RAW_NAME[fmt])
    return encode_e4m3((normal * 32).astype(np.float32))


def random_scales(rng: np.random.Generator, fmt: str, shape: tuple[int, ...], scale: float):
    """Independent block scales around `scale`; in the NVFP4 formats all of E4M3's range."""
    if fmt in ("mxfp8", "mxfp4"):
        middle = 127 + int(np.floor(np.log2(scale)))
        wide = rng.random(shape) < 0.02
        return (middle + np.where(wide, -12, rng.integers(-2, 3, shape))).astype(np.uint8)
    if fmt in ("nvfp4", "nvfp4_per_token"):
        # Small ones among large ones: E4M3 rounding of weights then meets its denormals.
        low = np.where(rng.random(shape) < 0.2, -9, 2.5)
        sf = np.exp2(rng.uniform(low, 8.5, shape)) * (rng.random(shape) > 0.02)
        return encode_e4m3(sf.astype(np.float32))
    return lognormal(rng, shape) * np.float32(scale)


SCALE_DTYPE = {
    "mxfp8": "F8_E8M0", "mxfp4": "F8_E8M0", "nvfp4": "F8_E4M3", "nvfp4_per_token": "F8_E4M3",
    "fp8_group": "F32", "fp8_block": "F32",
}  # fmt: skip


def element_dtype(fmt: str) -> str:
    """safetensors type of stored elements."""
    return RAW_NAME.get(fmt, "U8" if fmt in moe.PACKED else "F8_E4M3")


# Root mean square of random elements (times their scales in the NVFP4 formats).
RMS = {"bf16": 1, "fp32": 1, "mxfp4": 2.9, "nvfp4": 400, "nvfp4_per_token": 400}
WEIGHT_RMS = 0.15  # The root mean square that sums of 100 products need.


def rms(fmt: str) -> float:
    """The format of elements that random_elements makes."""
    return RMS.get(fmt, 32)


# --- Weights --------------------------------------------------------------------------------------


@dataclass
class Pool:
    """The matrices from which the weights of a mode's cases are cut."""

    elements: np.ndarray
    scales: np.ndarray | None


@dataclass
class Pools:
    """All pools of a file: weights by matrix, raw biases by name and type."""

    weights: dict[str, Pool]
    biases: dict[str, np.ndarray]


def make_bias_pools(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Raw biases of both matrices in both types."""
    names = [(name, dtype) for name in ("bias1", "bias2") for dtype in ("F32", "BF16")]
    return {f"{n}_{d}": encode_float(rng.standard_normal(127) * 0.5, d) for n, d in names}


def make_pool(rng: np.random.Generator, fmt: str) -> Pool:
    """Prime lengths, so that no row or block repeats within a matrix's neighbourhood."""
    elements = random_elements(rng, fmt, (4093,))
    if fmt == "bf16":
        elements = encode_float(rng.standard_normal(4093) * WEIGHT_RMS, "BF16")
    has_scales = fmt in SCALE_DTYPE
    return Pool(
        elements, random_scales(rng, fmt, (1021,), WEIGHT_RMS / rms(fmt)) if has_scales else None
    )


def cut(pool: Pool, fmt: str, experts: int, rows: int, cols: int):
    """(codes, scales) of [experts, rows, cols] weights."""
    width = cols // 2 if fmt in moe.PACKED else cols
    codes = np.resize(pool.elements, (experts, rows, width))
    if pool.scales is None:
        return codes, None
    return codes, np.resize(pool.scales, (experts, *moe.weight_scale_shape(fmt, rows, cols)))


# --- One case -------------------------------------------------------------------------------------


@dataclass
class Plan:
    """Discrete choices of a case; all of it goes to the file as JSON."""

    mode: str
    routing: str  # logits | packed | ids
    router: Router
    activation: str
    gate_order: str
    hidden: int
    inter: int
    tokens: int
    token_tile: int
    expert_offset: int
    local_experts: int
    input: str = "coded"  # or the type of unquantized rows
    x_scales: str = "rows"  # or "columns": the scales of a row are not neighbours
    w_scales: str = "linear"
    logits_dtype: str = "F32"
    bias_dtype: str = ""  # Type of bias1 and bias2.
    router_bias_dtype: str = ""
    weight_on_input: bool = False
    add_fc2_bias: bool = True
    out_dtype: str = "BF16"
    slot_dtype: str = "BF16"
    out_cols: int = 0
    fp32_rows: bool = False
    double_quantize_fc1: bool = False
    scalars: dict[str, float] = field(default_factory=dict)

    @property
    def weight_experts(self) -> int:
        """First extent of the weights."""
        return self.local_experts + self.router.shared


def router_of(method: int, load: int, j: int) -> Router:
    """The router of a case from logits."""
    _, k, shared, _, _ = LOADS[load]
    k = 1 if method == LLAMA4 else k
    grouped = method == DEEPSEEK_V3 and j % 2 == 0
    return Router(
        experts=EXPERTS,
        top_k=k,
        method=method,
        shared=shared,
        n_group=4 if grouped else 1,
        topk_group=2 if grouped else 1,
        scale=2.5 if method in (DEEPSEEK_V3, MINIMAX2) else 1.0,
        norm_topk=method != SIGMOID_RENORM or j % 2 == 0,
        weights_bf16=method == LLAMA4 or j % 3 == 1,
        grouped_bias_bf16=grouped and j % 4 == 0,
    )


def make_plan(mode: Mode, m: int, j: int) -> Plan:
    """Case j of mode number m: routing j, activation j + m."""
    load = (j + 3 * m) % len(LOADS)
    tokens, k, shared, tile, (offset, local) = LOADS[load]
    if j < len(routing.METHODS):
        source, router = "logits", router_of(j, load, m)
    else:
        source = "packed" if j == 10 else "ids"
        router = Router(EXPERTS, k, shared=shared, negative_one_is_empty=m % 2 == 0)
    if router.shared:
        offset, local = 0, EXPERTS
    hidden, inter = SHAPES[mode.name][(j + m) % 3]
    if mode.name == "fp8_block":  # Large experts: few of them.
        tokens, local = min(tokens, 3), min(local, 8 if router.shared else 4)
    plan = Plan(
        mode.name, source, router, ACTIVATIONS[(j + m) % CASES], ORDERS[(j // 2 + m) % 3],
        hidden, inter, tokens, tile, offset, local,
    )  # fmt: skip
    deal_options(plan, mode, m, j)
    return plan


def deal_options(plan: Plan, mode: Mode, m: int, j: int) -> None:
    """The rarer options, each in some cases of every mode."""
    n = 5 * m + j
    plain = ("BF16", "F16", "F32") if mode.input != "bf16" else ("BF16",)
    plan.fp32_rows = mode.input == "bf16" and n % 4 == 1
    if plan.fp32_rows:
        plain = ("F32",)
    # Rows in bf16 and fp32 are "coded" as they are.
    plan.input = plain[n % len(plain)] if j % 3 == 1 or mode.input == "bf16" else "coded"
    plan.x_scales = "columns" if j % 2 == 1 else "rows"
    plan.w_scales = "swizzled_128x4" if n % 4 == 2 and mode.weights in SWIZZLED else "linear"
    plan.logits_dtype = ("F32", "BF16", "F16")[n % 3]
    plan.bias_dtype = ("", "F32", "BF16")[(n // 2) % 3]
    has_router_bias = plan.routing == "logits" and plan.router.method in (DEEPSEEK_V3, MINIMAX2)
    plan.router_bias_dtype = ("F32", "BF16", "")[m % 3] if has_router_bias else ""
    is_exact = plan.routing != "logits" or plan.router.weights_bf16
    fits = plan.router.top_k == 1 and plan.router.shared == 0
    plan.weight_on_input = fits and is_exact and (plan.router.method == LLAMA4 or n % 2 == 0)
    plan.add_fc2_bias = n % 5 != 3
    plan.out_dtype = ("BF16", "F32", "F16", "BF16")[n % 4]
    plan.slot_dtype = ("BF16", "BF16", "F32")[n % 3]
    is_one_of_minimax = (plan.router.method, plan.router.top_k) == (MINIMAX2, 1)
    if is_one_of_minimax and not is_exact and plan.out_dtype == "BF16":
        # BF16 rows times 2.5 are ties, which the last bit of the weight decides.
        plan.slot_dtype = "F32"
    plan.out_cols = plan.hidden - (5 if n % 4 == 3 else 0)
    plan.double_quantize_fc1 = mode.name == "fp8_block" and j % 5 == 4


SWIZZLED = ("mxfp8", "mxfp4", "nvfp4")


class Case:
    """Draws the data of a plan, runs the model, and lists what goes to the file."""

    def __init__(self, plan: Plan, pools: Pools, rng: np.random.Generator) -> None:
        self.plan, self.pools, self.biases, self.rng = plan, pools.weights, pools.biases, rng
        self.mode = MODES[plan.mode]
        self.tensors: Tensors = {}
        self.expect: dict[str, object] = {}

    def build(self) -> None:
        """Fills tensors and expect."""
        plan = self.plan
        routed = self.draw_routing()
        x, input_factor = self.draw_input()
        layer = self.draw_layer(input_factor)
        result = moe.run(layer, x, routed, plan.expert_offset, plan.weight_experts)
        self.keep_result(result)
        self.keep("expert_weights", "F32", routed.with_tolerance())
        maps = moe.permute(routed.ids, plan.expert_offset, plan.weight_experts, plan.token_tile)
        self.expect = {"topk_ids": routed.ids.reshape(-1).tolist(), **asdict(maps)}

    def keep(self, name: str, dtype: str, array: np.ndarray) -> None:
        """Adds a tensor to the file."""
        self.tensors[name] = (dtype, array)

    def keep_result(self, result: moe.Result) -> None:
        """Adds the outputs."""
        plan = self.plan
        assert np.all(np.isfinite(result.fc1))
        self.keep("fc1", "F32", result.fc1[:FC1_ROWS].astype(np.float32))
        self.keep_rows("h", result.inter)
        self.keep("y", plan.slot_dtype, result.y)
        self.keep("out", plan.out_dtype, result.out[:, : plan.out_cols])

    def keep_rows(self, name: str, rows: Rows) -> None:
        """Adds stored rows and their scales."""
        self.keep(name, element_dtype(rows.fmt), rows.codes)
        if rows.scales is not None:
            self.keep(f"{name}_scales", SCALE_DTYPE[rows.fmt], rows.scales)
        if rows.row_scale is not None:
            self.keep(f"{name}_row_scale", "F32", rows.row_scale)

    def draw_routing(self) -> Routed:
        """Logits are drawn again until no key is too close to another."""
        plan, router = self.plan, self.plan.router
        if plan.routing == "logits":
            bias = None
            if plan.router_bias_dtype:
                raw = encode_float(self.rng.standard_normal(EXPERTS) * 0.3, plan.router_bias_dtype)
                self.keep("bias", plan.router_bias_dtype, raw)
                bias = moe.decode_float(raw, plan.router_bias_dtype)
            shape = (plan.tokens, EXPERTS)
            raw, routed = moe_routing_cases.draw_logits(
                self.rng, shape, plan.logits_dtype, bias, router
            )
            self.keep("logits", plan.logits_dtype, raw)
            return routed
        return self.draw_precomputed()

    def draw_precomputed(self) -> Routed:
        """Random ids, duplicates included; weights of both signs, and 0."""
        plan, router = self.plan, self.plan.router
        shape = (plan.tokens, router.top_k)
        least = -1 if router.negative_one_is_empty else 0
        ids = self.rng.integers(least, EXPERTS, shape).astype(np.int32)
        w = np.where(self.rng.random(shape) < 0.1, 0, self.rng.standard_normal(shape))
        if plan.routing == "packed":
            packed = routing.pack(ids, w)
            self.keep("packed", "I32", packed)
            ids, w = routing.unpack(packed)
        else:
            dtype = "F32" if plan.tokens % 2 else "BF16"
            raw = encode_float(w, dtype)
            self.keep("ids", "I32", ids)
            self.keep("weights", dtype, raw)
            w = moe.decode_float(raw, dtype)
        return routing.route_precomputed(ids, w, router)

    def draw_input(self) -> tuple[Rows, float]:
        """(rows as the first GEMM reads them, what their decoded values are too large by)."""
        plan, mode = self.plan, self.mode
        shape = (plan.tokens, plan.hidden)
        if plan.input == "coded":
            rows = self.draw_coded(shape)
            self.keep_rows("x", rows)
            return rows, rms(mode.input)
        raw = encode_float(self.rng.standard_normal(shape), plan.input)
        self.keep("x", plan.input, raw)
        if mode.input == "bf16":
            return Rows("fp32" if plan.fp32_rows else "bf16", raw), 1.0
        multiplier = {"fp8_static": 87.5, "nvfp4": 611.0}.get(mode.input, 1.0)
        if multiplier != 1:
            plan.scalars["input_multiplier"] = multiplier
        spread = np.full(plan.tokens, multiplier, np.float32)
        x = moe.decode_float(raw, plan.input)
        return moe.quantize_rows(mode.input, x, spread, plan.input), multiplier

    def draw_coded(self, shape: tuple[int, int]) -> Rows:
        """Random codes and scales, about N(0, rms)."""
        fmt = self.mode.input
        codes_shape = (shape[0], shape[1] // 2) if fmt in moe.PACKED else shape
        codes = random_elements(self.rng, fmt, codes_shape)
        if fmt == "fp8_token":
            return Rows(fmt, codes, None, lognormal(self.rng, (shape[0],)) / np.float32(rms(fmt)))
        if fmt not in BLOCK:
            return Rows(fmt, codes)
        blocks = (shape[0], -(-shape[1] // BLOCK[fmt]))
        scales = random_scales(self.rng, fmt, blocks, 1.0 / rms(fmt))
        if fmt != "nvfp4_per_token":
            return Rows(fmt, codes, scales)
        row_scale = lognormal(self.rng, (shape[0],)) / np.float32(rms(fmt))
        return Rows(fmt, codes, scales, row_scale)

    def per_expert(self, name: str, value: float, spread: float = 0.3) -> np.ndarray:
        """One value for all experts or one for each; kept unless it is the default."""
        count = self.plan.weight_experts
        if self.rng.random() < 0.4:
            one = np.float32(value * np.exp(self.rng.standard_normal() * spread))
            self.plan.scalars[name] = float(one)
            return np.full(count, one, np.float32)
        each = (value * lognormal(self.rng, (count,), spread)).astype(np.float32)
        self.keep(name, "F32", each)
        return each

    def draw_layer(self, input_factor: float) -> Layer:
        """Weights, factors, biases and activation parameters."""
        plan, mode = self.plan, self.mode
        f1 = plan.inter * (2 if plan.activation.removesuffix("_oai") in GATED else 1)
        w1, w1_scales = cut(self.pools["w1"], mode.weights, plan.weight_experts, f1, plan.hidden)
        w2, w2_scales = cut(
            self.pools["w2"], mode.weights, plan.weight_experts, plan.hidden, plan.inter
        )
        return Layer(
            mode, plan.activation.removesuffix("_oai"), plan.gate_order, w1, w2, w1_scales,
            w2_scales, self.draw_factors(input_factor) | self.draw_parameters(),
            self.draw_bias("bias1", f1), self.draw_bias("bias2", plan.hidden),
            plan.weight_on_input, plan.add_fc2_bias, plan.slot_dtype, plan.out_dtype,
            plan.fp32_rows, plan.double_quantize_fc1,
        )  # fmt: skip

    def draw_factors(self, input_factor: float) -> dict[str, np.ndarray]:
        """Global factors; 1 where the mode has none."""
        mode, plan = self.mode, self.plan
        names = ("up_scale", "gate_scale", "down_scale", "inter_multiplier")
        factors = {name: np.ones(plan.weight_experts, np.float32) for name in names}
        if mode.weights not in ("fp8_tensor", "nvfp4"):
            return factors
        weight = WEIGHT_RMS / rms(mode.weights)
        static = mode.input in ("fp8_static", "nvfp4")
        # Static scales of the input are part of these; other formats have theirs with the rows.
        value = weight / (input_factor if static else 1.0)
        factors["up_scale"] = self.per_expert("up_scale", value)
        if plan.activation.removesuffix("_oai") in GATED:
            factors["gate_scale"] = self.per_expert("gate_scale", value)
        if static:
            multiplier = 60.0 if mode.input == "fp8_static" else 400.0
            factors["inter_multiplier"] = self.per_expert("inter_multiplier", multiplier)
            weight /= multiplier
        factors["down_scale"] = self.per_expert("down_scale", weight)
        return factors

    def draw_parameters(self) -> dict[str, np.ndarray]:
        """alpha, beta and the limits."""
        kind = self.plan.activation
        defaults = {"alpha": 1.0, "beta": 0.0, "limit_gate": np.inf, "limit_up": np.inf}
        count = self.plan.weight_experts
        values = {name: np.full(count, v, np.float32) for name, v in defaults.items()}
        wanted = {
            "swiglu_oai": {"alpha": 1.702, "beta": 1.0, "limit_gate": 1.5, "limit_up": 1.0},
            "swiglu_step": {"limit_gate": 0.8, "limit_up": 1.2},
            "situ_glu": {"alpha": 1.5, "beta": 2.5, "limit_gate": 1.2, "limit_up": 1.4},
        }.get(kind, {})
        for name, value in wanted.items():
            values[name] = self.per_expert(name, value, 0.2)
        return values

    def draw_bias(self, name: str, width: int) -> np.ndarray | None:
        """float32 values of a bias, if the plan has one."""
        dtype = self.plan.bias_dtype
        if not dtype:
            return None
        raw = np.resize(self.biases[f"{name}_{dtype}"], (self.plan.weight_experts, width))
        return moe.decode_float(raw, dtype)

    def description(self) -> dict[str, object]:
        """JSON of the case."""
        return {**moe_files.non_default(self.plan), "expect": self.expect}


# --- Files ----------------------------------------------------------------------------------------


def mode_file(mode: Mode, m: int) -> bytes:
    """All cases of a mode."""
    rng = np.random.default_rng([30, m])
    weights = {name: make_pool(rng, mode.weights) for name in ("w1", "w2")}
    pools = Pools(weights, make_bias_pools(rng))
    tensors: Tensors = {n: (n.split("_")[1], raw) for n, raw in pools.biases.items()}
    for name, pool in weights.items():
        tensors[name] = (element_dtype(mode.weights), pool.elements)
        if pool.scales is not None:
            tensors[f"{name}_scales"] = (SCALE_DTYPE[mode.weights], pool.scales)
    cases = []
    for j in range(CASES):
        case = Case(make_plan(mode, m, j), pools, np.random.default_rng([31, m, j]))
        case.build()
        cases.append(case.description())
        tensors |= {f"{j}.{name}": tensor for name, tensor in case.tensors.items()}
    return moe_files.safetensors_bytes(tensors, {"cases": moe_files.compact(cases)})


def main() -> None:
    """Writes all files."""
    for m, mode in enumerate(MODES.values()):
        moe_files.write(VECTORS / f"{mode.name}.safetensors", mode_file(mode, m))
    moe_files.write(VECTORS / "routing.safetensors", moe_routing_cases.routing_file())


if __name__ == "__main__":
    main()
