"""FlashInfer's steps between the GEMMs of experts, on the maps of moe_sort(), as vector operations.

Rows that moe_sort() gives to no token, and those beyond its tiles, keep what the outputs hold.
"""

from __future__ import annotations

import sys
from enum import IntEnum
from typing import Any

import numpy as np

from narrowfloat._arrays import is_torch
from narrowfloat.compat.flashinfer._activations import gelu, silu
from narrowfloat.compat.flashinfer._arguments import accepts, check_axes
from narrowfloat.compat.flashinfer._arrays import (
    as_bytes,
    as_type,
    cast,
    copy_into,
    dtype_name,
    move_scales,
)
from narrowfloat.compat.flashinfer._errors import CheckError


class MoeActivationType(IntEnum):
    """The activations of moe_activation(). The numbers are part of FlashInfer's interface."""

    Gelu = 0
    Relu = 1
    Silu = 2
    Swiglu = 3
    Geglu = 4
    Identity = 5


def _arange(count: int, like: Any) -> Any:
    if is_torch(like):
        return sys.modules["torch"].arange(count, device=like.device)
    return np.arange(count)


def _selected(condition: Any, array: Any, other: Any) -> Any:
    """array where the condition holds, else other; elements of one byte of any type."""
    if not is_torch(array):
        return np.where(condition, array, other)
    if array.dtype.itemsize != 1:
        return sys.modules["torch"].where(condition, array, other)
    parts = (as_type(part, "uint8") for part in (array, other))
    return as_type(sys.modules["torch"].where(condition, *parts), dtype_name(array))


def _valid_rows(limits: Any, num_tiles: Any, tile_size: int, rows: int) -> Any:
    """Whether each row is one of a tile in use, and before the tile's end: bool [rows]."""
    row = _arange(rows, limits)
    tile = row // tile_size
    inside = tile < min(limits.shape[0], -(-rows // tile_size))
    tile = tile.clamp(max=limits.shape[0] - 1) if is_torch(tile) else np.minimum(
        tile, limits.shape[0] - 1)  # fmt: skip
    return inside & (tile < num_tiles.reshape(-1)[0]) & (row < limits[tile])


def _rows(array: Any, index: Any) -> Any:
    if is_torch(array):
        index = index.long()
        if array.dtype.itemsize == 1:
            return as_type(as_type(array, "uint8").index_select(0, index), dtype_name(array))
        return array.index_select(0, index)
    return array[index]


@accepts("input", "permuted_output", "tile_idx_to_mn_limit", "permuted_idx_to_expanded_idx",
         "num_non_exiting_tiles")  # fmt: skip
def moe_permute(
    input: Any, permuted_output: Any, tile_idx_to_mn_limit: Any, permuted_idx_to_expanded_idx: Any,
    num_non_exiting_tiles: Any, max_num_permuted_tokens: int, top_k: int, tile_size: int,
    enable_pdl: bool = False, input_sf: Any = None, permuted_sf: Any = None,
) -> None:  # fmt: skip
    """Row p of permuted_output becomes row permuted_idx_to_expanded_idx[p] / top_k of the input.

    input: float16, bfloat16, float8_e4m3fn or uint8 of two codes [T, H]. permuted_output: its type,
    [max_num_permuted_tokens, H]. tile_idx_to_mn_limit, permuted_idx_to_expanded_idx,
    num_non_exiting_tiles: int32, of moe_sort(). top_k, tile_size: k, rows of a tile; int.
    input_sf, permuted_sf: of two codes a byte, uint8 [T, H / 16], linear, and packed in layout
    128x4, written to. enable_pdl: changes nothing.
    """
    rows = max_num_permuted_tokens
    check_axes("input", input, "T", "H")
    is_fp4 = dtype_name(input) in ("uint8", "float4_e2m1fn_x2")
    if is_fp4 and (input_sf is None or permuted_sf is None):
        raise ValueError("input_sf, permuted_sf: FP4 rows need both, got None")
    if tuple(permuted_output.shape) != (rows, input.shape[1]):
        raise CheckError(f"permuted_output: expected shape {(rows, input.shape[1])}, got "
                         f"{tuple(permuted_output.shape)}")  # fmt: skip
    valid = _valid_rows(tile_idx_to_mn_limit, num_non_exiting_tiles, tile_size, rows)
    slot = permuted_idx_to_expanded_idx[:rows]
    valid = valid & (slot >= 0)
    token = (slot * valid) // top_k
    copy_into("permuted_output", permuted_output,
              _selected(valid[:, None], _rows(input, token), permuted_output))  # fmt: skip
    if not is_fp4:
        return
    blocks = input_sf.shape[-1]
    scales = _rows(as_bytes(input_sf).reshape(-1, blocks), token) * valid[:, None]
    linear = scales.to(sys.modules["torch"].uint8) if is_torch(scales) else scales.astype(np.uint8)
    packed = move_scales(linear, rows, blocks, 1, "linear", "swizzled_128x4")
    copy_into("permuted_sf", as_type(permuted_sf, "uint8").reshape(-1), packed)


@accepts("permuted_input", "output", "expanded_idx_to_permuted_idx", "topk_scales")
def moe_unpermute(
    permuted_input: Any, output: Any, expanded_idx_to_permuted_idx: Any, topk_scales: Any,
    num_tokens: int, top_k: int, enable_pdl: bool = False, input_is_expanded: bool = False,
) -> None:  # fmt: skip
    """Row t of the output becomes the sum of topk_scales[t, s] times the row of slot s, in float32.

    permuted_input: float16 or bfloat16 [rows, H]. output: the same, [num_tokens, H].
    expanded_idx_to_permuted_idx: int32 [num_tokens, top_k], -1 for no expert. topk_scales: float32,
    float16 or bfloat16 [num_tokens, top_k]. input_is_expanded: rows are in the order of the slots.
    enable_pdl: changes nothing.
    """
    if dtype_name(topk_scales) not in ("float32", "float16", "bfloat16"):
        raise ValueError(
            f"topk_scales: Unsupported scale dtype {dtype_name(topk_scales)}; expected float32, "
            "float16 or bfloat16"
        )
    check_axes("permuted_input", permuted_input, "rows", "H")
    if tuple(output.shape) != (num_tokens, permuted_input.shape[1]):
        raise CheckError(f"output: expected shape {(num_tokens, permuted_input.shape[1])}, got "
                         f"{tuple(output.shape)}")  # fmt: skip
    places = expanded_idx_to_permuted_idx.reshape(num_tokens, top_k)
    known = places >= 0
    weights = cast(topk_scales, "float32").reshape(num_tokens, top_k)
    slots = _arange(num_tokens * top_k, places).reshape(num_tokens, top_k)
    total: Any = 0
    for s in range(top_k):  # The order of sums is that of the slots.
        place = slots[:, s] if input_is_expanded else places[:, s] * known[:, s]
        row = cast(_rows(permuted_input, place), "float32") * weights[:, s, None]
        total = total + _selected(known[:, s, None], row, row * 0)
    copy_into("output", output, cast(total, dtype_name(output)))


@accepts("input", "output", "tile_idx_to_mn_limit", "num_non_exiting_tiles")
def moe_activation(
    input: Any, output: Any, tile_idx_to_mn_limit: Any, num_non_exiting_tiles: Any,
    activation_type: Any, max_num_permuted_tokens: int, tile_size: int, enable_pdl: bool = False,
) -> None:  # fmt: skip
    """The activation of each row of a tile in use, written to the output.

    input: float16 or bfloat16 [rows, 2 * I] of [linear; gate] for Swiglu and Geglu, else [rows, I].
    output: the same type, [rows, I]. tile_idx_to_mn_limit, num_non_exiting_tiles: int32, of
    moe_sort(). activation_type: MoeActivationType. max_num_permuted_tokens: rows; tile_size: of a
    tile; int. enable_pdl: changes nothing.
    """
    kind = MoeActivationType(int(activation_type))
    rows, width = max_num_permuted_tokens, output.shape[-1]
    is_gated = kind in (MoeActivationType.Swiglu, MoeActivationType.Geglu)
    if input.shape[-1] != width * (2 if is_gated else 1):
        raise CheckError(f"input: expected {width * (2 if is_gated else 1)} columns for "
                         f"{kind.name} and {width} of the output, got {input.shape[-1]}")
    x = cast(input[:rows], "float32")
    if is_gated:
        function = silu if kind == MoeActivationType.Swiglu else gelu
        result = function(x[:, width:]) * x[:, :width]
    elif kind == MoeActivationType.Relu:
        result = x * (x > 0)
    elif kind == MoeActivationType.Identity:
        result = x
    else:
        result = (silu if kind == MoeActivationType.Silu else gelu)(x)
    valid = _valid_rows(tile_idx_to_mn_limit, num_non_exiting_tiles, tile_size, rows)
    made = cast(result, dtype_name(output))
    copy_into("output", output[:rows], _selected(valid[:, None], made, output[:rows]))
