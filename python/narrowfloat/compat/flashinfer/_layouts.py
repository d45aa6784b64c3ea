"""FlashInfer's preparations of weights and scales, and what undoes them."""

from __future__ import annotations

from typing import Any

import numpy as np

from narrowfloat._shapes import round_up
from narrowfloat.compat.flashinfer._arrays import (
    as_bytes,
    as_type,
    contiguous,
    dtype_name,
    move_scales,
    take,
    transpose,
)

# Rows of a block, by epilogue_tile_m; each block of old rows j becomes rows 8 * (j % n) + j / n.
_STEP = {32: 4, 16: 2}


def _block_rows(epilogue_tile_m: int) -> int:
    return 32 if epilogue_tile_m % 128 == 0 else 16


def shuffle_gather(rows: int, block: int) -> np.ndarray[Any, Any]:
    """Old row that new row p holds."""
    if rows % block:
        raise ValueError(f"t: expected a multiple of {block} rows, got {rows}")
    p = np.arange(rows)
    at = p % block
    return p - at + (at % 8) * _STEP[block] + at // 8


def gated_gather(rows: int) -> np.ndarray[Any, Any]:
    """Old row that new row p holds: up and gate rows take turns."""
    p = np.arange(rows)
    return np.where(p % 2 == 0, p // 2, rows // 2 + p // 2)


def inverse(gather: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The gather that undoes another."""
    return np.argsort(gather)


def shuffle_matrix_a(t: Any, epilogue_tile_m: int) -> Any:
    """Rows of a matrix in the order that FlashInfer's epilogues want.

    t: [M, ...] of any dtype; M a multiple of 32, or of 16 where epilogue_tile_m is no multiple of
    128. Gives a new array of its shape and dtype.
    """
    return take(t, shuffle_gather(t.shape[0], _block_rows(epilogue_tile_m)), 0)


def shuffle_matrix_sf_a(sf_linear: Any, epilogue_tile_m: int, num_elts_per_sf: int = 16) -> Any:
    """Scales of a matrix that shuffle_matrix_a() has shuffled: uint8, flat 128x4 image.

    sf_linear: one byte of any dtype [M, blocks] of the matrix as it was, M a multiple of 128.
    epilogue_tile_m: as there. num_elts_per_sf: 16 or 32; changes nothing.
    """
    if num_elts_per_sf not in (16, 32):
        raise ValueError(f"num_elts_per_sf: expected 16 or 32, got {num_elts_per_sf}")
    if sf_linear.shape[0] % 128:
        raise ValueError(f"sf_linear: expected a multiple of 128 rows, got {sf_linear.shape[0]}")
    return block_scale_interleave(shuffle_matrix_a(as_bytes(sf_linear), epilogue_tile_m))


def reorder_rows_for_gated_act_gemm(t: Any) -> Any:
    """Rows [up; gate] interleaved: up 0, gate 0, up 1, ...

    t: [2 * M, ...] of any dtype. Gives a new array of its shape and dtype.
    """
    if t.shape[0] % 2:
        raise ValueError(f"t: expected an even number of rows, got {t.shape[0]}")
    return take(t, gated_gather(t.shape[0]), 0)


def undo_shuffle_matrix_a(t: Any, epilogue_tile_m: int) -> Any:
    """Inverse of shuffle_matrix_a()."""
    return take(t, inverse(shuffle_gather(t.shape[0], _block_rows(epilogue_tile_m))), 0)


def undo_reorder_rows_for_gated_act_gemm(t: Any) -> Any:
    """Inverse of reorder_rows_for_gated_act_gemm()."""
    return take(t, inverse(gated_gather(t.shape[0])), 0)


def convert_to_block_layout(t: Any, blockK: int) -> Any:
    """[K / blockK, M, blockK] of a matrix t [M, K] of any dtype; a new array."""
    rows, cols = t.shape
    if cols % blockK:
        raise ValueError(f"t: expected a multiple of {blockK} columns, got {cols}")
    return contiguous(transpose(t.reshape(rows, cols // blockK, blockK), 1, 0, 2))


def undo_block_layout(t: Any) -> Any:
    """[experts, K / blockK, M, blockK] as [experts, M, K]."""
    experts, blocks, rows, width = t.shape
    return contiguous(transpose(t, 0, 2, 1, 3)).reshape(experts, rows, blocks * width)


def block_scale_interleave(unswizzled_sf: Any) -> Any:
    """Linear scales as 128x4 images: uint8, flat.

    unswizzled_sf: uint8 [rows, blocks] or [batch, rows, blocks].
    """
    shape = tuple(unswizzled_sf.shape)
    if len(shape) not in (2, 3) or dtype_name(unswizzled_sf) != "uint8":
        raise ValueError(
            f"unswizzled_sf: expected uint8 of two or three axes, got {dtype_name(unswizzled_sf)} "
            f"{shape}"
        )
    batch = shape[0] if len(shape) == 3 else 1
    return move_scales(unswizzled_sf, shape[-2], shape[-1], batch, "linear", "swizzled_128x4")


nvfp4_block_scale_interleave = block_scale_interleave


def weight_gather(rows: int, block: int, interleaved: bool) -> np.ndarray[Any, Any]:
    """The gather that undoes FlashInfer's preparation of a weight matrix (moe spec 7.3)."""
    held = shuffle_gather(rows, block)
    if interleaved:
        held = gated_gather(rows)[held]
    return inverse(held)


def unprepare(t: Any, block: int, interleaved: bool) -> Any:
    """Rows of [experts, rows, ...] in canonical order."""
    return take(t, weight_gather(t.shape[1], block, interleaved), 1)


def unprepare_scales(sf: Any, rows: int, block: int, interleaved: bool) -> Any:
    """Canonical linear scales uint8 [experts, rows, blocks] of shuffled, swizzled ones."""
    experts = sf.shape[0]
    data = as_bytes(sf).reshape(experts, -1)
    blocks = data.shape[1] // round_up(rows, 128)
    if data.shape[1] != round_up(rows, 128) * round_up(blocks, 4):
        raise ValueError(
            f"weights_scale: {data.shape[1]} bytes an expert are no 128x4 image of {rows} rows"
        )
    linear = move_scales(data, rows, blocks, experts, "swizzled_128x4", "linear")
    return unprepare(linear.reshape(experts, rows, blocks), block, interleaved)


def e4m3(array: Any) -> Any:
    """Bytes as float8_e4m3fn."""
    return as_type(array, "float8_e4m3fn")
