"""FlashInfer's NVFP4 KV caches. Scales are decode scales but where a name says otherwise.

Additional keyword: math, "exact" or "fast".
"""

from __future__ import annotations

from typing import Any

import narrowfloat as nf
from narrowfloat.compat.flashinfer._arrays import as_type, math_mode


def _halves(cache: Any) -> tuple[Any, Any]:
    """Keys and values of a pair, or of one array that is stacked on its second axis."""
    if isinstance(cache, tuple | list):
        k, v = cache
        return k, v
    if len(cache.shape) != 5 or cache.shape[1] != 2:
        raise ValueError(
            "paged_kv_cache, kv_cache_sf: expected a pair, or an array [pages, 2, ...] of five "
            f"axes, got {tuple(cache.shape)}"
        )
    return cache[:, 0], cache[:, 1]


def _cache(paged_kv_cache: Any, kv_cache_sf: Any) -> tuple[Any, Any, Any, Any]:
    return *_halves(paged_kv_cache), *_halves(kv_cache_sf)


def nvfp4_kv_quantize(
    input: Any, global_scale: Any, *, math: str | None = None
) -> tuple[Any, Any]:
    """(uint8 [M, K / 2], scales uint8 [M, K / 16], linear)."""
    return nf.kv_quantize(input, global_scale, math=math_mode(math))


def nvfp4_kv_dequantize(
    fp4_data: Any, block_scales: Any, global_scale: Any, output_dtype: Any = "bfloat16"
) -> Any:
    """[M, K] of bfloat16 or float16."""
    return nf.kv_dequantize(fp4_data, block_scales, global_scale, output_dtype)


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
    """Gathers sequences into output_k and output_v [batch, max_seq, heads, head_dim]."""
    nf.kv_dequantize_paged(*_cache(paged_kv_cache, kv_cache_sf), block_tables, seq_lens, output_k,
                           output_v, k_scale=k_scale, v_scale=v_scale,
                           layout=kv_layout)  # fmt: skip


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
    math: str | None = None,
) -> None:
    """Quantizes rows into the pages of their requests. kv_last_page_len is not needed."""
    nf.kv_append_paged(append_key, append_value, batch_indices, positions,
                       *_cache(paged_kv_cache, kv_cache_sf), kv_indices, kv_indptr,
                       k_scale=k_scale, v_scale=v_scale, layout=kv_layout,
                       math=math_mode(math))  # fmt: skip


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
    math: str | None = None,
) -> None:
    """Quantizes rows into slots page * page_size + entry; negative ones are skipped."""
    nf.kv_append_slots(append_key, append_value, slot_mapping,
                       *_cache(paged_kv_cache, kv_cache_sf), k_scale=k_scale, v_scale=v_scale,
                       layout=kv_layout, math=math_mode(math))  # fmt: skip


def nvfp4_quantize_paged_kv_cache(
    k_cache: Any,
    v_cache: Any,
    kv_layout: str = "HND",
    k_global_sf: Any = None,
    v_global_sf: Any = None,
    *,
    math: str | None = None,
) -> tuple[tuple[Any, Any], tuple[Any, Any], float, float]:
    """Whole caches; ..._global_sf are encode scales, the numbers returned decode scales."""
    codes, scales, k_decode, v_decode = nf.kv_quantize_paged_cache(
        k_cache,
        v_cache,
        kv_layout,
        k_encode_scale=k_global_sf,
        v_encode_scale=v_global_sf,
        math=math_mode(math),
    )
    k_scales, v_scales = (as_type(part, "float8_e4m3fn") for part in scales)
    return codes, (k_scales, v_scales), float(k_decode[0]), float(v_decode[0])
