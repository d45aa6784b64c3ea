"""narrowfloat.compat.flashinfer: what MoE functions refuse, before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from flashinfer_calls import (
    ENTRIES,
    bf16_call,
    cutlass_call,
    fp4_call,
    fp8_block_call,
    fp8_tensor_call,
    mxfp8_call,
)
from flashinfer_table import ABSENT, record
from test_flashinfer_moe import E4M3, H, I, K, T, Data, E, sizes
from test_flashinfer_quantizers import LIBRARIES

import narrowfloat.compat.flashinfer as fi

BF16 = ml_dtypes.bfloat16
PLAIN = Data("bf16")
BLOCK = Data("fp8_block")
TENSOR = Data("fp8_tensor")
IDS = np.zeros((T, K), np.int32)
WRONG_PARAMETER = np.ones(3, np.float32)


@pytest.fixture(params=LIBRARIES, ids=lambda lib: lib.__name__)
def lib(request: pytest.FixtureRequest) -> Any:
    """Where arrays come from."""
    return request.param


def deepseek_cutlass(lib: Any, scales: list[Any]) -> Any:
    """cutlass_fused_moe() with weights in FP8 128x128."""
    return cutlass_call(lib, mode="fp8_block", use_deepseek_fp8_block_scale=True,
                        quant_scales=scales)  # fmt: skip


def fp8_cutlass(lib: Any, scale: Any) -> Any:
    """cutlass_fused_moe() with FP8 weights and rows, with four such scales."""
    return cutlass_call(lib, mode="fp8_tensor", input=TENSOR.rows.codes.view(E4M3),
                        quant_scales=[scale] * 4)  # fmt: skip


# The fault -> the call, and its message: the caller's argument comes first, followed by the
# library's own text.
CASES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "type of w1": (lambda lib: bf16_call(lib, gemm1_weights=PLAIN.w1.astype(np.float32)),
                   "gemm1_weights.*BF16, got F32"),
    "type of w2": (lambda lib: bf16_call(lib, gemm2_weights=PLAIN.w2.astype(np.float16)),
                   "gemm2_weights: .*BF16, got F16"),
    "rows of w1": (lambda lib: bf16_call(lib, gemm1_weights=PLAIN.w1[:, :-2]),
                   "gemm1_weights: .*254"),
    "rows of w2": (lambda lib: bf16_call(lib, gemm2_weights=PLAIN.w2[:, :-2]),
                   "gemm2_weights: .*254"),
    "experts of w1": (lambda lib: bf16_call(lib, gemm1_weights=PLAIN.w1[:4]),
                      r"gemm1_weights: .*BF16\[4"),
    "intermediate size": (lambda lib: bf16_call(lib, intermediate_size=64), "gemm1_weights: .*128"),
    "type of rows": (lambda lib: bf16_call(lib, hidden_states=PLAIN.x.astype(np.float16)),
                     "hidden_states: .*BF16, got float16"),
    "columns of rows": (lambda lib: bf16_call(lib, hidden_states=PLAIN.x[:, :-8]),
                        "hidden_states: .*248"),
    "experts of logits": (lambda lib: bf16_call(lib, routing_logits=PLAIN.logits[:, :4]),
                          "routing_logits: .*8"),
    "tokens of logits": (lambda lib: bf16_call(lib, routing_logits=PLAIN.logits[:2]),
                         "routing_logits: .*5"),
    "length of the bias": (lambda lib: bf16_call(lib, routing_bias=np.zeros(3, np.float32),
                                                 routing_method_type=2, n_group=1, topk_group=1),
                           "routing_bias: .*8"),
    "top_k": (lambda lib: bf16_call(lib, top_k=99), "top_k: .*99"),
    "shape of the output": (lambda lib: bf16_call(lib, output=np.zeros((3, 3), BF16)),
                            "output: .*5"),
    "type of the output": (lambda lib: bf16_call(lib, output=np.zeros((T, 256), np.float32)),
                           "output: .*BF16"),
    "weight layout": (lambda lib: bf16_call(lib, weight_layout=9), "weight_layout.*9"),
    "activation": (lambda lib: bf16_call(lib, activation_type=77), "activation_type.*77"),
    "routing method": (lambda lib: bf16_call(lib, routing_method_type=10), "routing_method_type"),
    "type of ids": (lambda lib: cutlass_call(lib, token_selected_experts=IDS.astype(np.float32)),
                    "token_selected_experts: .*expected integers, got .*float32"),
    "tokens of ids": (lambda lib: cutlass_call(lib, token_selected_experts=IDS[:1]),
                      "token_selected_experts: .*5 tokens"),
    "shape of a bias": (lambda lib: cutlass_call(lib, fc1_expert_biases=np.zeros((2, 2), BF16)),
                        "fc1_expert_biases: "),
    "number of scales": (lambda lib: deepseek_cutlass(lib, [BLOCK.s1]), "quant_scales"),
    "shape of scales": (lambda lib: deepseek_cutlass(lib, [BLOCK.s1[:, :1], BLOCK.s2]),
                        "quant_scales: .*32"),
    "type of scales": (lambda lib: deepseek_cutlass(lib, [BLOCK.s1, BLOCK.s2.astype(np.float64)]),
                       "quant_scales: w2_scales"),
    "scales of experts": (lambda lib: fp8_cutlass(lib, np.ones(3, np.float32)),
                          "quant_scales: .*8.*3"),
    # Faults of other modes, and calls that upstream refuses.
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
        "gemm2_weights: .*F8_E4M3, got BF16"),
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
    """With the words of what is wrong."""
    call, words = CASES[name]
    with pytest.raises(ValueError, match=f"(?s)^{words}"):
        call(lib)


def test_the_arguments_work_without_changes(lib: Any) -> None:
    """So that each error above is of its change."""
    for call in ENTRIES.values():
        call(lib)
    for mode in ("bf16", "nvfp4"):
        cutlass_call(lib, mode=mode)
    deepseek_cutlass(lib, [BLOCK.s1, BLOCK.s2])
    fp8_cutlass(lib, np.ones(1, np.float32))


def test_rows_are_dense(lib: Any) -> None:
    """The last axis is; nothing is copied silently."""
    wide = lib.make(np.repeat(PLAIN.x, 2, 1))
    weights = lib.make(PLAIN.w1.copy()), lib.make(PLAIN.w2.copy())
    with pytest.raises(ValueError, match="^hidden_states: .*dense"):
        fi.trtllm_bf16_moe(lib.make(PLAIN.logits.copy()), None, wide[:, ::2], *weights, **sizes(),
                           use_shuffled_weight=False, weight_layout=0)  # fmt: skip


def test_ids_out_of_range_on_the_cpu(lib: Any) -> None:
    """Where they can be looked at."""
    if lib.__name__ == "Cuda":
        cutlass_call(lib, token_selected_experts=IDS + 99)  # Slots without an expert.
        return
    with pytest.raises(ValueError, match="ids.*99"):
        cutlass_call(lib, token_selected_experts=IDS + 99)


def refusals() -> dict[str, Any]:
    """Arguments that are not offered."""
    x = np.zeros((T, H), BF16)
    ids = np.zeros((T, K), np.int32)
    fc1, fc2 = np.zeros((E, 2 * I, H), BF16), np.zeros((E, H, I), BF16)
    common = (x, ids, None, fc1, fc2, "bfloat16", [])
    return {
        "min_latency_mode": lambda: fi.cutlass_fused_moe(*common, min_latency_mode=True),
        "cluster_size": lambda: fi.cutlass_fused_moe(*common, cluster_size=2),
        "cluster_rank": lambda: fi.cutlass_fused_moe(*common, cluster_size=1, cluster_rank=1),
        "int64 with float8_e4m3fn rows": lambda: fi.cutlass_fused_moe(
            x.astype(E4M3), ids, None, fc1.view(np.int64), fc2.view(np.int64), "bfloat16",
            [np.ones(E, np.float32)] * 4),
        "use_w4_group_scaling": lambda: fi.cutlass_fused_moe(*common, use_w4_group_scaling=True),
        "use_packed_weights": lambda: fi.cutlass_fused_moe(*common, use_packed_weights=True),
        "use_wfp4afp8_humming": lambda: fi.cutlass_fused_moe(*common, use_wfp4afp8_humming=True),
        "fc1_expert_weights": lambda: fi.cutlass_fused_moe(
            x, ids, None, fc1.astype(np.float32), fc2.astype(np.float32), "float16", []),
        "gemm1_lora_delta": lambda: fi.trtllm_bf16_routed_moe(
            ids, x, fc1, fc2, **sizes(), gemm1_lora_delta=x),
        "activation_type": lambda: fi.trtllm_bf16_moe(
            np.zeros((T, E), np.float32), None, x, fc1[:, :I], fc2, **sizes(), activation_type=0,
            use_shuffled_weight=False, weight_layout=0),
        "gemm1_weights": lambda: fi.trtllm_mxint4_block_scale_moe(*[None] * 18),
        "clamped_relu2_limit": lambda: fi.cutlass_fused_moe(*common, clamped_relu2_limit=x),
    }  # fmt: skip


@pytest.mark.parametrize("word", list(refusals()))
def test_what_is_not_offered_names_its_argument(word: str) -> None:
    """NotImplementedError."""
    with pytest.raises(NotImplementedError, match=word):
        refusals()[word]()


def test_absent_functions() -> None:
    """Functions that only refuse."""
    for name, count in (("trtllm_mxint4_block_scale_moe", 18),
                        ("trtllm_mxint4_block_scale_routed_moe", 17)):  # fmt: skip
        with pytest.raises(NotImplementedError):
            getattr(fi, name)(*[None] * count)
        record(name, ABSENT, "the library has no int4")
