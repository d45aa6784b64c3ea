"""Row indices of FlashInfer's weight preparations, which engines gather with themselves.

Index i of a result is the old row that row i of the prepared matrix holds: int64, of torch for
torch's tensors, of NumPy for its arrays.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, MutableMapping
from typing import Any

import numpy as np

from narrowfloat._arrays import is_torch
from narrowfloat.compat.flashinfer._arguments import accepts
from narrowfloat.compat.flashinfer._arrays import dtype_name
from narrowfloat.compat.flashinfer._errors import AssertedError
from narrowfloat.compat.flashinfer._layouts import gated_gather, shuffle_gather

Cache = MutableMapping[Hashable, Any]


def get_shuffle_block_size(epilogue_tile_m: int) -> int:
    """Rows of a block that are shuffled among themselves: 32, or 16 unless 128 divides the tile."""
    return 32 if epilogue_tile_m % 128 == 0 else 16


def _check_matrix(argument: str, array: Any, rows: int) -> None:
    if len(array.shape) != 2 or array.shape[0] % rows:
        raise AssertedError(
            f"{argument}: expected a matrix of a multiple of {rows} rows, got shape "
            f"{tuple(array.shape)}"
        )


def _like(rows: np.ndarray[Any, Any], array: Any) -> Any:
    return sys.modules["torch"].from_numpy(rows) if is_torch(array) else rows


@accepts("input_tensor")
def get_shuffle_matrix_a_row_indices(input_tensor: Any, epilogue_tile_m: int) -> Any:
    """int64 [M] on the CPU: the rows of shuffle_matrix_a().

    input_tensor: [M, K] of any dtype, M a multiple of 32, or of 16 unless 128 divides
    epilogue_tile_m.
    """
    block = get_shuffle_block_size(epilogue_tile_m)
    _check_matrix("input_tensor", input_tensor, block)
    rows = shuffle_gather("input_tensor", input_tensor.shape[0], block)
    return _like(rows.astype(np.int64), input_tensor)


@accepts("input_tensor")
def get_shuffle_matrix_sf_a_row_indices(
    input_tensor: Any, epilogue_tile_m: int, num_elts_per_sf: int = 16
) -> Any:
    """int64 [M] on the CPU: the rows of shuffle_matrix_sf_a(), before the layout changes.

    input_tensor: uint8 or bfloat16 [M, blocks], M a multiple of 128. num_elts_per_sf: 16 or 32.
    """
    if dtype_name(input_tensor) not in ("uint8", "bfloat16"):
        raise AssertedError(
            f"input_tensor: expected uint8 or bfloat16, got {dtype_name(input_tensor)}"
        )
    if num_elts_per_sf not in (16, 32):
        raise AssertedError(f"num_elts_per_sf: expected 16 or 32, got {num_elts_per_sf}")
    _check_matrix("input_tensor", input_tensor, 128)
    return get_shuffle_matrix_a_row_indices(input_tensor, epilogue_tile_m)


@accepts("x")
def get_reorder_rows_for_gated_act_gemm_row_indices(x: Any) -> Any:
    """int64 [2 * M] on the CPU: the rows of reorder_rows_for_gated_act_gemm(). x: [2 * M, K]."""
    _check_matrix("x", x, 2)
    return _like(gated_gather("x", x.shape[0]).astype(np.int64), x)


def _shuffled(weight: Any, epilogue_tile_m: int, num_elts_per_sf: int | None) -> Any:
    if num_elts_per_sf is None:
        return get_shuffle_matrix_a_row_indices(weight, epilogue_tile_m)
    return get_shuffle_matrix_sf_a_row_indices(weight, epilogue_tile_m, num_elts_per_sf)


def _where(indices: Any, weight: Any) -> Any:
    return indices.to(weight.device) if is_torch(weight) else indices


@accepts("dst_w3_w1_weight")
def _maybe_get_cached_w3_w1_permute_indices(
    _cache_permute_indices: Cache, dst_w3_w1_weight: Any, epilogue_tile_m: int,
    num_elts_per_sf: int | None = None, is_gated_act_gemm: bool = True,
) -> Any:  # fmt: skip
    """int64 [M] where the weight lies: both preparations of a first matrix, or of its scales.

    _cache_permute_indices: a dict of the caller that keeps results.
    dst_w3_w1_weight: [M, K] of one expert. num_elts_per_sf: None for weights, 16 or 32 for scales.
    is_gated_act_gemm: the rows are [up; gate], which alternate in the prepared matrix.
    """
    weight = dst_w3_w1_weight
    key = ("w3_w1", tuple(weight.shape), epilogue_tile_m, num_elts_per_sf, is_gated_act_gemm)
    if key not in _cache_permute_indices:
        indices = _shuffled(weight, epilogue_tile_m, num_elts_per_sf)
        if is_gated_act_gemm:
            indices = get_reorder_rows_for_gated_act_gemm_row_indices(weight)[indices]
        _cache_permute_indices[key] = _where(indices, weight)
    return _cache_permute_indices[key]


@accepts("dst_w2_weight")
def get_w2_permute_indices_with_cache(
    _cache_permute_indices: Cache, dst_w2_weight: Any, epilogue_tile_m: int,
    num_elts_per_sf: int | None = None, is_gated_act_gemm: bool | None = None,
) -> Any:  # fmt: skip
    """int64 [M] where the weight lies: the preparation of a second matrix, or of its scales.

    Arguments as _maybe_get_cached_w3_w1_permute_indices() has them; is_gated_act_gemm is part of
    the key alone.
    """
    weight = dst_w2_weight
    key = ("w2", tuple(weight.shape), epilogue_tile_m, num_elts_per_sf, is_gated_act_gemm)
    if key not in _cache_permute_indices:
        _cache_permute_indices[key] = _where(
            _shuffled(weight, epilogue_tile_m, num_elts_per_sf), weight
        )
    return _cache_permute_indices[key]
