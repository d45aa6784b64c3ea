"""narrowfloat.compat.flashinfer: arguments that FlashInfer takes, and those that it refuses.

What its callers pass in other shapes and types than the documented ones, and the kinds and words of
its errors, which its callers catch and match.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from flashinfer_calls import bf16_call, cutlass_call, fp4_call, fp8_block_call, mxfp8_call
from flashinfer_table import record_part
from test_flashinfer_moe import (
    Data,
    E,
    H,
    I,
    K,
    T,
    check,
    fp4_arguments,
    given,
    prepared,
    swizzled_scales,
)
from test_flashinfer_quantizers import LIBRARIES

import narrowfloat as nf
import narrowfloat.compat.flashinfer as fi

BF16 = ml_dtypes.bfloat16
RNG = np.random.default_rng(72)


@pytest.fixture(params=LIBRARIES, ids=lambda lib: lib.__name__)
def lib(request: pytest.FixtureRequest) -> Any:
    """Where arrays come from."""
    return request.param


@pytest.mark.parametrize("mode", ["nvfp4", "nvfp4_per_token", "mxfp4_mxfp8", "mxfp4_bf16"])
@pytest.mark.parametrize("shape", [(E, -1), (-1,), (E, 2, -1), (E, -1, 4, 4)])
def test_weight_scales_of_any_shape(lib: Any, mode: str, shape: tuple[int, ...]) -> None:
    """Packed scales may come as bytes of experts, flat, or otherwise: the same memory."""
    plain = fp4_call(lib, mode=mode)
    arguments = fp4_arguments(lib, Data(mode))
    scales = {name: np.frombuffer(lib.raw(arguments[name]), np.uint8).copy().reshape(shape)
              for name in ("gemm1_weights_scale", "gemm2_weights_scale")}  # fmt: skip
    assert lib.raw(fp4_call(lib, mode=mode, **scales)) == lib.raw(plain)


def test_biases_of_block_scaled_fp8(lib: Any) -> None:
    """They come in the order of the weights' rows."""
    for mode, call in (("fp8_block", fp8_block_call), ("mxfp8", mxfp8_call)):
        data = Data(mode)
        data.bias1 = data.rng.standard_normal((E, 2 * I)).astype(np.float32) / 4
        data.bias2 = data.rng.standard_normal((E, H)).astype(np.float32) / 4
        bias1, bias2 = data.bias1, data.bias2
        if mode == "mxfp8":
            bias1, bias2 = prepared(bias1, 32, True), prepared(bias2, 32, False)
        got = call(lib, gemm1_bias=bias1, gemm2_bias=bias2)
        check(lib, got, data.expected(data.routed()), mode)


ODD = [(160, 96), (192, 64), (128, 192), (96, 160), (256, 32)]  # Hidden and intermediate sizes.


@pytest.mark.parametrize(("hidden", "inter"), ODD)
@pytest.mark.parametrize("quantized", [False, True])
def test_nvfp4_sizes_of_cutlass(lib: Any, hidden: int, inter: int, quantized: bool) -> None:
    """Scales are one image of 2 * I rows for both halves, padded once at its end."""
    w1 = (RNG.standard_normal((E, 2 * inter, hidden)) / 16).astype(BF16)
    w2 = (RNG.standard_normal((E, hidden, inter)) / 16).astype(BF16)
    q1, q2 = (nf.quantize(w, "nvfp4", batched=True, layout="swizzled_128x4") for w in (w1, w2))
    x = RNG.standard_normal((T, hidden)).astype(BF16)
    ids = np.stack([RNG.permutation(E)[:K] for _ in range(T)]).astype(np.int32)
    config = nf.MoeConfig(hidden=hidden, inter=inter, experts=E, top_k=K, mode="nvfp4",
                          gate_order="up_gate")  # fmt: skip
    first, second = np.float32(600), np.float32(150)
    scales = [np.full(E, q.global_scale[0] / c, np.float32)
              for q, c in ((q1, first), (q2, second))]  # fmt: skip
    layer = nf.MoeLayer.prepare(
        q1.values, q2.values, config, w1_scales=q1.relayout("linear").scales,
        w2_scales=q2.relayout("linear").scales, up_scale=scales[0], gate_scale=scales[0],
        down_scale=scales[1], inter_multiplier=float(second), input_multiplier=float(first),
    )  # fmt: skip
    wanted = layer.run(x, ids=ids, weights=np.ones((T, K), np.float32))
    rows, options = lib.make(x), {}
    if quantized:
        q = nf.quantize(x, "nvfp4", layout="swizzled_128x4", encode_scale=float(first))
        rows, options = lib.make(q.values), {"input_sf": lib.make(q.scales)}
    (got,) = fi.cutlass_fused_moe(
        rows, lib.make(ids), None, lib.make(q1.values.view(np.int64)),
        lib.make(q2.values.view(np.int64)), "bfloat16",
        [lib.make(part) for part in (
            np.float32([first]), q1.scales.view(np.int32).reshape(E, -1), scales[0],
            np.float32([second]), q2.scales.view(np.int32).reshape(E, -1), scales[1])],
        **options,
    )  # fmt: skip
    if lib.__name__ == "Cuda":
        far = np.frombuffer(lib.raw(got), BF16).astype(np.float32).reshape(T, hidden)
        near = wanted.astype(np.float32)
        assert np.linalg.norm(far - near) < 0.015 * np.linalg.norm(near)
    else:
        assert lib.raw(got) == wanted.tobytes()


@pytest.mark.parametrize("kind", [np.float16, np.float32])
def test_cutlass_in_fp16(lib: Any, kind: Any) -> None:
    """Rows and weights of float16 are rounded to bfloat16; the result is of the asked type."""
    data = Data("bf16")
    ids, weights = given(data, lib, "ids")
    w1, w2 = (lib.make(w.astype(np.float16)) for w in (data.w1, data.w2))
    (got,) = fi.cutlass_fused_moe(lib.make(data.x.astype(kind)), ids, weights, w1, w2, "float16",
                                  None)  # fmt: skip
    assert str(got.dtype).endswith("float16") and not str(got.dtype).endswith("bfloat16")
    wanted = data.expected(data.routed())
    found = np.frombuffer(lib.raw(got), np.float16).reshape(T, H).astype(np.float64)
    assert np.linalg.norm(found - wanted) < 5e-3 * np.linalg.norm(wanted)
    record_part("cutlass_fused_moe", "fp16")


def test_cutlass_with_mxfp4_and_fp8(lib: Any) -> None:
    """FP8 rows of one scale: the numbers of bfloat16 rows, but for the intermediate's rounding."""
    data = Data("mxfp4_mxfp8")
    x = data.x.astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
    ids, weights = given(data, lib, "ids")
    first, act, second = RNG.uniform(0.5, 2, E), np.float32([40]), RNG.uniform(1, 2, E)
    config = nf.MoeConfig(hidden=H, inter=I, experts=E, top_k=K, mode="mxfp4_bf16",
                          gate_order="up_gate")  # fmt: skip
    factors = (first.astype(np.float32), (second / act).astype(np.float32))
    layer = nf.MoeLayer.prepare(
        data.w1, data.w2, config, w1_scales=data.s1, w2_scales=data.s2, up_scale=factors[0],
        gate_scale=factors[0], down_scale=second.astype(np.float32))  # fmt: skip
    given_ids, given_weights = (np.frombuffer(lib.raw(part), kind).reshape(T, K)
                                for part, kind in ((ids, np.int32), (weights, np.float32)))
    wanted = layer.run(x.astype(BF16), ids=given_ids, weights=given_weights).astype(np.float64)
    (got,) = fi.cutlass_fused_moe(
        lib.make(x), ids, weights, lib.make(data.w1.view(np.int64)),
        lib.make(data.w2.view(np.int64)), "bfloat16",
        [lib.make(part) for part in (swizzled_scales(data.s1), factors[0], act,
                                     swizzled_scales(data.s2), factors[1])],
    )  # fmt: skip
    found = np.frombuffer(lib.raw(got), BF16).reshape(T, H).astype(np.float64)
    assert np.linalg.norm(found - wanted) < 3e-2 * np.linalg.norm(wanted) > 0
    record_part("cutlass_fused_moe", "MXFP4 x FP8")


def test_bias_and_logits_of_fp16(lib: Any) -> None:
    """fused_topk_deepseek() takes both in any of three types."""
    scores = RNG.standard_normal((4, 64)).astype(np.float16)
    bias = RNG.standard_normal(64).astype(np.float16)
    found = []
    for kind in (np.float16, np.float32):
        values, ids = np.zeros((4, 4), np.float32), np.zeros((4, 4), np.int32)
        out = lib.make(values), lib.make(ids)
        fi.fused_topk_deepseek(lib.make(scores.astype(kind)), lib.make(bias.astype(kind)), 4, 2, 4,
                               2.5, *out, backend="cake")  # fmt: skip
        found.append([lib.raw(part) for part in out])
    assert found[0] == found[1] and any(found[0][1])


def fused_topk(**changes: Any) -> None:
    """A call of fused_topk_deepseek() that works, but for changes."""
    arguments = {"scores": np.zeros((4, 64), np.float32), "bias": np.zeros(64, np.float32),
                 "n_group": 4, "topk_group": 2, "topk": 4, "routed_scaling_factor": 1.0,
                 "topk_values": np.zeros((4, 4), np.float32),
                 "topk_indices": np.zeros((4, 4), np.int32)}  # fmt: skip
    fi.fused_topk_deepseek(**arguments | changes)


def hash_topk(**changes: Any) -> None:
    """A call of hash_topk() that works, but for changes."""
    arguments = {"router_logits": np.zeros((2, E), np.float32),
                 "input_ids": np.zeros(2, np.int64), "tid2eid": np.zeros((3, K), np.int32)}
    fi.hash_topk(**arguments | changes)


SHARED = {"num_fused_shared_experts": 1}
DEEPSEEK = {"routing_method_type": fi.RoutingMethodType.DeepSeekV3}
HALF = {"local_num_experts": E // 2}
ONES = np.ones(E, np.float32)
Call = Callable[[Any], Any]
# The fault -> the call, the kinds that the error must be of, words of the message.
REFUSALS: dict[str, tuple[Call, tuple[type[Exception], ...], str]] = {
    "no group": (lambda lib: bf16_call(lib, **DEEPSEEK, n_group=0, topk_group=0),
                 (ValueError, RuntimeError), "n_group should not be zero"),
    "shared experts of a shard": (
        lambda lib: fp8_block_call(lib, **SHARED, **DEEPSEEK, **HALF, n_group=1, topk_group=1),
        (ValueError,), "expert parallelism"),
    "shared experts of an offset": (
        lambda lib: fp4_call(lib, **SHARED, **HALF, local_expert_offset=E // 2), (ValueError,),
        "expert parallelism"),
    "shared experts of a router": (lambda lib: fp8_block_call(lib, **SHARED), (ValueError,),
                                   "only supported with DeepSeekV3"),
    "shared experts of FP4": (lambda lib: fp4_call(lib, **SHARED), (ValueError,), "DeepSeekV3"),
    "parameters of Geglu": (
        lambda lib: fp8_block_call(lib, activation_type=4, gemm1_alpha=ONES), (ValueError,),
        "gemm1_alpha: .*ActivationType.Swiglu"),
    "kind of FP8": (lambda lib: fp8_block_call(lib, fp8_quantization_type=3), (ValueError,),
                    "Fp8QuantizationType.MxFp8"),
    "swizzled scales of rows": (
        lambda lib: fp4_call(lib, hidden_states_scale_layout=fi.SfLayout.layout_128x4),
        (NotImplementedError,), "hidden_states_scale_layout: expected layout_linear"),
    "valid columns": (lambda lib: fp4_call(lib, valid_hidden_size=H - 16),
                      (NotImplementedError,), f"valid_hidden_size: expected {H}"),
    "valid width": (lambda lib: fp8_block_call(lib, valid_intermediate_size=I - 16),
                    (NotImplementedError,), f"valid_intermediate_size: expected {I}"),
    "replay of another width": (
        lambda lib: bf16_call(lib, routing_replay_out=np.zeros((T, K + 1), np.int16)),
        (ValueError,), "routing_replay_out"),
    "shapes of a layer": (lambda lib: bf16_call(lib, gemm2_weights=np.zeros((E, H, I + 8), BF16)),
                          (ValueError, RuntimeError), "gemm2_weights"),
    "bytes of scales": (
        lambda lib: fp4_call(lib, gemm1_weights_scale=np.zeros(E * 5 + 1, np.uint8)),
        (ValueError, RuntimeError), "gemm1_weights_scale: expected the scales of 8 experts"),
    "size of packed scales": (
        lambda lib: cutlass_call(lib, mode="nvfp4", quant_scales=[
            ONES, np.zeros((E, 7), np.int32), ONES, ONES, np.zeros((E, 7), np.int32), ONES]),
        (ValueError, RuntimeError), "quant_scales: expected 4096 bytes an expert"),
    "backend of a layer": (lambda lib: cutlass_call(lib, backend="trtllm"), (ValueError,),
                           "backend: expected cutlass or cake"),
    "columns of NVFP4": (lambda lib: fi.fp4_quantize(lib.make(np.ones((4, 24), BF16)), 1.0),
                         (ValueError, AssertionError), "input: columns"),
    "columns of MXFP8": (
        lambda lib: fi.mxfp4_quantize(lib.make(np.ones((4, 48), BF16))),
        (ValueError, AssertionError), "a: columns"),
    "shuffled rows": (lambda lib: fi.shuffle_matrix_a(lib.make(np.ones((40, 8), np.uint8)), 128),
                      (ValueError, AssertionError), "multiple of 32 rows"),
    "strided scores": (lambda lib: fused_topk(scores=np.zeros((4, 128), np.float32)[:, ::2]),
                       (ValueError,), "scores: must be contiguous"),
    "strided values": (lambda lib: fused_topk(topk_values=np.zeros((4, 8), np.float32)[:, ::2]),
                       (ValueError,), "topk_values: must be contiguous"),
    "type of token ids": (lambda lib: hash_topk(input_ids=np.zeros(2, np.int32)), (ValueError,),
                          "input_ids: expected int64"),
    "type of the table": (lambda lib: hash_topk(tid2eid=np.zeros((3, K), np.int64)),
                          (ValueError,), "tid2eid: expected int32"),
    "strided table": (lambda lib: hash_topk(tid2eid=np.zeros((3, 2 * K), np.int32)[:, ::2]),
                      (ValueError,), "tid2eid: must be contiguous"),
    "factor of a shared expert": (
        lambda lib: hash_topk(num_fused_shared_experts=1, routed_scaling_factor=-1.0),
        (ValueError,), "positive and finite when a shared expert"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(REFUSALS))
def test_refusals(lib: Any, name: str) -> None:
    """The error is of each kind that callers catch, and has the words that they match."""
    call, kinds, words = REFUSALS[name]
    for kind in kinds:
        with pytest.raises(kind, match=f"(?s){words}"):
            call(lib)


def test_calls_without_faults(lib: Any) -> None:
    """So that each refusal above is of its fault; defaults that mean nothing are taken."""
    fused_topk()
    hash_topk(routed_scaling_factor=-1.0)  # Not read without a shared expert.
    bf16_call(lib, **DEEPSEEK, n_group=1, topk_group=1)
    fp8_block_call(lib, gemm1_alpha=ONES, valid_hidden_size=H, valid_intermediate_size=I)
    fp4_call(lib, valid_hidden_size=H, hidden_states_scale_layout=fi.SfLayout.layout_linear)
    cutlass_call(lib, backend="cake")
    x = lib.make(np.ones((4, 64), BF16))
    for backend in ("cuda", "cute-dsl", "cake"):
        fi.nvfp4_quantize(x, 1.0, backend=backend)
