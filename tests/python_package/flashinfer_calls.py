"""Calls of narrowfloat.compat.flashinfer's MoE functions that work, but for given changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from test_flashinfer_moe import (
    E4M3,
    H,
    K,
    T,
    Data,
    fp4_arguments,
    swizzled_scales,
    prepared,
    prepared_scales,
    sizes,
)

import narrowfloat.compat.flashinfer as fi

PLAIN = {"use_shuffled_weight": False, "weight_layout": 0}


def made(lib: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """With arrays of the library, those in lists, too."""
    def of(value: Any) -> Any:
        if isinstance(value, list):
            return [of(part) for part in value]
        return lib.make(np.ascontiguousarray(value)) if isinstance(value, np.ndarray) else value

    return {name: of(value) for name, value in arguments.items()}


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


def cutlass_call(lib: Any, tokens: int = T, mode: str = "bf16", **changes: Any) -> Any:
    """cutlass_fused_moe() with a mode's weights and bfloat16 rows; its scales for NVFP4 alone."""
    data = Data(mode)
    scales: Any = []
    w1, w2 = data.w1, data.w2
    if mode == "nvfp4":
        w1, w2 = w1.view(np.int64), w2.view(np.int64)
        scales = [np.float32([600]), swizzled_scales(data.s1), data.each["up_scale"],
                  np.float32([150]), swizzled_scales(data.s2), data.each["down_scale"]]  # fmt: skip
    (out,) = fi.cutlass_fused_moe(**made(lib, {
        "input": data.x[:tokens], "token_selected_experts": np.zeros((tokens, K), np.int32),
        "token_final_scales": None, "fc1_expert_weights": w1, "fc2_expert_weights": w2,
        "output_dtype": "bfloat16", "quant_scales": scales, **changes,
    }))  # fmt: skip
    return out
