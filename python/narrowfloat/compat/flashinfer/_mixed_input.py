"""MXFP4 weights interleaved for Hopper's mixed-input kernels, and back in canonical order.

These are the weights of `cutlass_fused_moe(use_w4_group_scaling=True)`. In
blocks of 16 rows and 32 bytes, word q of the 16 bytes g of row r + 8 h holds bytes
8 (2 g + h) + q and + 4 of rows r and r + 8, with its bits in another order.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from narrowfloat._arrays import is_torch
from narrowfloat.compat.flashinfer._arguments import accepts
from narrowfloat.compat.flashinfer._arrays import as_bytes, contiguous, dtype_name, transpose
from narrowfloat.compat.flashinfer._errors import CheckError

# Runs of bits of a word: place in four codes' bytes, place in the interleaved word, length.
_RUNS = ((7, 31, 1), (4, 22, 3), (3, 15, 1), (0, 6, 3), (15, 28, 1), (12, 19, 3), (11, 12, 1),
         (8, 3, 3), (23, 25, 1), (20, 16, 3), (19, 9, 1), (16, 0, 3), (31, 30, 1), (29, 26, 2),
         (28, 29, 1), (27, 14, 1), (25, 10, 2), (24, 13, 1))  # fmt: skip


def _as_words(array: Any) -> Any:
    return array.view(sys.modules["torch"].int32 if is_torch(array) else np.int32)


def _restore_bits(words: Any) -> Any:
    """int32 words of four bytes as they were."""
    bits = words & 0
    for place, held, length in _RUNS:
        bits |= ((words >> held) & ((1 << length) - 1)) << place
    return bits


def _mix_bits(words: Any) -> Any:
    """The way back from _restore_bits()."""
    held = words & 0
    for place, at, length in _RUNS:
        held |= ((words >> place) & ((1 << length) - 1)) << at
    return held


def _refuse_quant_type(quant_type: str) -> None:
    if quant_type in ("int4", "fp4_fp8"):
        raise NotImplementedError(f"quant_type: {quant_type} is not offered; fp4 is")
    if quant_type != "fp4":
        raise ValueError(
            f"quant_type: quant_type must be one of fp4, fp4_fp8, int4; got {quant_type!r}"
        )


@accepts("weight")
def interleave_moe_weights_for_sm90_mixed_gemm(weight: Any, quant_type: str = "fp4") -> Any:
    """Weights of cutlass_fused_moe(use_w4_group_scaling=True): uint8 [experts, n, k / 2].

    weight: uint8 [experts, n, k / 2], two codes a byte; n a multiple of 16, k of 64.
    quant_type: "fp4"; "fp4_fp8" and "int4" are not offered.
    """
    _refuse_quant_type(quant_type)
    if len(weight.shape) != 3:
        raise ValueError(
            f"weight: weight must be 3D (num_experts, n, k/2); got {tuple(weight.shape)}"
        )
    if dtype_name(weight) != "uint8":
        raise ValueError(
            f"weight: weight must be uint8 (packed 4-bit), got {dtype_name(weight)}"
        )
    experts, rows, width = weight.shape
    if rows % 16 or width % 32:
        raise CheckError(
            f"weight: expected multiples of 16 rows and 64 columns, got {rows} x {2 * width}"
        )
    #                                                       +8 r            g  h  +4 q
    parts = contiguous(weight).reshape(experts, rows // 16, 2, 8, width // 32, 2, 2, 2, 4)
    held = contiguous(transpose(parts, 0, 1, 6, 3, 4, 5, 8, 7, 2))
    words = _mix_bits(_as_words(held.reshape(experts, rows, width)))
    return as_bytes(words).reshape(experts, rows, width)


@accepts("scales")
def interleave_moe_scales_for_sm90_mixed_gemm(scales: Any, group_size: int = 32) -> Any:
    """Scales of such weights: [experts, n / 64, k / 128, rows of 16 bytes, elements of 16 bytes].

    scales: uint8 [experts, n, k / group_size] of any size of element; n a multiple of 64, k of
    128. group_size: divides 128.
    """
    if len(scales.shape) != 3:
        raise ValueError(
            "scales: scales must be 3D (num_experts, rows, K/group_size); got "
            f"{tuple(scales.shape)}"
        )
    if group_size < 1 or 128 % group_size:
        raise ValueError(f"group_size: must be positive and divide 128, got {group_size}")
    groups, held = 128 // group_size, 16 // scales.dtype.itemsize
    if held % groups:
        raise ValueError(
            f"group_size: {group_size} does not fit elements of {scales.dtype.itemsize} bytes; "
            f"expected a multiple of {128 // held}"
        )
    experts, rows, cols = scales.shape
    if rows % 64 or cols % groups:
        raise ValueError(
            f"scales: expected rows divisible by 64 and columns divisible by {groups}, got "
            f"{rows} x {cols}"
        )
    slices = held // groups
    parts = contiguous(scales).reshape(
        experts, rows // 64, slices, 64 // slices, cols // groups, groups
    )
    folded = contiguous(transpose(parts, 0, 1, 4, 3, 2, 5))
    return folded.reshape(experts, rows // 64, cols // groups, 64 // slices, held)


def preprocess_moe_weights_for_sm90_mixed_gemm_humming(
    weight: Any, raw_scale: Any, max_range: int = 11, *, interleave: bool = True
) -> tuple[Any, Any, Any]:
    """Not offered, whatever the arguments: nothing here takes such weights."""
    raise NotImplementedError(
        "weight: Humming's weights are not offered; interleave_moe_weights_for_sm90_mixed_gemm() "
        "is, with use_w4_group_scaling of cutlass_fused_moe()"
    )


def undo_interleave(weights: Any) -> Any:
    """Two codes a byte, uint8 [experts, rows, columns / 2]."""
    experts, rows, width = weights.shape
    if rows % 16 or width % 32:
        raise ValueError(
            f"fc1_expert_weights: interleaved MXFP4 has multiples of 16 rows and 64 columns, got "
            f"{rows} x {2 * width}"
        )
    parts = width // 32
    data = as_bytes(_restore_bits(_as_words(contiguous(weights))))
    #                                         h  r         g  q  +4  +8
    held = data.reshape(experts, rows // 16, 2, 8, parts, 2, 4, 2, 2)
    canonical = transpose(held, 0, 1, 8, 3, 4, 5, 2, 7, 6)
    return contiguous(canonical).reshape(experts, rows, width)


def undo_scale_interleave(scales: Any, rows: int, cols: int) -> Any:
    """UE8M0, uint8 [experts, rows, columns / 32]."""
    if rows % 64 or cols % 128:
        raise ValueError(
            f"quant_scales: interleaved MXFP4 has multiples of 64 rows and 128 columns, got "
            f"{rows} x {cols}"
        )
    experts = scales.shape[0]
    data = as_bytes(scales)
    if data.reshape(experts, -1).shape[1] * 32 != rows * cols:
        raise ValueError(
            f"quant_scales: expected {rows * cols // 32} bytes an expert for {rows} x {cols}, got "
            f"{data.reshape(experts, -1).shape[1]}"
        )
    held = data.reshape(experts, rows // 64, cols // 128, 16, 4, 4)
    canonical = transpose(held, 0, 1, 4, 3, 2, 5)
    return contiguous(canonical).reshape(experts, rows, cols // 32)
