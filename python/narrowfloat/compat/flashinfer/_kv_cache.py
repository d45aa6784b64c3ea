"""FlashInfer's NVFP4 KV caches. Scales are decode scales but where a name says otherwise.

Additional keyword: math, "exact" or "fast".
"""

from __future__ import annotations

import sys
from math import isfinite, prod
from numbers import Real
from typing import Any

import narrowfloat as nf
from narrowfloat._arrays import maker_of
from narrowfloat._options import MathMode
from narrowfloat._streams import is_capturing
from narrowfloat.compat.flashinfer._arguments import accepts, check_array
from narrowfloat.compat.flashinfer._arrays import as_type, dtype_name, is_on_gpu, scale_of
from narrowfloat.compat.flashinfer._errors import CheckError
from narrowfloat.compat.flashinfer._modes import as_read, four_over_six_option, math_mode

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


def _check_pages(codes: Any, block_tables: Any, output: Any, kv_layout: str) -> None:
    """CheckError for tables with fewer pages than the outputs have tokens."""
    if len(codes.shape) != 4 or len(block_tables.shape) != 2 or len(output.shape) != 4:
        return  # The library says what is wrong.
    page_size = codes.shape[2 if kv_layout == "HND" else 1]
    if block_tables.shape[1] * page_size < output.shape[1]:
        raise CheckError(
            "block_tables: column count insufficient for max_seq_len; expected at least "
            f"{-(-output.shape[1] // page_size)} pages of {page_size} tokens for output_k, got "
            f"{block_tables.shape[1]}"
        )


def _decode_scales(like: Any, for_slots: bool, **scales: Any) -> list[Any]:
    """Decode scales of an append, of which those on a GPU are read once; ValueError as upstream.

    While a CUDA graph is captured they cannot be read. for_slots: then the host's are refused.
    """
    is_captured = is_on_gpu(like) and is_capturing(like.device)
    held = {}
    for name, scale in scales.items():
        if for_slots and is_captured and not is_on_gpu(scale):
            raise ValueError(f"{name}: must be a contiguous float32 CUDA tensor on {like.device} "
                             "during CUDA graph capture")  # fmt: skip
        scales[name] = _beside(name, scale, like)
        if not isinstance(scales[name], Real):
            held[name] = scales[name]
    numbers = {name: scale for name, scale in scales.items() if name not in held}
    if held and not is_captured:
        together = sys.modules["torch"].stack([scale.reshape(()) for scale in held.values()])
        numbers |= dict(zip(held, together.tolist(), strict=True))
    for name, number in numbers.items():
        if not (isfinite(number) and number > 0):
            raise ValueError(
                f"{name}: must be a positive finite global decode scale, got {number}; "
                "k_scale and v_scale must be positive finite global decode scales"
            )
    return list(scales.values())


def _global_scale(scale: Any, like: Any) -> Any:
    """A scale that the library judges; one of the CPU beside arrays on a GPU is read."""
    is_elsewhere = hasattr(scale, "dtype") and is_on_gpu(like) and not is_on_gpu(scale)
    return _beside("global_scale", scale, like) if is_elsewhere else scale


def _beside(name: str, scale: Any, like: Any) -> Any:
    """A scale as the library takes it beside an array: a number, or float32 on its device."""
    if isinstance(scale, Real):
        return float(scale)
    check_scale(name, scale)
    if not is_on_gpu(scale):
        return float(scale.reshape(-1)[0])
    return scale.to(like.device)


def check_scale(name: str, scale: Any) -> None:
    """ValueError, or TypeError, unless it is an array of one float32."""
    if not hasattr(scale, "dtype"):
        raise TypeError(f"{name}: expected a number or float32 [1], got {scale!r}")
    if prod(scale.shape) != 1:
        raise ValueError(
            f"{name}: must have exactly one element, got {prod(scale.shape)}; k_scale and v_scale "
            "must be scalar tensors"
        )
    if dtype_name(scale) != "float32":
        raise ValueError(f"{name}: must be float32, got {dtype_name(scale)}")


@accepts("input", names=_ROW_NAMES)
def nvfp4_kv_quantize(
    input: Any, global_scale: Any, *, math: MathMode | None = None
) -> tuple[Any, Any]:
    """(uint8 [M, K / 2], scales uint8 [M, K / 16], linear).

    input: float16 or bfloat16 [M, K], K a multiple of 16. global_scale: float, or float32 [1];
    a decode scale. math: "fast" (default) or "exact".
    """
    scale = _global_scale(global_scale, input)
    return nf.kv_quantize(input, scale, math=math or "fast")


@accepts("fp4_data", "block_scales", names=_ROW_NAMES)
def nvfp4_kv_dequantize(
    fp4_data: Any, block_scales: Any, global_scale: Any, output_dtype: Any = "bfloat16"
) -> Any:
    """[M, K] of output_dtype: bfloat16, float16 or float32.

    fp4_data: uint8 [M, K / 2]. block_scales: uint8 or float8_e4m3fn [M, K / 16], linear.
    global_scale: float, or float32 [1]; multiplies.
    """
    scale = _global_scale(global_scale, fp4_data)
    return nf.kv_dequantize(fp4_data, block_scales, scale, output_dtype)


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
    if tuple(output_v.shape)[:3] != tuple(output_k.shape)[:3]:
        raise ValueError(
            "output_v: output_k and output_v must share batch, sequence, and head dims; expected "
            f"the first three of {tuple(output_k.shape)}, got {tuple(output_v.shape)}"
        )
    k_scale = _beside("k_scale", k_scale, output_k)
    v_scale = _beside("v_scale", v_scale, output_k)
    keys, values, key_scales, value_scales = _cache(paged_kv_cache, kv_cache_sf)
    _check_pages(keys, block_tables, output_k, kv_layout)
    if output_v.shape[3] == output_k.shape[3]:
        nf.kv_dequantize_paged(keys, values, key_scales, value_scales, block_tables, seq_lens,
                               output_k, output_v, k_scale=k_scale, v_scale=v_scale,
                               layout=kv_layout)  # fmt: skip
        return
    # The library's keys and values have the same size: each half is gathered twice.
    for codes, scales, scale, out in ((keys, key_scales, k_scale, output_k),
                                      (values, value_scales, v_scale, output_v)):  # fmt: skip
        spare = maker_of("output_k", out).empty(tuple(out.shape), dtype_name(out))
        nf.kv_dequantize_paged(codes, codes, scales, scales, block_tables, seq_lens, out, spare,
                               k_scale=scale, v_scale=scale, layout=kv_layout)  # fmt: skip


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
    k_scale, v_scale: float, or float32 [1]; decode scales. math: "fast" (default) or "exact".
    Rows whose request, position or page does not exist are skipped.
    """
    k_scale, v_scale = _decode_scales(append_key, False, k_scale=k_scale, v_scale=v_scale)
    nf.kv_append_paged(append_key, append_value, batch_indices, positions,
                       *_cache(paged_kv_cache, kv_cache_sf), kv_indices, kv_indptr,
                       k_scale=k_scale, v_scale=v_scale, layout=kv_layout,
                       math=math or "fast")  # fmt: skip


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
    k_scale, v_scale: float, or float32 [1]; decode scales. math: "fast" (default) or "exact".
    """
    k_scale, v_scale = _decode_scales(append_key, True, k_scale=k_scale, v_scale=v_scale)
    nf.kv_append_slots(append_key, append_value, slot_mapping,
                       *_cache(paged_kv_cache, kv_cache_sf), k_scale=k_scale, v_scale=v_scale,
                       layout=kv_layout, math=math or "fast")  # fmt: skip


def _decode_scale(encode: Any, found: Any) -> float:
    """As a number: from the encode scale where the host has that, else out of memory."""
    if isinstance(encode, Real):
        return nf.decode_scale_from_encode(float(encode))
    return float(found[0])


def _tried_twice(
    cache: Any, encode: Any, mode: MathMode, option: nf.FourOverSix
) -> tuple[Any, Any]:
    """Codes and scales by 4-over-6, in the order of the rows; encode: None for the default."""
    if encode is None:
        largest = nf.amax(cache)
        # torch divides a number by a tensor as the number times a reciprocal, which is rounded twice.
        encode = 448 * (largest == largest) / (largest * (largest >= 1e-12) + 1e-12 * (largest < 1e-12))
    scale = scale_of("global_scale", encode, cache)
    q = nf.quantize(cache, "nvfp4", layout="linear", encode_scale=scale, math=mode,
                    four_over_six=option)  # fmt: skip
    return q.values, q.scales.reshape(*cache.shape[:-1], cache.shape[-1] // 16)


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
        Results of such that lie on a GPU are waited for. math: "fast" (default) or "exact".
    FlashInfer's environment variables count as in fp4_quantize(), those of 4-over-6, too.
    """
    mode, option = math_mode(math), four_over_six_option(None)
    k_read, v_read = as_read(k_cache, math), as_read(v_cache, math)
    codes, scales, k_decode, v_decode = nf.kv_quantize_paged_cache(
        k_read, v_read, kv_layout, k_encode_scale=k_global_sf, v_encode_scale=v_global_sf, math=mode
    )
    if option is not None:
        parts = [_tried_twice(k_read, k_global_sf, mode, option),
                 _tried_twice(v_read, v_global_sf, mode, option)]  # fmt: skip
        codes = parts[0][0], parts[1][0]
        scales = parts[0][1], nf.kv_reorder_v_scales(parts[1][1], kv_layout)
    k_scales, v_scales = (as_type(part, "float8_e4m3fn") for part in scales)
    k_number, v_number = _decode_scale(k_global_sf, k_decode), _decode_scale(v_global_sf, v_decode)
    return codes, (k_scales, v_scales), k_number, v_number
