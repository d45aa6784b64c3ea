"""narrowfloat.compat.flashinfer: no tokens, upstream's limits, and arguments nobody would read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from test_flashinfer_moe import (
    E4M3,
    LIBRARIES,
    H,
    I,
    K,
    T,
    Data,
    E,
    fp4_arguments,
    images,
    prepared,
    prepared_scales,
    sizes,
)

import narrowfloat.compat.flashinfer as fi

BF16 = ml_dtypes.bfloat16
PLAIN = {"use_shuffled_weight": False, "weight_layout": 0}
GROUPS = {"n_group": 1, "topk_group": 1}


@pytest.fixture(params=LIBRARIES, ids=lambda lib: lib.__name__)
def lib(request: pytest.FixtureRequest) -> Any:
    """Where arrays come from."""
    return request.param


def made(lib: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """With arrays of the library."""
    return {name: lib.make(np.ascontiguousarray(value)) if isinstance(value, np.ndarray) else value
            for name, value in arguments.items()}  # fmt: skip


def bf16_call(lib: Any, tokens: int = T, **changes: Any) -> Any:
    """trtllm_bf16_moe()."""
    data = Data("bf16")
    return fi.trtllm_bf16_moe(**made(lib, {
        "routing_logits": data.logits[:tokens], "routing_bias": None,
        "hidden_states": data.x[:tokens], "gemm1_weights": data.w1, "gemm2_weights": data.w2,
        **sizes(), **PLAIN, **changes,
    }))  # fmt: skip


def fp8_tensor_call(lib: Any, tokens: int = T, **changes: Any) -> Any:
    """trtllm_fp8_per_tensor_scale_moe()."""
    data = Data("fp8_tensor")
    return fi.trtllm_fp8_per_tensor_scale_moe(**made(lib, {
        "routing_logits": data.logits[:tokens], "routing_bias": None,
        "hidden_states": data.rows.codes.view(E4M3)[:tokens],
        "gemm1_weights": prepared(data.w1, 32, True),
        "output1_scales_scalar": data.each["up_scale"],
        "output1_scales_gate_scalar": data.each["up_scale"],
        "gemm2_weights": prepared(data.w2, 32, False),
        "output2_scales_scalar": data.each["down_scale"], **sizes(),
        "use_routing_scales_on_input": False, **changes,
    }))  # fmt: skip


def fp8_block_call(lib: Any, tokens: int = T, **changes: Any) -> Any:
    """trtllm_fp8_block_scale_moe() with DeepSeek's scales."""
    data = Data("fp8_block")
    return fi.trtllm_fp8_block_scale_moe(**made(lib, {
        "routing_logits": data.logits[:tokens], "routing_bias": None,
        "hidden_states": data.rows.codes.view(E4M3)[:tokens],
        "hidden_states_scale": data.rows.scales[:tokens].T, "gemm1_weights": data.w1,
        "gemm1_weights_scale": data.s1, "gemm2_weights": data.w2, "gemm2_weights_scale": data.s2,
        **sizes(), **changes,
    }))  # fmt: skip


def mxfp8_call(lib: Any, tokens: int = T, **changes: Any) -> Any:
    """The same function with scales of 32."""
    data = Data("mxfp8")
    return fi.trtllm_fp8_block_scale_moe(**made(lib, {
        "routing_logits": data.logits[:tokens], "routing_bias": None,
        "hidden_states": data.rows.codes.view(E4M3)[:tokens],
        "hidden_states_scale": data.rows.scales[:tokens],
        "gemm1_weights": prepared(data.w1, 32, True),
        "gemm1_weights_scale": prepared_scales(data.s1, True),
        "gemm2_weights": prepared(data.w2, 32, False),
        "gemm2_weights_scale": prepared_scales(data.s2, False), **sizes(),
        "use_shuffled_weight": True, "fp8_quantization_type": fi.Fp8QuantizationType.MxFp8,
        **changes,
    }))  # fmt: skip


def fp4_call(lib: Any, tokens: int = T, mode: str = "nvfp4", **changes: Any) -> Any:
    """trtllm_fp4_block_scale_moe()."""
    data = Data(mode)
    rows, scales = data.rows.codes, data.rows.scales
    if mode == "mxfp4_mxfp8":
        rows = rows.view(E4M3)
    arguments = {"routing_logits": data.logits[:tokens], "routing_bias": None,
                 "hidden_states": data.x[:tokens] if mode == "mxfp4_bf16" else rows[:tokens],
                 "hidden_states_scale": None if scales is None else scales.view(E4M3)[:tokens],
                 **fp4_arguments(lib, data), **sizes(), **changes}  # fmt: skip
    if mode == "nvfp4_per_token":
        arguments["per_token_scale"] = data.rows.row_scale[:tokens]
    result = fi.trtllm_fp4_block_scale_moe(**made(lib, arguments))
    return result[0] if len(result) == 1 else result


def fp4_case(mode: str) -> Callable[..., Any]:
    """The same of a mode."""
    return lambda lib, tokens=T, **changes: fp4_call(lib, tokens, mode, **changes)


ENTRIES: dict[str, Callable[..., Any]] = {
    "bf16": bf16_call, "fp8_tensor": fp8_tensor_call, "fp8_block": fp8_block_call,
    "mxfp8": mxfp8_call,
    **{mode: fp4_case(mode) for mode in ("nvfp4", "nvfp4_per_token", "mxfp4_mxfp8", "mxfp4_bf16")},
}  # fmt: skip


@pytest.mark.parametrize("mode", list(ENTRIES))
def test_no_tokens(lib: Any, mode: str) -> None:
    """Empty results, of both kinds."""
    call = ENTRIES[mode]
    assert tuple(call(lib, 0).shape) == (0, H)
    rows, weights, places = call(lib, 0, do_finalize=False)
    assert rows.shape[1] == H and tuple(weights.shape) == (0, K) and tuple(places.shape) == (0,)
    assert tuple(call(lib).shape) == (T, H)


def cutlass_call(lib: Any, tokens: int = T, mode: str = "bf16", **changes: Any) -> Any:
    """cutlass_fused_moe() with bfloat16 or NVFP4 weights and bfloat16 rows."""
    data = Data(mode)
    scales: Any = []
    w1, w2 = data.w1, data.w2
    if mode == "nvfp4":
        w1, w2 = w1.view(np.int64), w2.view(np.int64)
        parts = (np.float32([600]), images(data.s1), data.each["up_scale"], np.float32([150]),
                 images(data.s2), data.each["down_scale"])  # fmt: skip
        scales = [lib.make(part) for part in parts]
    (out,) = fi.cutlass_fused_moe(**made(lib, {
        "input": data.x[:tokens], "token_selected_experts": np.zeros((tokens, K), np.int32),
        "token_final_scales": None, "fc1_expert_weights": w1, "fc2_expert_weights": w2,
        "output_dtype": "bfloat16", "quant_scales": scales, **changes,
    }))  # fmt: skip
    return out


def test_no_tokens_of_cutlass(lib: Any) -> None:
    """With rows that are coded on the way, too."""
    for mode in ("bf16", "nvfp4"):
        assert tuple(cutlass_call(lib, 0, mode).shape) == (0, H)


def test_no_quant_scales(lib: Any) -> None:
    """None is as good as an empty list."""
    assert lib.raw(cutlass_call(lib, quant_scales=None)) == lib.raw(cutlass_call(lib))


WRONG_PARAMETER = np.ones(3, np.float32)
# What is wrong -> the call, and how the message begins.
CASES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "k": (lambda lib: bf16_call(lib, top_k=E + 1), "top_k: expected 1 to 8"),
    "negative offset": (lambda lib: bf16_call(lib, local_expert_offset=-1),
                        "local_expert_offset: "),
    "shard beyond the experts": (lambda lib: bf16_call(lib, local_expert_offset=1),
                                 "local_num_experts: expected 1 to 7"),
    "no groups": (lambda lib: bf16_call(lib, routing_method_type=2), "n_group: .*None"),
    "groups that do not divide": (
        lambda lib: bf16_call(lib, routing_method_type=2, n_group=3, topk_group=1), "n_group: .*3"),
    "more than 4 groups": (
        lambda lib: bf16_call(lib, routing_method_type=2, n_group=8, topk_group=5),
        "topk_group: expected 1 to 4"),
    "as many as the groups keep": (
        lambda lib: bf16_call(lib, routing_method_type=2, n_group=4, topk_group=1),
        "top_k: expected 1 to 1 of 2"),
    "parameter that Relu2 has not": (
        lambda lib: bf16_call(lib, activation_type=6, gemm1_weights=Data("bf16", "relu2").w1,
                              gemm1_clamp_limit=np.ones(E, np.float32)),
        "gemm1_clamp_limit: Relu2"),
    "length of alpha": (lambda lib: bf16_call(lib, gemm1_alpha=WRONG_PARAMETER), "gemm1_alpha: "),
    "axes of rows": (lambda lib: bf16_call(lib, hidden_states=Data("bf16").x[0]),
                     "hidden_states: expected an array of 2 axes"),
    "axes of blocked weights": (lambda lib: bf16_call(lib, weight_layout=2),
                                "gemm1_weights: expected an array of 4 axes"),
    "rows of shuffled weights": (
        lambda lib: bf16_call(lib, use_shuffled_weight=True, gemm1_weights=Data("bf16").w1[:, :40]),
        "gemm1_weights: expected a multiple of 32 rows"),
    "replay": (lambda lib: bf16_call(lib, routing_replay_out=np.zeros((T, K), np.int32)),
               "routing_replay_out: "),
    "length of an FP8 scalar": (
        lambda lib: fp8_tensor_call(lib, output2_scales_scalar=WRONG_PARAMETER),
        "output2_scales_scalar: expected 1 or 8"),
    "no FP8 scalar": (lambda lib: fp8_tensor_call(lib, output1_scales_scalar=None),
                      "output1_scales_scalar: .*None"),
    "FP8 rows without scales": (lambda lib: fp8_block_call(lib, hidden_states_scale=None),
                                "hidden_states_scale: .*None"),
    "FP8 k": (lambda lib: fp8_block_call(lib, top_k=E), "num_experts: .*above top_k 8"),
    "FP8 experts": (lambda lib: fp8_block_call(lib, num_experts=6, local_num_experts=6),
                    "num_experts: expected a multiple of 4"),
    "FP8 scales of weights": (
        lambda lib: fp8_block_call(lib, gemm1_weights_scale=np.ones((E, 1, 1), np.float32)),
        "gemm1_weights_scale"),
    "FP8 type of weights": (
        lambda lib: fp8_block_call(lib, gemm2_weights=Data("bf16").w2),
        "gemm1_weights, gemm2_weights: .*F8_E4M3, got BF16"),
    "canonical MXFP8": (lambda lib: mxfp8_call(lib, use_shuffled_weight=False),
                        "use_shuffled_weight: "),
    "no NVFP4 scalar": (lambda lib: fp4_call(lib, output1_scale_gate_scalar=None),
                        "output1_scale_gate_scalar: .*None"),
    "length of an NVFP4 scalar": (lambda lib: fp4_call(lib, output2_scale_scalar=WRONG_PARAMETER),
                                  "output2_scale_scalar: expected 1 or 8"),
    "no FP4 scales": (lambda lib: fp4_call(lib, gemm1_weights_scale=None),
                      "gemm1_weights_scale: .*None"),
    "FP4 limit": (lambda lib: fp4_call(lib, gemm1_clamp_limit=WRONG_PARAMETER),
                  "gemm1_clamp_limit: expected 1 or 8"),
    "FP4 beta": (lambda lib: fp4_call(lib, gemm1_beta=WRONG_PARAMETER), "gemm1_beta: "),
    "FP4 bias": (lambda lib: fp4_call(lib, gemm2_bias=np.ones(H, np.float32)), "gemm2_bias: "),
    "rows of FP4 weights": (
        lambda lib: fp4_call(lib, gemm2_weights=np.zeros((E, 40, I // 2), np.uint8)),
        "gemm2_weights: expected a multiple of 32 rows"),
    "scales of rows": (
        lambda lib: fp4_call(lib, mode="nvfp4_per_token", hidden_states_scale=np.zeros(
            (T, 3), np.uint8)), "hidden_states_scale: expected 80 scales"),
    "no logits": (lambda lib: bf16_call(lib, routing_logits=None), "routing_logits: .*None"),
    "alpha of SwigluStep": (
        lambda lib: bf16_call(lib, activation_type=fi.ActivationType.SwigluStep,
                              gemm1_alpha=np.ones(E, np.float32)), "gemm1_alpha: "),
    "scale of MXFP4 rows": (
        lambda lib: fp4_call(lib, mode="mxfp4_mxfp8", per_token_scale=np.ones(T, np.float32)),
        "per_token_scale: "),
    "type of the result": (lambda lib: cutlass_call(lib, output_dtype="int8"), "output_dtype: "),
    "MXFP8 beside DeepSeek": (
        lambda lib: cutlass_call(lib, use_deepseek_fp8_block_scale=True, use_mxfp8_act_scaling=True,
                                 quant_scales=[np.ones((E, 2, 2), np.float32)] * 2),
        "use_mxfp8_act_scaling: "),
    "rank of tensor parallelism": (lambda lib: cutlass_call(lib, tp_rank=1), "tp_rank: "),
    "rank of experts": (lambda lib: cutlass_call(lib, ep_size=2, ep_rank=2), "ep_rank: "),
    "parameter of Situ": (lambda lib: cutlass_call(lib, situ_beta=1.0), "situ_beta: "),
    "scales that nobody reads": (lambda lib: cutlass_call(lib, quant_scales=[np.ones(1)]),
                                 "quant_scales: bfloat16 has 0"),
    "MXFP8 rows that are bfloat16": (lambda lib: cutlass_call(lib, use_mxfp8_act_scaling=True),
                                     "use_mxfp8_act_scaling: "),
    "no scales": (lambda lib: cutlass_call(lib, mode="nvfp4", quant_scales=None),
                  "quant_scales: NVFP4 has 6"),
    "parameter of cutlass": (lambda lib: cutlass_call(lib, swiglu_alpha=WRONG_PARAMETER),
                             "swiglu_alpha: "),
    "limit of cutlass": (
        lambda lib: cutlass_call(lib, activation_type=6, swiglu_limit=np.ones(E, np.float32),
                                 fc1_expert_weights=Data("bf16", "relu2").w1),
        "swiglu_limit: Relu2"),
    "axes of cutlass": (lambda lib: cutlass_call(lib, fc2_expert_weights=Data("bf16").w2[0]),
                        "fc2_expert_weights: expected an array of 3 axes"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(CASES))
def test_value_errors(lib: Any, name: str) -> None:
    """The caller's argument comes first."""
    call, words = CASES[name]
    with pytest.raises(ValueError, match=f"(?s)^{words}"):
        call(lib)


def test_the_calls_work_without_changes(lib: Any) -> None:
    """So that each error above is of its change."""
    for call in ENTRIES.values():
        call(lib)
    for mode in ("bf16", "nvfp4"):
        cutlass_call(lib, mode=mode)


def logits_of(lib: Any, experts: int) -> Any:
    """Of three tokens."""
    return lib.make(np.random.default_rng(5).standard_normal((3, experts)).astype(np.float32))


ROUTER_CASES: dict[str, tuple[int, int, int, dict[str, int], str]] = {
    # Experts, method, k, other arguments; how the message begins.
    "k of renormalize": (64, 1, 33, {}, "top_k: renormalize takes up to 32"),
    "k of DeepSeekV3": (64, 2, 9, GROUPS, "top_k: expected 1 to 8"),
    "k of many experts": (512, 2, 23, GROUPS, "top_k: expected 1 to 22"),
    "no kept groups": (64, 2, 4, {"n_group": 4, "topk_group": 0}, "topk_group: "),
    "groups kept": (64, 2, 4, {"n_group": 8, "topk_group": 5}, "topk_group: expected 1 to 4"),
    "all of the kept": (64, 2, 8, {"n_group": 8, "topk_group": 1}, "top_k: expected 1 to 7 of 8"),
    "shard": (64, 1, 4, {"local_expert_offset": 32, "local_num_experts": 33},
              "local_num_experts: expected 1 to 32"),
    "no shard": (64, 1, 4, {"local_num_experts": 0}, "local_num_experts: "),
}  # fmt: skip


@pytest.mark.parametrize("name", list(ROUTER_CASES))
def test_router_limits(lib: Any, name: str) -> None:
    """Of trtllm_gen_routing()."""
    experts, method, k, options, words = ROUTER_CASES[name]
    with pytest.raises(ValueError, match=f"^{words}"):
        fi.trtllm_gen_routing(logits_of(lib, experts), None, method, k, **options)


def test_routers_take_what_is_at_the_limit(lib: Any) -> None:
    """k of 32, 8 and 22; the last shard."""
    for experts, method, k, options in ((64, 1, 32, {}), (64, 2, 8, GROUPS), (512, 2, 22, GROUPS),
                                        (64, 2, 7, {"n_group": 8, "topk_group": 1}),
                                        (64, 1, 4, {"local_expert_offset": 32,
                                                    "local_num_experts": 32})):  # fmt: skip
        bias = lib.make(np.zeros(experts, np.float32))
        got = fi.trtllm_gen_routing(logits_of(lib, experts), bias, method, k, **options)
        assert tuple(got.topk_ids.shape) == (3, k)


FUSED_CASES: dict[str, tuple[int, int, int, int, str]] = {
    # Experts, groups, kept groups, k; how the message begins.
    "k": (64, 4, 2, 9, "topk: expected 1 to 8"),
    "k of many experts": (385, 1, 1, 9, "topk: expected up to 8"),
    "no groups": (64, 0, 1, 4, "n_group: "),
    "more kept than groups": (64, 2, 3, 4, "topk_group: expected 1 to 2"),
    "experts": (385, 1, 1, 4, "scores: expected up to 384"),
    "experts in groups": (288, 12, 2, 4, "scores: expected up to 256"),
    "large groups": (128, 2, 1, 4, "n_group: expected up to 32"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(FUSED_CASES))
def test_fused_topk_limits(lib: Any, name: str) -> None:
    """Of fused_topk_deepseek(), which writes nothing then."""
    experts, groups, kept, k, words = FUSED_CASES[name]
    values, ids = lib.make(np.full((3, k), 7, np.float32)), lib.make(np.full((3, k), 7, np.int32))
    with pytest.raises(ValueError, match=f"^{words}"):
        fi.fused_topk_deepseek(logits_of(lib, experts), lib.make(np.zeros(experts, np.float32)),
                               groups, kept, k, 1.0, values, ids)  # fmt: skip
    assert set(lib.raw(ids)) == {0, 7}


def test_fused_topk_writes_nothing_before_all_checks(lib: Any) -> None:
    """Not ids, where the values or the backend are wrong, and no replay."""
    logits, bias = logits_of(lib, 64), lib.make(np.zeros(64, np.float32))
    ids, replay = lib.make(np.full((3, 4), 7, np.int32)), lib.make(np.full((3, 4), 7, np.int16))
    good = lib.make(np.zeros((3, 4), np.float32))
    wide, whole = lib.make(np.zeros((3, 5), np.float32)), lib.make(np.zeros((3, 4), np.int32))
    for values, backend, words in ((wide, "default", "topk_values"),
                                   (whole, "default", "topk_values"), (good, "vulkan", "backend")):
        with pytest.raises(ValueError, match=f"^{words}: "):
            fi.fused_topk_deepseek(logits, bias, 1, 1, 4, 1.0, values, ids,
                                   routing_replay_out=replay, backend=backend)  # fmt: skip
    assert lib.raw(ids) == np.full((3, 4), 7, np.int32).tobytes()
    assert lib.raw(replay) == np.full((3, 4), 7, np.int16).tobytes()


def test_moe_sort_writes_nothing_before_all_checks(lib: Any) -> None:
    """Not the first output, where the second is wrong."""
    ids = lib.make(np.zeros((3, 2), np.int32))
    maps = fi.moe_sort(ids, None, 8, 2)
    first = lib.make(np.full(tuple(maps[0].shape), 7, np.int32))
    for wrong, argument in ((np.zeros(1, np.int32), "out_tile_idx_to_mn_limit"),
                            (np.zeros(tuple(maps[1].shape), np.int64), "out_tile_idx_to_mn_limit")):
        with pytest.raises(ValueError, match=f"^{argument}: "):
            fi.moe_sort(ids, None, 8, 2, out_tile_idx_to_expert_idx=first,
                        **{argument: lib.make(wrong)})  # fmt: skip
    assert set(np.frombuffer(lib.raw(first), np.int32)) == {7}
    if isinstance(first, np.ndarray):
        ends = np.zeros(tuple(maps[1].shape), np.int32)
        ends.flags.writeable = False
        with pytest.raises(ValueError, match="^out_tile_idx_to_mn_limit: .*read-only"):
            fi.moe_sort(ids, None, 8, 2, out_tile_idx_to_expert_idx=first,
                        out_tile_idx_to_mn_limit=ends)  # fmt: skip
        assert set(first) == {7}
    with pytest.raises(ValueError, match="^num_local_experts: "):
        fi.moe_sort(ids, None, 8, 2, num_local_experts=9)
