"""FlashInfer's NVFP4 KV caches. Scales are decode scales but where a name says otherwise.

Additional keyword: math, "exact" or "fast".
"""

from __future__ import annotations

from numbers import Real
from typing import Any

import narrowfloat as nf
from narrowfloat._options import MathMode
from narrowfloat.compat.flashinfer._arguments import accepts, check_array
from narrowfloat.compat.flashinfer._arrays import as_type
from narrowfloat.compat.flashinfer._modes import math_mode

_CODES, _SCALES = "paged_kv_cache", "kv_cache_sf"
# Beginnings of the library's errors -> arguments of the functions here.
_ROW_NAMES = {"math mode": "math", "decode_scale": "global_scale", "input.values": "fp4_data",
              "input.scales": "block_scales", "values": "fp4_data", "scales": "block_scales",
              "output": "output_dtype"}  # fmt: skip
_PAGED_NAMES = {
    "math mode": "math", "layout": "kv_layout",
    "k_cache": _CODES, "v_cache": _CODES, "k_scales": _SCALES, "v_scales": _SCALES,
    "cache.k.values": f"{_CODES}, keys", "cache.v.values": f"{_CODES}, values",
    "cache.k.scales": f"{_SCALES}, keys", "cache.v.scales": f"{_SCALES}, values",
    "cache.k_scale": "k_scale", "cache.v_scale": "v_scale",
    "key": "append_key", "value": "append_value", "slots": "slot_mapping",
    "indices": "kv_indices", "indptr": "kv_indptr",
    "positions.batch_indices": "batch_indices", "positions.positions": "positions",
    "positions.indices": "kv_indices", "positions.indptr": "kv_indptr",
}  # fmt: skip
_WHOLE_NAMES = {
    "math mode": "math", "layout": "kv_layout", "key": "k_cache", "value": "v_cache",
    "cache.k.values": "k_cache", "cache.v.values": "v_cache", "output": "k_cache",
    "k_encode_scale": "k_global_sf", "v_encode_scale": "v_global_sf",
    "options.k_encode_scale": "k_global_sf", "options.v_encode_scale": "v_global_sf",
}  # fmt: skip


def _halves(argument: str, cache: Any) -> tuple[Any, Any]:
    """Keys and values of a pair, or of one array that is stacked on its second axis."""
    wanted = f"{argument}: expected a pair, or an array [pages, 2, ...] of five axes, got "
    if isinstance(cache, tuple | list):
        if len(cache) != 2:
            raise ValueError(f"{wanted}{len(cache)} arrays")
        for part in cache:
            check_array(argument, part)
        return cache[0], cache[1]
    check_array(argument, cache)
    if len(cache.shape) != 5 or cache.shape[1] != 2:
        raise ValueError(f"{wanted}shape {tuple(cache.shape)}")
    return cache[:, 0], cache[:, 1]


def _cache(paged_kv_cache: Any, kv_cache_sf: Any) -> tuple[Any, Any, Any, Any]:
    return *_halves(_CODES, paged_kv_cache), *_halves(_SCALES, kv_cache_sf)


@accepts("input", names=_ROW_NAMES)
def nvfp4_kv_quantize(
    input: Any, global_scale: Any, *, math: MathMode | None = None
) -> tuple[Any, Any]:
    """(uint8 [M, K / 2], scales uint8 [M, K / 16], linear).

    input: float16 or bfloat16 [M, K], K a multiple of 16. global_scale: float, or float32 [1];
    a decode scale. math: "exact" or "fast".
    """
    return nf.kv_quantize(input, global_scale, math=math_mode(math))


@accepts("fp4_data", "block_scales", names=_ROW_NAMES)
def nvfp4_kv_dequantize(
    fp4_data: Any, block_scales: Any, global_scale: Any, output_dtype: Any = "bfloat16"
) -> Any:
    """[M, K] of output_dtype: bfloat16, float16 or float32.

    fp4_data: uint8 [M, K / 2]. block_scales: uint8 or float8_e4m3fn [M, K / 16], linear.
    global_scale: float, or float32 [1]; multiplies.
    """
    return nf.kv_dequantize(fp4_data, block_scales, global_scale, output_dtype)


@accepts("block_tables", "seq_lens", "output_k", "output_v", names=_PAGED_NAMES)
def nvfp4_kv_dequantize_paged(
    paged_kv_cache: Any,
    kv_cache_sf: Any,
    block_tables: Any,
    seq_lens: Any,
    k_scale: Any,
    v_scale: Any,
    output_k: Any,
    output_v: Any,
    kv_layout: str = "NHD",
) -> None:
    """Gathers sequences into output_k and output_v.

    paged_kv_cache, kv_cache_sf: uint8 pairs (keys, values) of codes and of scales, each [pages,
        page_size, heads, D / 2 or D / 16] in kv_layout "NHD", [pages, heads, page_size, ..] in
        "HND"; or one array each, [pages, 2, ..].
    block_tables: int32 or int64 [batch, max_pages]. seq_lens: int32 or int64 [batch].
    k_scale, v_scale: float, or float32 [1]; decode scales.
    output_k, output_v: bfloat16, float16 or float32 [batch, max_seq, heads, D]; tokens at or beyond
        a sequence's length, and of pages that do not exist, keep what they hold.
    """
    if tuple(output_v.shape) != tuple(output_k.shape):
        raise ValueError(f"output_v: expected the shape of output_k, {tuple(output_k.shape)}, got "
                         f"{tuple(output_v.shape)}")  # fmt: skip
    nf.kv_dequantize_paged(*_cache(paged_kv_cache, kv_cache_sf), block_tables, seq_lens, output_k,
                           output_v, k_scale=k_scale, v_scale=v_scale,
                           layout=kv_layout)  # fmt: skip


@accepts("append_key", "append_value", "batch_indices", "positions", "kv_indices", "kv_indptr",
         names=_PAGED_NAMES)  # fmt: skip
def nvfp4_quantize_append_paged_kv_cache(
    append_key: Any,
    append_value: Any,
    batch_indices: Any,
    positions: Any,
    paged_kv_cache: Any,
    kv_cache_sf: Any,
    kv_indices: Any,
    kv_indptr: Any,
    kv_last_page_len: Any,
    k_scale: Any,
    v_scale: Any,
    kv_layout: str = "NHD",
    *,
    math: MathMode | None = None,
) -> None:
    """Quantizes rows into the pages of their requests.

    append_key, append_value: float16 or bfloat16 [rows, heads, D].
    batch_indices, positions: int32 or int64 [rows]; request of a row, and place in it.
    paged_kv_cache, kv_cache_sf, kv_layout: as nvfp4_kv_dequantize_paged() has them; written to.
    kv_indices, kv_indptr: int32 or int64; pages of all requests, and where each one's begin,
        [requests + 1]. kv_last_page_len: not needed.
    k_scale, v_scale: float, or float32 [1]; decode scales. math: "exact" or "fast".
    Rows whose request, position or page does not exist are skipped.
    """
    nf.kv_append_paged(append_key, append_value, batch_indices, positions,
                       *_cache(paged_kv_cache, kv_cache_sf), kv_indices, kv_indptr,
                       k_scale=k_scale, v_scale=v_scale, layout=kv_layout,
                       math=math_mode(math))  # fmt: skip


@accepts("append_key", "append_value", "slot_mapping", names=_PAGED_NAMES)
def nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
    append_key: Any,
    append_value: Any,
    slot_mapping: Any,
    paged_kv_cache: Any,
    kv_cache_sf: Any,
    k_scale: Any,
    v_scale: Any,
    kv_layout: str = "NHD",
    *,
    math: MathMode | None = None,
) -> None:
    """Quantizes rows into slots page * page_size + entry.

    append_key, append_value: float16 or bfloat16 [rows, heads, D].
    slot_mapping: int32 or int64, at most one a row; rows with slots outside the cache are skipped.
    paged_kv_cache, kv_cache_sf, kv_layout: as nvfp4_kv_dequantize_paged() has them; written to.
    k_scale, v_scale: float, or float32 [1]; decode scales. math: "exact" or "fast".
    """
    nf.kv_append_slots(append_key, append_value, slot_mapping,
                       *_cache(paged_kv_cache, kv_cache_sf), k_scale=k_scale, v_scale=v_scale,
                       layout=kv_layout, math=math_mode(math))  # fmt: skip


def _decode_scale(encode: Any, found: Any) -> float:
    """As a number: from the encode scale where the host has that, else out of memory."""
    if isinstance(encode, Real):
        return nf.decode_scale_from_encode(float(encode))
    return float(found[0])


@accepts("k_cache", "v_cache", names=_WHOLE_NAMES)
def nvfp4_quantize_paged_kv_cache(
    k_cache: Any,
    v_cache: Any,
    kv_layout: str = "HND",
    k_global_sf: Any = None,
    v_global_sf: Any = None,
    *,
    math: MathMode | None = None,
) -> tuple[tuple[Any, Any], tuple[Any, Any], float, float]:
    """Whole caches: ((k, v) uint8, (k, v) scales float8_e4m3fn, k and v decode scale as floats).

    k_cache, v_cache: float16 or bfloat16 [pages, heads, page_size, D] in kv_layout "HND", [pages,
        page_size, heads, D] in "NHD"; page_size a multiple of 4, D of 64. Codes have D / 2 in place
        of D, scales D / 16; those of V in the order that FlashInfer's kernels read.
    k_global_sf, v_global_sf: float, or float32 [1]; encode scales, default 448 / largest magnitude.
        Results of such that lie on a GPU are waited for. math: "exact" or "fast".
    """
    codes, scales, k_decode, v_decode = nf.kv_quantize_paged_cache(
        k_cache,
        v_cache,
        kv_layout,
        k_encode_scale=k_global_sf,
        v_encode_scale=v_global_sf,
        math=math_mode(math),
    )
    k_scales, v_scales = (as_type(part, "float8_e4m3fn") for part in scales)
    k_number, v_number = _decode_scale(k_global_sf, k_decode), _decode_scale(v_global_sf, v_decode)
    return codes, (k_scales, v_scales), k_number, v_number
