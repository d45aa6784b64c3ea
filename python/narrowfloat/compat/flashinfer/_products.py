"""Products of rows with weights of groups, the common part of FlashInfer's GEMMs.

out[t] = scale[group of t] * row_scale[t] * (weights[group of t] * rows[t]), by the library's
grouped GEMM. Weights are packed once, and kept by the identity of their tensors as prepared layers
are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

import narrowfloat as nf
from narrowfloat import _core
from narrowfloat._arrays import codes_to_core, is_torch, maker_of, to_core
from narrowfloat._moe import aligned_bytes
from narrowfloat._products import multiply_rows
from narrowfloat.compat.flashinfer._arguments import check_array, kind_of
from narrowfloat.compat.flashinfer._arrays import (
    as_bytes,
    cast,
    contiguous,
    copy_into,
    device_name,
    dtype_name,
    move_scales,
    transpose,
)
from narrowfloat.compat.flashinfer._errors import CheckError
from narrowfloat.compat.flashinfer._layers import kept

# How the library's messages begin -> arguments of the GEMMs.
_NAMES = {"a_scales": "a_scale", "a.": "a", "a:": "a", "args.a": "a", "w_scales": "b_scale",
          "weights": "b", "w:": "b"}  # fmt: skip


def named(error: Exception) -> Exception:
    """An error of the library with the caller's argument before it."""
    text = str(error)
    for ours, argument in _NAMES.items():
        if text.startswith(ours):
            return kind_of(error, text)(f"{argument}: {text}")
    return error


def packed_weights(mode: str, arrays: tuple[Any, ...], facts: Hashable,
                   parts: Callable[[], tuple[Any, Any]]) -> Any:  # fmt: skip
    """Weights of a mode, from codes [groups, n, k] and linear scales that `parts` makes once.

    arrays: those of the caller, by whose identity they are kept.
    """

    def build() -> Any:
        values, scales = parts()
        try:
            return _core.GroupedWeights.prepare(
                mode, codes_to_core("b", contiguous(values)),
                None if scales is None else codes_to_core("b_scale", contiguous(scales)), "linear",
            )  # fmt: skip
        except (ValueError, NotImplementedError) as error:
            raise named(error) from error

    return kept("b", arrays, ("gemm", mode, facts), build)


def in_memory_order(array: Any) -> Any:
    """Its bytes as they lie: callers hand scales of a matrix over as a transposed view of them."""
    if len(array.shape) == 2 and not _is_dense(array):
        array = transpose(array, 1, 0)
    return as_bytes(array).reshape(-1)


def _is_dense(array: Any) -> bool:
    return bool(array.is_contiguous() if is_torch(array) else array.flags.c_contiguous)


def linear_scales(argument: str, scales: Any, rows: int, blocks: int, layout: str,
                  batch: int = 1) -> Any:  # fmt: skip
    """Packed scales of `batch` matrices, in any shape, as linear uint8 [batch * rows, blocks]."""
    data = in_memory_order(scales)
    wanted = _core.quantized_layout("mxfp4", rows, 32 * blocks, scale_layout=layout, batch=batch)
    if data.shape[0] < wanted.scale_count:
        raise CheckError(
            f"{argument}: expected {wanted.scale_count} bytes, {batch} x {rows} x {blocks} in "
            f"layout {layout}, got {data.shape[0]}"
        )
    return move_scales(data[: wanted.scale_count], rows, blocks, batch, layout, "linear").reshape(
        batch * rows, blocks
    )


def groups_of_segments(indptr: Any, rows: int, groups: int) -> Any:
    """int32 [rows, 1]: the group of each row, -1 beyond the last; indptr: int32 [groups + 1]."""
    if is_torch(indptr):
        torch = sys.modules["torch"]
        places = torch.arange(rows, device=indptr.device, dtype=indptr.dtype)
        found = torch.searchsorted(indptr[1:].contiguous(), places, right=True)
        return found.masked_fill(found >= groups, -1).to(torch.int32).reshape(-1, 1)
    found = np.searchsorted(indptr[1:], np.arange(rows), side="right")
    return np.where(found < groups, found, -1).astype(np.int32).reshape(-1, 1)


def rows_of_padded_segments(indptr: Any, groups: Any, held: int) -> Any:
    """Row of each row's scales where segment i begins at (indptr[i] + 127 * i) / 128 * 128.

    groups: int32 [rows, 1] of groups_of_segments(). held: number of rows of scales.
    """
    if is_torch(indptr):
        torch = sys.modules["torch"]
        begins = (indptr + 127 * torch.arange(indptr.shape[0], device=indptr.device)) // 128 * 128
        group = groups.reshape(-1).clamp(min=0).long()
        places = torch.arange(group.shape[0], device=indptr.device)
        return (begins[group] + places - indptr[group]).clamp(0, held - 1)
    begins = (indptr + 127 * np.arange(indptr.shape[0])) // 128 * 128
    group = np.maximum(groups.reshape(-1), 0)
    return np.clip(begins[group] + np.arange(group.shape[0]) - indptr[group], 0, held - 1)


def groups_of_masks(masked_m: Any, rows: int) -> Any:
    """int32 [groups * rows, 1]: the group of each row of [groups, rows]; -1 for masked ones."""
    if is_torch(masked_m):
        torch = sys.modules["torch"]
        places = torch.arange(rows, device=masked_m.device)[None]
        group = torch.arange(masked_m.shape[0], device=masked_m.device, dtype=torch.int32)[:, None]
        return torch.where(places < masked_m[:, None], group, -1).to(torch.int32).reshape(-1, 1)
    group = np.arange(masked_m.shape[0], dtype=np.int32)[:, None]
    return np.where(np.arange(rows)[None] < masked_m[:, None], group, -1).reshape(-1, 1)


def checked_output(out: Any, shape: tuple[int, ...], out_dtype: Any, like: Any,
                   types: tuple[str, ...] = ("bfloat16", "float16")) -> str:  # fmt: skip
    """The element type of a result; ValueError for an output of another shape, type or device."""
    dtype = str(out_dtype).removeprefix("torch.") if out_dtype is not None else (
        "bfloat16" if out is None else dtype_name(out))  # fmt: skip
    if dtype not in types:
        raise ValueError(f"out_dtype: expected {' or '.join(types)}, got {dtype}")
    if out is not None:
        check_array("out", out)
        if tuple(out.shape) != shape or dtype_name(out) != dtype:
            raise ValueError(f"out: Shape mismatch or dtype mismatch; expected {dtype} {shape}, "
                             f"got {dtype_name(out)} {tuple(out.shape)}")  # fmt: skip
        if device_name(out) != device_name(like):
            raise ValueError(f"out: expected memory on {device_name(like)}, got "
                             f"{device_name(out)}")  # fmt: skip
    return dtype


def multiply(weights: Any, rows: Any, scales: Any, dtype: str, out: Any, *, groups: Any = None,
             row_scale: Any = None, scale: Any = 1.0) -> Any:  # fmt: skip
    """[T, n] of `dtype`, in `out` where it is given.

    rows: codes [T, k] with scales [T, blocks] of any strides, or None. groups: int32 [T, 1], -1
    for rows that keep what `out` holds, zeros in a new one; None: one group.
    row_scale: float32 [T]. scale: a number, or float32 [groups].
    """
    tokens, n = rows.shape[0], weights.rows
    make = maker_of("a", rows)
    if tokens == 0:
        return make.empty((0, n), dtype) if out is None else out
    try:
        if groups is None:
            wide = "bfloat16" if dtype == "bfloat16" else "float32"
            result = multiply_rows(weights, rows, scales, wide, row_scale=row_scale, scale=scale)
        else:
            result = _grouped(weights, rows, scales, groups, row_scale, scale)
    except (ValueError, NotImplementedError) as error:
        raise named(error) from error
    result = cast(result, dtype)
    if groups is not None:
        result = _where_counted(groups, result, out)
    return result if out is None else copy_into("out", out, result)


def _grouped(weights: Any, rows: Any, scales: Any, groups: Any, row_scale: Any, scale: Any) -> Any:
    """float32 [T, n]; rows without a group have those of any other."""
    make = maker_of("a", rows)
    maps = nf.permute(groups, local_experts=weights.experts)
    held = make.empty((maps.row_to_token.shape[0], weights.rows), "float32")
    names = ("slot_to_row", "row_to_token", "row_to_slot", "num_rows", "tile_to_expert",
             "tile_row_end", "num_tiles")  # fmt: skip
    weights.run(
        codes_to_core("a", rows), None if scales is None else to_core("a_scale", scales),
        row_scale, maps.token_tile, {name: getattr(maps, name) for name in names}, scale, None,
        held, aligned_bytes(make, weights.workspace(rows.shape[0])),
    )  # fmt: skip
    return _gathered(held, maps.slot_to_row)


def _gathered(held: Any, places: Any) -> Any:
    """Rows in the order of the tokens; any one for tokens without a group."""
    if is_torch(held):
        return held.index_select(0, places.long().clamp(min=0))
    return held[np.maximum(places, 0)]


def _where_counted(ids: Any, result: Any, out: Any) -> Any:
    """The result where a row has a group, else what the output holds."""
    other = 0 if out is None else out
    if is_torch(result):
        if out is None:
            return result.masked_fill(ids < 0, 0)
        return sys.modules["torch"].where(ids >= 0, result, other)
    return np.where(ids >= 0, result, np.asarray(other, result.dtype))
