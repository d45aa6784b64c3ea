"""MXFP4 weights interleaved for Hopper's mixed-input kernels, back in canonical order.

These are the weights of `cutlass_fused_moe(use_w4_group_scaling=True)` (moe spec 7.6). In
blocks of 16 rows and 32 bytes, word q of the 16 bytes g of row r + 8 h holds bytes
8 (2 g + h) + q and + 4 of rows r and r + 8, with its bits in another order.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from narrowfloat._arrays import is_torch
from narrowfloat.compat.flashinfer._arrays import as_bytes, contiguous, transpose

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
