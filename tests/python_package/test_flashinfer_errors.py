"""narrowfloat.compat.flashinfer: what MoE functions refuse, before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from test_flashinfer_moe import E4M3, K, T, Data, sizes
from test_flashinfer_quantizers import LIBRARIES

import narrowfloat.compat.flashinfer as fi

BF16 = ml_dtypes.bfloat16
PLAIN = Data("bf16")
BLOCK = Data("fp8_block")
TENSOR = Data("fp8_tensor")
IDS = np.zeros((T, K), np.int32)


@pytest.fixture(params=LIBRARIES, ids=lambda lib: lib.__name__)
def lib(request: pytest.FixtureRequest) -> Any:
    """Where arrays come from."""
    return request.param


def bf16(lib: Any, **changes: Any) -> Any:
    """trtllm_bf16_moe() with arguments that work, but for the changes."""
    given = {"routing_logits": PLAIN.logits, "routing_bias": None, "hidden_states": PLAIN.x,
             "gemm1_weights": PLAIN.w1, "gemm2_weights": PLAIN.w2, **sizes(),
             "use_shuffled_weight": False, "weight_layout": 0, **changes}  # fmt: skip
    return fi.trtllm_bf16_moe(**{
        name: lib.make(value.copy()) if isinstance(value, np.ndarray) else value
        for name, value in given.items()
    })  # fmt: skip


def cutlass(lib: Any, data: Data, scales: list, x: Any = None, ids: Any = IDS, **how: Any) -> Any:
    """cutlass_fused_moe()."""
    def make(value: Any) -> Any:
        return lib.make(value.copy()) if isinstance(value, np.ndarray) else value

    return fi.cutlass_fused_moe(
        make(data.x if x is None else x), make(ids), None, make(data.w1), make(data.w2), "bfloat16",
        [make(scale) for scale in scales], **{name: make(value) for name, value in how.items()}
    )  # fmt: skip


# What is wrong -> the call, and how the message goes: the caller's argument comes first, behind it
# what the library says of its own.
CASES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "type of w1": (lambda lib: bf16(lib, gemm1_weights=PLAIN.w1.astype(np.float32)),
                   "gemm1_weights.*BF16, got F32"),
    "type of w2": (lambda lib: bf16(lib, gemm2_weights=PLAIN.w2.astype(np.float16)),
                   "gemm1_weights, gemm2_weights.*BF16, got F16"),
    "rows of w1": (lambda lib: bf16(lib, gemm1_weights=PLAIN.w1[:, :-2]), "gemm1_weights: .*254"),
    "rows of w2": (lambda lib: bf16(lib, gemm2_weights=PLAIN.w2[:, :-2]), "gemm2_weights: .*254"),
    "experts of w1": (lambda lib: bf16(lib, gemm1_weights=PLAIN.w1[:4]),
                      r"gemm1_weights: .*BF16\[4"),
    "intermediate size": (lambda lib: bf16(lib, intermediate_size=64), "gemm1_weights: .*128"),
    "type of rows": (lambda lib: bf16(lib, hidden_states=PLAIN.x.astype(np.float16)),
                     "hidden_states: .*BF16, got F16"),
    "columns of rows": (lambda lib: bf16(lib, hidden_states=PLAIN.x[:, :-8]),
                        "hidden_states: .*248"),
    "experts of logits": (lambda lib: bf16(lib, routing_logits=PLAIN.logits[:, :4]),
                          "routing_logits: .*8"),
    "tokens of logits": (lambda lib: bf16(lib, routing_logits=PLAIN.logits[:2]),
                         "routing_logits: .*5"),
    "length of the bias": (lambda lib: bf16(lib, routing_bias=np.zeros(3, np.float32),
                                            routing_method_type=2, n_group=1, topk_group=1),
                           "routing_bias: .*8"),
    "top_k": (lambda lib: bf16(lib, top_k=99), "top_k: .*99"),
    "shape of the output": (lambda lib: bf16(lib, output=np.zeros((3, 3), BF16)), "output: .*5"),
    "type of the output": (lambda lib: bf16(lib, output=np.zeros((T, 256), np.float32)),
                           "output: .*BF16"),
    "weight layout": (lambda lib: bf16(lib, weight_layout=9), "weight_layout.*9"),
    "activation": (lambda lib: bf16(lib, activation_type=77), "activation_type.*77"),
    "routing method": (lambda lib: bf16(lib, routing_method_type=10), "routing_method_type"),
    "type of ids": (lambda lib: cutlass(lib, PLAIN, [], ids=IDS.astype(np.float32)),
                    "token_selected_experts: .*I32"),
    "tokens of ids": (lambda lib: cutlass(lib, PLAIN, [], ids=IDS[:1]),
                      "token_selected_experts: .*5 tokens"),
    "shape of a bias": (lambda lib: cutlass(lib, PLAIN, [],
                                            fc1_expert_biases=np.zeros((2, 2), BF16)),
                        "fc1_expert_biases: "),
    "number of scales": (lambda lib: cutlass(lib, BLOCK, [BLOCK.s1],
                                             use_deepseek_fp8_block_scale=True), "quant_scales"),
    "shape of scales": (lambda lib: cutlass(lib, BLOCK, [BLOCK.s1[:, :1], BLOCK.s2],
                                            use_deepseek_fp8_block_scale=True),
                        "quant_scales: .*32"),
    "type of scales": (lambda lib: cutlass(lib, BLOCK, [BLOCK.s1, BLOCK.s2.astype(np.float64)],
                                           use_deepseek_fp8_block_scale=True),
                       "quant_scales: w2_scales"),
    "scales of experts": (lambda lib: cutlass(lib, TENSOR, [np.ones(3, np.float32)] * 4,
                                              TENSOR.rows.codes.view(E4M3)),
                          "quant_scales: .*8.*3"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(CASES))
def test_value_errors(lib: Any, name: str) -> None:
    """With the words of what is wrong."""
    call, words = CASES[name]
    with pytest.raises(ValueError, match=f"(?s)^{words}"):
        call(lib)


def test_the_arguments_work_without_changes(lib: Any) -> None:
    """So that each error above is of its change."""
    bf16(lib)
    cutlass(lib, PLAIN, [])
    cutlass(lib, BLOCK, [BLOCK.s1, BLOCK.s2], use_deepseek_fp8_block_scale=True)
    cutlass(lib, TENSOR, [np.ones(1, np.float32)] * 4, TENSOR.rows.codes.view(E4M3))


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
        cutlass(lib, PLAIN, [], ids=IDS + 99)  # Slots without an expert.
        return
    with pytest.raises(ValueError, match="ids.*99"):
        cutlass(lib, PLAIN, [], ids=IDS + 99)
