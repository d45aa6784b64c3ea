"""FP4 codes with E4M3 scales of 32 elements, which the library has for 16 elements alone.

A block of 32 becomes three blocks of 16 that each begin with its largest magnitude, so that the
quantizer of NVFP4 gives all three the scale of the 32 elements:

    [top, x0 .. x14] [top, x15 .. x29] [top, x30, x31, zeros]
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import narrowfloat as nf
from narrowfloat._arrays import is_torch, maker_of
from narrowfloat.compat.flashinfer._arrays import contiguous, dtype_name, where

_BLOCK, _PART = 32, 15  # Elements of a block, and of one that are in each of the three.


def _stacked(parts: list[Any]) -> Any:
    """Arrays side by side on the last axis."""
    if is_torch(parts[0]):
        return sys.modules["torch"].cat(parts, -1)
    return np.concatenate(parts, -1)


def _tops(blocks: Any) -> Any:
    """Largest magnitude of each block [..., 1]: NaN only where every element is."""
    nothing = blocks != blocks
    magnitudes = where(~nothing, abs(blocks), 0)
    largest = magnitudes.amax(-1, keepdim=True) if is_torch(blocks) else magnitudes.max(
        -1, keepdims=True)  # fmt: skip
    every = nothing.all(-1, keepdims=True)
    return where(~every, largest, float("nan"))


def quantize_wide_blocks(y: Any, options: dict[str, Any]) -> tuple[Any, Any]:
    """Codes uint8 [M, K / 2] and scales uint8 [M, K / 32], linear.

    y: float16 or bfloat16 [M, K], K a multiple of 32. options: those of nf.quantize() for NVFP4.
    """
    rows, cols = y.shape
    blocks = y.reshape(rows, cols // _BLOCK, _BLOCK)
    top = _tops(blocks)
    zeros = maker_of("input", y).empty((rows, cols // _BLOCK, 3 * _PART - _BLOCK), dtype_name(y))
    zeros[...] = 0
    parts = [top, blocks[..., :_PART], top, blocks[..., _PART : 2 * _PART], top,
             blocks[..., 2 * _PART :], zeros]  # fmt: skip
    wide = contiguous(_stacked(parts)).reshape(rows, -1)
    q = nf.quantize(wide, "nvfp4", layout="linear", **options)
    nibbles = _stacked([(q.values & 15)[..., None], (q.values >> 4)[..., None]])
    held = nibbles.reshape(rows, cols // _BLOCK, 3, _PART + 1)[..., 1:]
    codes = contiguous(held).reshape(rows, cols // _BLOCK, 3 * _PART)[..., :_BLOCK]
    packed = contiguous(codes[..., 0::2] | codes[..., 1::2] << 4)
    scales = q.scales.reshape(rows, cols // _BLOCK, 3)[..., 0]
    return packed.reshape(rows, cols // 2), contiguous(scales)
