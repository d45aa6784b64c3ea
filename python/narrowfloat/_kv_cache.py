"""KV caches in NVFP4: blocks of 16 columns, an E4M3 scale each, one decode scale for all.

Paged caches are arrays of uint8: values [pages, page_size, heads, head_dim / 2] (layout "NHD") or
[pages, heads, page_size, head_dim / 2] ("HND"), scales the same with head_dim / 16; the halves of
one stacked array will do. Decode scales are numbers, or float32 arrays of one beside the cache, and
default to 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from narrowfloat import _core
from narrowfloat._arrays import codes_to_core, maker_of, shape_of, to_core


def _scale(argument: str, scale: Any) -> Any:
    if scale is None or isinstance(scale, int | float):
        return scale
    if isinstance(scale, np.floating):
        return float(scale)
    return to_core(argument, scale)


def _cache(
    k: Any, v: Any, k_scales: Any, v_scales: Any, k_scale: Any, v_scale: Any
) -> dict[str, Any]:
    return {
        "k": codes_to_core("k_cache", k),
        "v": codes_to_core("v_cache", v),
        "k_scales": codes_to_core("k_scales", k_scales),
        "v_scales": codes_to_core("v_scales", v_scales),
        "k_scale": _scale("k_scale", k_scale),
        "v_scale": _scale("v_scale", v_scale),
    }


def kv_quantize(
    input: Any,
    decode_scale: Any = None,
    *,
    math: str = "exact",
    out: tuple[Any, Any] | None = None,
) -> tuple[Any, Any]:
    """Rows of keys or values: (uint8 [..., cols / 2], scales uint8 [..., cols / 16]).

    input: float16 or bfloat16 [..., cols], cols a multiple of 16. decode_scale: multiplies when the
    codes are decoded. math: "exact" or "fast".
    """
    *lead, cols = shape_of("input", input)
    if out is None:
        make = maker_of("input", input)
        out = make.empty((*lead, cols // 2), "uint8"), make.empty((*lead, cols // 16), "uint8")
    values, scales = codes_to_core("out", out[0]), codes_to_core("out", out[1])
    _core.kv_quantize(to_core("input", input), values, scales, _scale("decode_scale", decode_scale),
                      math)  # fmt: skip
    return out


def kv_dequantize(
    values: Any,
    scales: Any,
    decode_scale: Any = None,
    dtype: Any = "bfloat16",
    *,
    out: Any = None,
) -> Any:
    """The numbers (code * scale) * decode_scale, [..., cols].

    values: uint8 [..., cols / 2]; scales: uint8 or float8_e4m3fn [..., cols / 16]. dtype:
    bfloat16, float16 or float32, of the new array. out: written to instead.
    """
    *lead, width = shape_of("values", values)
    if out is None:
        out = maker_of("values", values).empty((*lead, 2 * width), dtype)
    codes, factors = codes_to_core("values", values), codes_to_core("scales", scales)
    _core.kv_dequantize(codes, factors, to_core("out", out), _scale("decode_scale", decode_scale))
    return out


def kv_dequantize_paged(
    k_cache: Any,
    v_cache: Any,
    k_scales: Any,
    v_scales: Any,
    block_tables: Any,
    seq_lens: Any,
    output_k: Any,
    output_v: Any,
    *,
    k_scale: Any = None,
    v_scale: Any = None,
    layout: str = "NHD",
) -> None:
    """Gathers the tokens of each sequence into output_k and output_v.

    block_tables: int32 or int64 [batch, max_pages]; seq_lens: int32 or int64 [batch]. output_k,
    output_v: float16, bfloat16 or float32 [batch, max_seq, heads, head_dim]. Tokens at or beyond
    the length of their sequence, and those of pages that do not exist, keep what they hold.
    """
    cache = _cache(k_cache, v_cache, k_scales, v_scales, k_scale, v_scale)
    _core.kv_dequantize_paged(cache, layout, to_core("block_tables", block_tables),
                              to_core("seq_lens", seq_lens), to_core("output_k", output_k),
                              to_core("output_v", output_v))  # fmt: skip


def kv_append_paged(
    key: Any,
    value: Any,
    batch_indices: Any,
    positions: Any,
    k_cache: Any,
    v_cache: Any,
    k_scales: Any,
    v_scales: Any,
    indices: Any,
    indptr: Any,
    *,
    k_scale: Any = None,
    v_scale: Any = None,
    layout: str = "NHD",
    math: str = "exact",
) -> None:
    """Quantizes rows of keys and values into the pages of their requests.

    key, value: float16 or bfloat16 [rows, heads, head_dim]. Row i goes to entry
    positions[i] % page_size of page indices[indptr[batch_indices[i]] + positions[i] // page_size];
    rows whose request, position or page does not exist are skipped. All four are int32 or int64.
    """
    places = {"batch_indices": batch_indices, "positions": positions, "indices": indices,
              "indptr": indptr}  # fmt: skip
    cache = _cache(k_cache, v_cache, k_scales, v_scales, k_scale, v_scale)
    _core.kv_append(to_core("key", key), to_core("value", value),
                    {name: to_core(name, array) for name, array in places.items()}, cache, layout,
                    math)  # fmt: skip


def kv_append_slots(
    key: Any,
    value: Any,
    slots: Any,
    k_cache: Any,
    v_cache: Any,
    k_scales: Any,
    v_scales: Any,
    *,
    k_scale: Any = None,
    v_scale: Any = None,
    layout: str = "NHD",
    math: str = "exact",
) -> None:
    """As kv_append_paged(), row i to slot slots[i], which is page * page_size + entry.

    slots: int32 or int64, at most one a row; rows with a slot outside the cache are skipped.
    """
    cache = _cache(k_cache, v_cache, k_scales, v_scales, k_scale, v_scale)
    _core.kv_append(to_core("key", key), to_core("value", value),
                    {"slots": to_core("slots", slots)}, cache, layout, math)  # fmt: skip


def kv_quantize_paged_cache(
    key: Any,
    value: Any,
    layout: str = "HND",
    *,
    k_encode_scale: Any = None,
    v_encode_scale: Any = None,
    math: str = "exact",
    out: tuple[tuple[Any, Any], tuple[Any, Any], Any, Any] | None = None,
) -> tuple[tuple[Any, Any], tuple[Any, Any], Any, Any]:
    """Whole caches: ((k, v), (k_scales, v_scales), k decode scale, v decode scale).

    key, value: float16 or bfloat16, paged in the order of `layout`; page_size a multiple of 4,
    head_dim of 64. Encode scales default to 448 / max(largest magnitude, 1e-12). The scales of V
    come in the order of kv_reorder_v_scales(). The decode scales are float32 [1]. math: "exact" or
    "fast". out: arrays for all results.
    """
    if out is None:
        make = maker_of("key", key)
        halves = []
        for name, array in (("key", key), ("value", value)):
            *lead, dim = shape_of(name, array)
            halves.append((make.empty((*lead, dim // 2), "uint8"),
                           make.empty((*lead, dim // 16), "uint8"),
                           make.empty((1,), "float32")))  # fmt: skip
        k, v = halves
    else:
        codes, scales, *decodes = out
        k, v = zip(codes, scales, decodes, strict=True)
    encode = {"k": _scale("k_encode_scale", k_encode_scale),
              "v": _scale("v_encode_scale", v_encode_scale)}  # fmt: skip
    _core.kv_quantize_paged_cache(to_core("key", key), to_core("value", value),
                                  _cache(k[0], v[0], k[1], v[1], k[2], v[2]), layout, encode,
                                  math)  # fmt: skip
    return (k[0], v[0]), (k[1], v[1]), k[2], v[2]


def _reordered(scales: Any, layout: str, out: Any, is_inverse: bool) -> Any:
    if out is None:
        out = maker_of("scales", scales).empty(shape_of("scales", scales), "uint8")
    source, target = codes_to_core("scales", scales), codes_to_core("out", out)
    _core.kv_reorder(source, target, layout, is_inverse)
    return out


def kv_reorder_v_scales(scales: Any, layout: str = "HND", *, out: Any = None) -> Any:
    """Scales of V in the order in which some attention kernels read them.

    scales: uint8 or float8_e4m3fn, paged, [.., S]; page_size and S multiples of 4. The scale of
    block s of token t moves, within page and head, to token t // 4 * 4 + s // (S // 4), position
    s % (S // 4) * 4 + t % 4.
    """
    return _reordered(scales, layout, out, False)


def kv_restore_v_scales(scales: Any, layout: str = "HND", *, out: Any = None) -> Any:
    """The way back from kv_reorder_v_scales()."""
    return _reordered(scales, layout, out, True)
