"""FlashInfer's preparations of weights and scales, and their inverses."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from narrowfloat._arrays import maker_of
from narrowfloat._shapes import round_up
from narrowfloat.compat.flashinfer._arguments import accepts, check_axes
from narrowfloat.compat.flashinfer._arrays import (
    as_bytes,
    as_type,
    check_one_byte,
    check_writable,
    contiguous,
    copy_into,
    device_name,
    dtype_name,
    is_contiguous,
    move_scales,
    take,
    transpose,
)
from narrowfloat.compat.flashinfer._errors import AssertedError, CheckError

# Rows of a block, by epilogue_tile_m; each block of old rows j becomes rows 8 * (j % n) + j / n.
_STEP = {32: 4, 16: 2}


def _block_rows(epilogue_tile_m: int) -> int:
    return 32 if epilogue_tile_m % 128 == 0 else 16


def shuffle_gather(argument: str, rows: int, block: int) -> np.ndarray[Any, Any]:
    """Old row that new row p holds. argument: what errors name."""
    if rows % block:
        raise AssertedError(f"{argument}: expected a multiple of {block} rows, got {rows}")
    p = np.arange(rows)
    at = p % block
    return p - at + (at % 8) * _STEP[block] + at // 8


def gated_gather(argument: str, rows: int) -> np.ndarray[Any, Any]:
    """Old row that new row p holds: up and gate rows alternate. argument: what errors name."""
    if rows % 2:
        raise AssertedError(f"{argument}: expected an even number of rows, got {rows}")
    p = np.arange(rows)
    return np.where(p % 2 == 0, p // 2, rows // 2 + p // 2)


def inverse(gather: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The gather that undoes another."""
    return np.argsort(gather)


def _check_positive(argument: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{argument}: expected a positive number, got {value}")


def _shuffled_gather(array: Any, epilogue_tile_m: int) -> np.ndarray[Any, Any]:
    _check_positive("epilogue_tile_m", epilogue_tile_m)
    return shuffle_gather("input_tensor", array.shape[0], _block_rows(epilogue_tile_m))


@accepts("input_tensor")
def shuffle_matrix_a(input_tensor: Any, epilogue_tile_m: int) -> Any:
    """Rows of a matrix in the order that FlashInfer's epilogues want.

    input_tensor: [M, ...] of any dtype; M a multiple of 32, or of 16 where epilogue_tile_m is no
    multiple of 128. Gives a new array of its shape and dtype.
    """
    return take(input_tensor, _shuffled_gather(input_tensor, epilogue_tile_m), 0)


@accepts("input_tensor")
def undo_shuffle_matrix_a(input_tensor: Any, epilogue_tile_m: int) -> Any:
    """The way back from shuffle_matrix_a().

    input_tensor, epilogue_tile_m: as it has them. Gives a new array of the same shape and dtype.
    """
    return take(input_tensor, inverse(_shuffled_gather(input_tensor, epilogue_tile_m)), 0)


def _check_elements(num_elts_per_sf: int) -> None:
    if num_elts_per_sf not in (16, 32):
        raise ValueError(f"num_elts_per_sf: expected 16 or 32, got {num_elts_per_sf}")


@accepts("input_tensor")
def shuffle_matrix_sf_a(
    input_tensor: Any, epilogue_tile_m: int, num_elts_per_sf: int = 16
) -> Any:
    """Scales of a matrix that shuffle_matrix_a() has shuffled: flat, layout 128x4, uint8.

    input_tensor: bfloat16, whose result is bfloat16, or one byte of any dtype, [M, blocks] of
        the matrix as it was, M a multiple of 128.
    epilogue_tile_m: as there. num_elts_per_sf: 16 or 32; changes nothing.
    """
    _check_elements(num_elts_per_sf)
    is_wide = dtype_name(input_tensor) == "bfloat16"
    if not is_wide:
        check_one_byte("input_tensor", input_tensor)
    check_axes("input_tensor", input_tensor, "rows", "blocks")
    rows = input_tensor.shape[0]
    if rows % 128:
        raise AssertedError(f"input_tensor: expected a multiple of 128 rows, got {rows}")
    scales = input_tensor if is_wide else as_bytes(input_tensor)
    return block_scale_interleave(shuffle_matrix_a(scales, epilogue_tile_m))


@accepts("input_tensor")
def undo_shuffle_matrix_sf_a(
    input_tensor: Any, epilogue_tile_m: int, rows: int, blocks: int, num_elts_per_sf: int = 16
) -> Any:
    """The way back from shuffle_matrix_sf_a(): uint8 [rows, blocks].

    input_tensor: its result, one byte of any dtype and of any shape. epilogue_tile_m,
    num_elts_per_sf: as there. rows: a multiple of 128. blocks: of each row, without padding.
    """
    _check_elements(num_elts_per_sf)
    if rows % 128:
        raise ValueError(f"rows: expected a multiple of 128, got {rows}")
    linear = _linear_scales("input_tensor", input_tensor, 1, rows, blocks)
    return undo_shuffle_matrix_a(linear.reshape(rows, blocks), epilogue_tile_m)


@accepts("x")
def reorder_rows_for_gated_act_gemm(x: Any) -> Any:
    """Rows [up; gate] interleaved: up 0, gate 0, up 1, ...

    x: [2 * M, ...] of any dtype. Gives a new array of its shape and dtype.
    """
    return take(x, gated_gather("x", x.shape[0]), 0)


@accepts("x")
def undo_reorder_rows_for_gated_act_gemm(x: Any) -> Any:
    """The way back from reorder_rows_for_gated_act_gemm(): rows [up; gate].

    x: [2 * M, ...] of any dtype. Gives a new array of its shape and dtype.
    """
    return take(x, inverse(gated_gather("x", x.shape[0])), 0)


@accepts("input_tensor")
def convert_to_block_layout(input_tensor: Any, blockK: int) -> Any:
    """[K / blockK, M, blockK] of a matrix.

    input_tensor: [M, K] of any dtype. blockK: int; divides K.
    """
    check_axes("input_tensor", input_tensor, "M", "K")
    _check_positive("blockK", blockK)
    rows, cols = input_tensor.shape
    if cols % blockK:
        raise ValueError(f"input_tensor: expected a multiple of {blockK} columns, got {cols}")
    return contiguous(transpose(input_tensor.reshape(rows, cols // blockK, blockK), 1, 0, 2))


@accepts("input_tensor")
def undo_convert_to_block_layout(input_tensor: Any) -> Any:
    """The way back from convert_to_block_layout(): [M, K].

    input_tensor: [K / blockK, M, blockK] of any dtype.
    """
    check_axes("input_tensor", input_tensor, "K / blockK", "M", "blockK")
    return undo_block_layout(input_tensor[None])[0]


def undo_block_layout(t: Any) -> Any:
    """[experts, K / blockK, M, blockK] as [experts, M, K]."""
    experts, blocks, rows, width = t.shape
    return contiguous(transpose(t, 0, 2, 1, 3)).reshape(experts, rows, blocks * width)


@accepts("unswizzled_sf")
def block_scale_interleave(unswizzled_sf: Any, *, out: Any = None) -> Any:
    """Linear scales in layout 128x4, flat and of their type.

    unswizzled_sf: uint8 or bfloat16 [rows, blocks] or [batch, rows, blocks]. out: flat, of the type
    and the size of the result, written to. (0.7.2.post1.)
    """
    shape, dtype = tuple(unswizzled_sf.shape), dtype_name(unswizzled_sf)
    if dtype not in ("uint8", "bfloat16"):
        raise AssertedError(f"unswizzled_sf: expected uint8 or bfloat16, got {dtype}")
    if len(shape) not in (2, 3):
        raise CheckError(f"unswizzled_sf: expected two or three axes, got {shape}")
    batch = shape[0] if len(shape) == 3 else 1
    size = batch * round_up(shape[-2], 128) * round_up(shape[-1], 4)
    if out is not None:
        _check_interleaved("out", out, (size,), unswizzled_sf)
    made = _interleaved_wide(unswizzled_sf, batch) if dtype == "bfloat16" else move_scales(
        unswizzled_sf, shape[-2], shape[-1], batch, "linear", "swizzled_128x4"
    )  # fmt: skip
    return made if out is None else copy_into("out", out, made)


def _check_interleaved(name: str, out: Any, shape: tuple[int, ...], scales: Any) -> None:
    check_writable(name, out)
    wanted, got = ((dtype_name(array), device_name(array)) for array in (scales, out))
    if wanted != got or tuple(out.shape) != shape or not is_contiguous(out):
        raise ValueError(
            f"{name}: must be a contiguous flat tensor of shape {shape}, dtype {wanted[0]}, on "
            f"{wanted[1]}; got {tuple(out.shape)}, {got[0]}, on {got[1]}"
        )


def _interleaved_wide(scales: Any, batch: int) -> Any:
    """block_scale_interleave() of 16-bit elements: their low and high bytes, and both together."""
    rows, blocks = scales.shape[-2:]
    parts = as_bytes(scales).reshape(batch, rows, blocks, 2)
    halves = [move_scales(parts[..., i], rows, blocks, batch, "linear", "swizzled_128x4")
              for i in range(2)]  # fmt: skip
    both = maker_of("unswizzled_sf", scales).empty((halves[0].shape[0], 2), "uint8")
    both[:, 0], both[:, 1] = halves
    return as_type(both.reshape(-1), "bfloat16")


nvfp4_block_scale_interleave = block_scale_interleave


@accepts("swizzled_sf")
def undo_block_scale_interleave(
    swizzled_sf: Any, rows: int, blocks: int, batch: int | None = None
) -> Any:
    """The way back from block_scale_interleave(): uint8 [rows, blocks], or [batch, rows, blocks].

    swizzled_sf: its result, one byte of any dtype and of any shape. rows, blocks: of one matrix,
    without padding. batch: number of matrices; None: one, and no such axis.
    """
    matrices = 1 if batch is None else batch
    linear = _linear_scales("swizzled_sf", swizzled_sf, matrices, rows, blocks)
    return linear.reshape(*(() if batch is None else (batch,)), rows, blocks)


def _linear_scales(argument: str, swizzled: Any, batch: int, rows: int, blocks: int) -> Any:
    """Linear scales, as flat bytes, of `batch` matrices in layout 128x4; rows, blocks: of one."""
    for name, value in (("rows", rows), ("blocks", blocks), ("batch", batch)):
        if value < 0:
            raise ValueError(f"{name}: expected a number of at least 0, got {value}")
    check_one_byte(argument, swizzled)
    given = prod(swizzled.shape)
    wanted = batch * round_up(rows, 128) * round_up(blocks, 4)
    if given != wanted:
        raise ValueError(
            f"{argument}: expected {wanted} bytes, {batch} matrices of {rows} x {blocks} in layout "
            f"128x4, got {given}"
        )
    return move_scales(swizzled, rows, blocks, batch, "swizzled_128x4", "linear")


def weight_gather(argument: str, rows: int, block: int, interleaved: bool) -> np.ndarray[Any, Any]:
    """The gather that undoes FlashInfer's preparation of a weight matrix."""
    held = shuffle_gather(argument, rows, block)
    if interleaved:
        held = gated_gather(argument, rows)[held]
    return inverse(held)


def unprepare(
    t: Any, block: int, interleaved: bool, argument: str = "gemm1_weights, gemm2_weights"
) -> Any:
    """Rows of [experts, rows, ...] in canonical order. argument: what errors name."""
    return take(t, weight_gather(argument, t.shape[1], block, interleaved), 1)


def unprepare_scales(sf: Any, rows: int, block: int, interleaved: bool) -> Any:
    """Canonical linear scales uint8 [experts, rows, blocks] of shuffled, swizzled ones."""
    experts = sf.shape[0]
    data = as_bytes(sf).reshape(experts, -1)
    blocks = data.shape[1] // round_up(rows, 128)
    if data.shape[1] != round_up(rows, 128) * round_up(blocks, 4):
        raise ValueError(
            f"weights_scale: {data.shape[1]} bytes an expert do not fit layout 128x4 of {rows} rows"
        )
    linear = move_scales(data, rows, blocks, experts, "swizzled_128x4", "linear")
    return unprepare(linear.reshape(experts, rows, blocks), block, interleaved)


def e4m3(array: Any) -> Any:
    """Bytes as float8_e4m3fn."""
    return as_type(array, "float8_e4m3fn")
