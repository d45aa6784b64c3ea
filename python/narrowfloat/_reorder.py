"""Row shuffles of weights, packing of bits, and 8-bit quantization by groups of columns."""

from __future__ import annotations

from typing import Any

import numpy as np

from narrowfloat import _core
from narrowfloat._arrays import codes_to_core, maker_of, shape_of, to_core


def _bytes_to_core(argument: str, array: Any) -> Any:
    """The array as elements of any type: what has no name in the extension goes as integers."""
    if isinstance(array, np.ndarray) and array.dtype.isbuiltin != 1:
        return array.view(np.dtype(f"u{array.dtype.itemsize}"))
    return to_core(argument, array)


def _shuffled(input: Any, epilogue_tile_m: int, out: Any, is_inverse: bool) -> Any:
    shape = shape_of("input", input)
    if out is None:
        out = maker_of("input", input).empty(shape, input.dtype)
    source, target = _bytes_to_core("input", input), _bytes_to_core("out", out)
    _core.shuffle_rows(source, target, epilogue_tile_m, is_inverse)
    return out


def shuffle_rows(input: Any, epilogue_tile_m: int, *, out: Any = None) -> Any:
    """Rows in the order of epilogue-tiled GEMMs, [..., rows, cols] of any type.

    Inside each group of 32 rows (16 where epilogue_tile_m is no multiple of 128) row j moves to
    j % 4 * 8 + j // 4 (j % 2 * 8 + j // 2). rows: a multiple of the group.
    """
    return _shuffled(input, epilogue_tile_m, out, False)


def unshuffle_rows(input: Any, epilogue_tile_m: int, *, out: Any = None) -> Any:
    """The way back from shuffle_rows()."""
    return _shuffled(input, epilogue_tile_m, out, True)


def shuffle_scales(scales: Any, epilogue_tile_m: int, *, out: Any = None) -> Any:
    """Scales of a shuffled matrix in layout swizzled_128x4, from those of the plain one.

    scales: uint8 (or a one-byte float) [rows, blocks] or [batch, rows, blocks] in layout linear,
    rows a multiple of 128. Gives uint8 [..., rows, blocks rounded up to 4].
    """
    *lead, rows, blocks = shape_of("scales", scales)
    if out is None:
        padded = (blocks + 3) // 4 * 4
        out = maker_of("scales", scales).empty((*lead, rows, padded), "uint8")
    batch = int(np.prod(lead))
    source, target = codes_to_core("scales", scales), codes_to_core("out", out)
    _core.shuffle_scales(source, target, batch, rows, blocks, epilogue_tile_m, False)
    return out


def unshuffle_scales(
    scales: Any, rows: int, blocks: int, epilogue_tile_m: int, *, out: Any = None
) -> Any:
    """The way back from shuffle_scales(): uint8 [..., rows, blocks], linear.

    scales: in layout swizzled_128x4, of any shape; rows, blocks: of one matrix.
    """
    shape = shape_of("scales", scales)
    size = max(1, (rows + 127) // 128 * 128 * ((blocks + 3) // 4 * 4))
    batch = int(np.prod(shape)) // size
    if out is None:
        lead = () if batch == 1 or not rows * blocks else (batch,)
        out = maker_of("scales", scales).empty((*lead, rows, blocks), "uint8")
    source, target = codes_to_core("scales", scales), codes_to_core("out", out)
    _core.shuffle_scales(source, target, batch, rows, blocks, epilogue_tile_m, True)
    return out


def pack_bits(input: Any, order: str = "big", *, out: Any = None) -> Any:
    """One bit for each element, eight a byte: uint8 [ceil(n / 8)].

    input: bool or uint8, dense; an element counts as 1 unless it is 0. order: "big", the first
    element in bit 7, or "little".
    """
    count = int(np.prod(shape_of("input", input)))
    if out is None:
        out = maker_of("input", input).empty(((count + 7) // 8,), "uint8")
    _core.pack_bits(to_core("input", input), to_core("out", out), order)
    return out


def segment_pack_bits(
    input: Any,
    offsets: Any,
    order: str = "big",
    *,
    trim: bool = True,
    out: tuple[Any, Any] | None = None,
) -> tuple[Any, Any]:
    """Packs segments [offsets[i], offsets[i + 1]) into whole bytes each: (uint8, new offsets).

    input: bool or uint8 [n]. offsets: int32 or int64 [segments + 1], ascending within [0, n].
    trim: the bytes end with the last segment, for which a GPU must be waited for; else they are
        segment_packed_bytes(n, segments) many, with any contents after the last segment.
    out: arrays for both results, never trimmed.
    """
    count = int(np.prod(shape_of("input", input)))
    segments = shape_of("offsets", offsets)[0] - 1
    given = out is not None
    if out is None:
        make = maker_of("input", input)
        size = _core.segment_packed_bytes(count, max(segments, 0))
        out = make.empty((size,), "uint8"), make.empty(offsets.shape, offsets.dtype)
    starts, new_starts = to_core("offsets", offsets), to_core("out", out[1])
    _core.segment_pack_bits(to_core("input", input), starts, to_core("out", out[0]), new_starts,
                            order)  # fmt: skip
    return out if given or not trim else (out[0][: int(out[1][-1])], out[1])


def quantize_group_8bit(
    input: Any,
    group_size: int = 128,
    dtype: str = "float8_e4m3fn",
    *,
    eps: float = 1e-10,
    scale_order: str = "row_major",
    power_of_two_scales: bool = False,
    out: tuple[Any, Any] | None = None,
) -> tuple[Any, Any]:
    """8-bit codes with a float32 scale for each group of columns: (codes, scales).

    input: float32, float16 or bfloat16 [..., cols]; group_size divides cols.
    dtype: "float8_e4m3fn" or "float8_e5m2", whose codes come as uint8, or "int8". Codes are
        x / scale, with scale = max(group maximum, eps) / largest code.
    scale_order: "row_major" [..., cols / group_size]; for a matrix also "column_major"
        [cols / group_size, rows] or "column_major_aligned", the rows padded to a multiple of 4.
    power_of_two_scales: column-major only; scales are rounded up to powers of two.
    out: arrays for codes and scales.
    """
    shape = shape_of("input", input)
    if out is None:
        make = maker_of("input", input)
        groups = shape[-1] // max(1, group_size)
        rows = int(np.prod(shape[:-1]))
        if scale_order == "column_major_aligned":
            rows = (rows + 3) // 4 * 4
        scales_shape = (*shape[:-1], groups) if scale_order == "row_major" else (groups, rows)
        codes = make.empty(shape, "int8" if dtype == "int8" else "uint8")
        out = codes, make.empty(scales_shape, "float32")
    codes = out[0] if dtype == "int8" else _fp8_to_core("out", out[0])
    _core.quantize_group_8bit(to_core("input", input), codes, to_core("out_scales", out[1]),
                              group_size, eps, scale_order, power_of_two_scales, dtype)  # fmt: skip
    return out


def _fp8_to_core(argument: str, array: Any) -> Any:
    if isinstance(array, np.ndarray) and array.dtype.name in ("float8_e4m3fn", "float8_e5m2"):
        return array.view(np.uint8)
    return to_core(argument, array)
