"""Independent model of the quantizers: what every output byte must be.

The C++ library is judged by this model, so it shares nothing with it: it was written from the
numerics documentation alone, uses NumPy arrays instead of scalar code, and defines conversions by
searching tables of representable values instead of manipulating bits. It is slow and meant to be
read. This file has whole tensors: layouts, options, dequantization. reference_floats.py has numbers
and arithmetic, reference_blocks.py the formulas of blocks, reference_fused.py what fused operations
do before they quantize.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from reference_blocks import (
    DEFAULT_EPS,
    FourOverSix,
    fp8_blocks,
    fp8_input_blocks,
    mx_blocks,
    nvfp4_blocks,
    nvfp4_four_over_six_blocks,
    per_token_scales,
)
from reference_floats import (
    EXACT,
    LARGEST,
    ONE,
    ZERO,
    absolute_max,
    decode_e2m1,
    decode_e4m3,
    decode_e8m0,
    decode_float,
    decode_scale_from_encode,
    encode_e4m3,
    encode_float,
    encode_scale_from_amax,
    pick,
)

# --- Packed scales and values ---------------------------------------------------------------------


def round_up(x: int, multiple: int) -> int:
    """x rounded up to a multiple."""
    return -(-x // multiple) * multiple


def scale_offset(layout: str, r, c, rows: int, blocks: int):
    """Position of the scale of row r, block c in a layout, in scales."""
    tiles = -(-blocks // 4)
    if layout == "linear":
        return r * blocks + c
    if layout == "mn_major":
        return c * round_up(rows, 4) + r
    if layout == "swizzled_8x4":
        return (r // 8) * tiles * 32 + (c // 4) * 32 + (r % 8) * 4 + c % 4
    inner = (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4
    return (r // 128) * tiles * 512 + (c // 4) * 512 + inner


def scale_image_size(layout: str, rows: int, blocks: int) -> int:
    """Scales of one matrix in a layout, padding included."""
    if layout == "linear":
        return rows * blocks
    if layout == "mn_major":
        return blocks * round_up(rows, 4)
    return round_up(rows, 8 if layout == "swizzled_8x4" else 128) * round_up(blocks, 4)


def pack_scales(matrix: np.ndarray, layout: str) -> np.ndarray:
    """Packs a [rows, blocks] matrix into a layout; padding is zero."""
    rows, blocks = matrix.shape
    packed = np.zeros(scale_image_size(layout, rows, blocks), matrix.dtype)
    r, c = np.indices(matrix.shape)
    packed[scale_offset(layout, r, c, rows, blocks)] = matrix
    return packed


def unpack_scales(packed: np.ndarray, layout: str, rows: int, blocks: int) -> np.ndarray:
    """Inverse of pack_scales."""
    r, c = np.indices((rows, blocks))
    return packed[scale_offset(layout, r, c, rows, blocks)]


def grouped_scale_row(row_offset: int, group: int) -> int:
    """First scale row of a group of grouped FP8 1x128."""
    return (row_offset + 31 * group) // 32 * 32


def pack_grouped_scales(matrix: np.ndarray, offsets: list[int]) -> np.ndarray:
    """mn_major scales in which groups of rows start at padded rows; padding is zero."""
    groups = len(offsets) - 1
    packed = np.zeros((matrix.shape[1], grouped_scale_row(offsets[-1], groups)), matrix.dtype)
    for i in range(groups):
        start, count = grouped_scale_row(offsets[i], i), offsets[i + 1] - offsets[i]
        packed[:, start : start + count] = matrix[offsets[i] : offsets[i + 1]].T
    return packed.reshape(-1)


def pack_nibbles(codes: np.ndarray) -> np.ndarray:
    """Two codes a byte, the even element in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << np.uint8(4))


def unpack_nibbles(packed: np.ndarray) -> np.ndarray:
    """Inverse of pack_nibbles."""
    both = np.stack([packed & np.uint8(0xF), packed >> np.uint8(4)], axis=-1)
    return both.reshape(*packed.shape[:-1], packed.shape[-1] * 2)


# --- Whole tensors --------------------------------------------------------------------------------

UNTOUCHED = 0xCC  # Contents of value bytes that an operation must not write.

LAYOUTS = {
    "nvfp4": ("swizzled_128x4", "swizzled_8x4", "linear"),
    "nvfp4_per_token": ("swizzled_128x4", "swizzled_8x4", "linear"),
    "mxfp4": ("swizzled_128x4", "swizzled_8x4", "linear"),
    "mxfp8": ("swizzled_128x4", "swizzled_8x4", "linear"),
    "fp8_1x128": ("mn_major", "linear"),
    "fp8_128x128": ("linear",),
    "fp8_tensor": ("linear",),
}
BLOCK_OF_BYTE_SCALE = {"nvfp4": 16, "nvfp4_per_token": 16, "mxfp4": 32, "mxfp8": 32}


def has_byte_values(fmt: str) -> bool:
    """Whether an element takes a byte (E4M3) rather than a nibble."""
    return fmt == "mxfp8" or fmt.startswith("fp8")


def block_shape(fmt: str, rows: int, cols: int) -> tuple[int, int]:
    """Rows and columns of the elements that share a scale."""
    if fmt in BLOCK_OF_BYTE_SCALE:
        return 1, BLOCK_OF_BYTE_SCALE[fmt]
    return {"fp8_1x128": (1, 128), "fp8_128x128": (128, 128)}.get(fmt, (rows, cols))


@dataclass(frozen=True)
class Options:
    """Arguments of a quantizer. Scales are float32 arrays; None means the documented default."""

    mode: str = "exact"
    encode_scale: np.ndarray | None = None  # [1], [rows], or [batch] with valid_rows.
    base_decode_scale: np.float32 | None = None
    four_over_six: FourOverSix | None = None
    rounding: str = "up"
    alignment: int = 32
    rule: str = "reciprocal"
    eps: float | None = None
    fp8_decode_scale: np.float32 | None = None
    row_list: list[int] | None = None
    valid_rows: list[int] | None = None
    row_offsets: list[int] | None = None


@dataclass
class Quantized:
    """Output bytes, with what is needed to read them."""

    fmt: str
    layout: str
    batch: int
    rows: int
    cols: int
    values: np.ndarray  # uint8 [batch, rows, bytes per row]
    scales: np.ndarray  # All batches, flat: uint8 or float32.
    global_scale: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))


def active_rows(batch: int, rows: int, options: Options) -> np.ndarray:
    """Which rows an operation works on: bool [batch, rows]."""
    active = np.ones((batch, rows), bool)
    if options.row_list is not None:
        active[:] = False
        active[:, [r for r in options.row_list if 0 <= r < rows]] = True
    if options.valid_rows is not None:
        active &= np.arange(rows)[None, :] < np.asarray(options.valid_rows)[:, None]
    return active


def nvfp4_encode_scale(x: np.ndarray, active: np.ndarray, options: Options) -> np.ndarray:
    """The given encode scale, or the one that follows from the tensor (or each batch's rows)."""
    if options.encode_scale is not None:
        return np.atleast_1d(np.asarray(options.encode_scale, np.float32))
    counted = np.where(active[..., None], x, ZERO)
    e4m3_max = options.four_over_six.e4m3_max if options.four_over_six else 448
    shape = (x.shape[0], -1) if options.valid_rows is not None else (1, -1)
    if x.size == 0:
        amax = np.zeros(shape[0], np.float32)
    else:
        amax = absolute_max(counted.reshape(shape))
    return encode_scale_from_amax(amax, e4m3_max)


def spread_scale(g: np.ndarray, batch: int, rows: int, per_batch: bool) -> np.ndarray:
    """One scale per row, [batch, rows], from 1, rows, batch or batch * rows values."""
    if len(g) == batch * rows:
        return g.reshape(batch, rows)
    if per_batch and len(g) == batch:
        return np.broadcast_to(g[:, None], (batch, rows))
    return np.broadcast_to(g, (batch, rows))


def quantize_nvfp4(x: np.ndarray, dtype: str, options: Options):
    """NVFP4 with an encode scale: (scale bytes, codes, stored decode scale)."""
    batch, rows, cols = x.shape
    g = nvfp4_encode_scale(x, active_rows(batch, rows, options), options)
    per_row = spread_scale(g, batch, rows, options.valid_rows is not None)
    blocks = x.reshape(batch, rows, cols // 16, 16)
    per_block = np.repeat(per_row[..., None], cols // 16, axis=-1)
    if dtype == "F8_E4M3":
        scales, codes = fp8_input_blocks(blocks, per_block, "nvfp4", options.mode)
    elif options.four_over_six:
        scales, codes, _ = nvfp4_four_over_six_blocks(
            blocks, per_block, options.mode, options.four_over_six
        )
    else:
        scales, codes = nvfp4_blocks(blocks, per_block, options.mode)
    return scales, codes, decode_scale_from_encode(g)


def quantize_nvfp4_per_token(x: np.ndarray, options: Options):
    """NVFP4 with a scale per row: (scale bytes, codes, row scales)."""
    batch, rows, cols = x.shape
    option = options.four_over_six
    base = options.base_decode_scale
    if base is None:
        base = EXACT.div(ONE, np.float32(6 * (option.e4m3_max if option else 448)))
    amax = absolute_max(x)
    g, row_scale = per_token_scales(amax, base, options.mode)
    blocks = x.reshape(batch, rows, cols // 16, 16)
    g, d, a = (np.repeat(v[..., None], cols // 16, axis=-1) for v in (g, row_scale, amax))
    d = d if options.mode == "fast" else None
    if option:
        scales, codes, _ = nvfp4_four_over_six_blocks(blocks, g, options.mode, option, d, a)
    else:
        scales, codes = nvfp4_blocks(blocks, g, options.mode, d)
    return scales, codes, row_scale


def quantize_mx(x: np.ndarray, dtype: str, fmt: str, options: Options):
    """MXFP4 and MXFP8: (scale bytes, codes), with the padding columns that MXFP8 may have."""
    batch, rows, cols = x.shape
    blocks = x.reshape(batch, rows, cols // 32, 32)
    if dtype == "F8_E4M3":
        g = np.float32(1) if options.encode_scale is None else options.encode_scale
        per_row = spread_scale(np.atleast_1d(g), batch, rows, options.valid_rows is not None)
        per_block = np.repeat(per_row[..., None], cols // 32, axis=-1)
        return fp8_input_blocks(blocks, per_block, "mxfp4", options.mode)
    scales, codes = mx_blocks(blocks, fmt, options.rounding, options.mode)
    padding = (round_up(cols, options.alignment) - cols) // 32 if fmt == "mxfp8" else 0
    return (
        np.pad(scales, [(0, 0), (0, 0), (0, padding)]),
        np.pad(codes, [(0, 0), (0, 0), (0, padding), (0, 0)]),
    )


def quantize_byte_scaled(x: np.ndarray, dtype: str, fmt: str, layout: str, options: Options):
    """Any format with one-byte scales."""
    batch, rows, cols = x.shape
    global_scale = np.zeros(0, np.float32)
    active = active_rows(batch, rows, options)
    if fmt == "nvfp4":
        scales, codes, global_scale = quantize_nvfp4(x, dtype, options)
    elif fmt == "nvfp4_per_token":
        scales, codes, row_scale = quantize_nvfp4_per_token(x, options)
        global_scale = pick(active, row_scale, ZERO).reshape(-1)
    else:
        scales, codes = quantize_mx(x, dtype, fmt, options)
    codes = codes.reshape(batch, rows, scales.shape[-1] * codes.shape[-1])
    values = codes if fmt == "mxfp8" else pack_nibbles(codes)
    values = np.where(active[..., None], values, np.uint8(UNTOUCHED))
    scales = np.where(active[..., None], scales, np.uint8(0))
    packed = [pack_scales(scales[b], layout) for b in range(batch)]
    flat = np.concatenate(packed) if packed else np.zeros(0, np.uint8)
    return Quantized(fmt, layout, batch, rows, cols, values, flat, global_scale)


def quantize_fp8(x: np.ndarray, dtype: str, fmt: str, layout: str, options: Options) -> Quantized:
    """FP8 formats with float32 scales; one matrix [rows, cols]."""
    rows, cols = x.shape[1:]
    eps = DEFAULT_EPS[options.rule] if options.eps is None else options.eps
    height, width = block_shape(fmt, rows, cols)
    tall, wide = -(-rows // height), -(-cols // width)
    padded = np.zeros((tall * height, wide * width), np.float32)
    padded[:rows, :cols] = x[0]
    tiles = padded.reshape(tall, height, wide, width).swapaxes(1, 2)
    tiles = tiles.reshape(tall, wide, height * width)
    if options.fp8_decode_scale is not None:
        scales = np.full((1, 1), options.fp8_decode_scale, np.float32)
        codes = encode_e4m3(EXACT.mul(tiles, EXACT.div(ONE, scales)[..., None]))
    else:
        scales, codes = fp8_blocks(tiles, options.rule, eps, options.mode, LARGEST[dtype])
    codes = codes.reshape(tall, wide, height, width).swapaxes(1, 2)
    codes = codes.reshape(tall * height, wide * width)[:rows, :cols]
    if options.row_offsets is not None:
        packed = pack_grouped_scales(scales, options.row_offsets)
    else:
        packed = pack_scales(scales, layout)
    return Quantized(fmt, layout, 1, rows, cols, codes[None], packed)


def quantize(
    raw: np.ndarray, dtype: str, fmt: str, layout: str, options: Options = Options()
) -> Quantized:
    """Quantizes a raw tensor [batch, rows, cols]."""
    x = decode_float(raw, dtype)
    if fmt in BLOCK_OF_BYTE_SCALE:
        return quantize_byte_scaled(x, dtype, fmt, layout, options)
    return quantize_fp8(x, dtype, fmt, layout, options)


# --- Dequantization -------------------------------------------------------------------------------


def dequantize_values(codes, scale, d, association: str = "dense") -> np.ndarray:
    """float32 values from decoded codes and decoded scales; d is the global scale.

    association: dense, code * (scale * d); kv, (code * scale) * d; divide, code * (scale / d).
    """
    if association == "kv":
        return EXACT.mul(EXACT.mul(codes, scale), d)
    if association == "divide":
        return EXACT.mul(codes, EXACT.div(scale, d))
    return EXACT.mul(codes, EXACT.mul(scale, d))


def scale_shape(q: Quantized) -> tuple[int, int]:
    """Logical rows and columns of the scales."""
    height, width = block_shape(q.fmt, q.rows, q.cols)
    value_cols = q.values.shape[-1] * (1 if has_byte_values(q.fmt) else 2)
    return -(-q.rows // height), -(-value_cols // width)


def element_scales(q: Quantized) -> np.ndarray:
    """Decoded block scale of every element, float32 [batch, rows, cols]."""
    rows, blocks = scale_shape(q)
    packed = q.scales.reshape(q.batch, scale_image_size(q.layout, rows, blocks))
    stored = np.stack([unpack_scales(part, q.layout, rows, blocks) for part in packed])
    if q.fmt in ("nvfp4", "nvfp4_per_token"):
        stored = decode_e4m3(stored)
    elif q.fmt in ("mxfp4", "mxfp8"):
        stored = decode_e8m0(stored)
    height, width = block_shape(q.fmt, q.rows, q.cols)
    spread = stored.repeat(height, axis=1).repeat(width, axis=2)
    return spread[:, : q.rows, : q.cols]


def dequantize(q: Quantized, dtype: str, divides: bool = False) -> np.ndarray:
    """Raw tensor [batch, rows, cols] of the given type."""
    if has_byte_values(q.fmt):
        elements = decode_e4m3(q.values[:, :, : q.cols])
    else:
        elements = decode_e2m1(unpack_nibbles(q.values))
    scale = element_scales(q)
    if len(q.global_scale) == 0:
        return encode_float(EXACT.mul(elements, scale), dtype)
    per_batch = len(q.global_scale) == q.batch and q.batch > 1
    d = spread_scale(q.global_scale, q.batch, q.rows, per_batch)[..., None]
    y = dequantize_values(elements, scale, d, "divide" if divides else "dense")
    return encode_float(y, dtype)
