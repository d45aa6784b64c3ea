"""The library's exact NVFP4 bytes equal those of TransformerEngine's reference formulas.

The formulas are transcribed here once more, in the shape that TransformerEngine's own reference has
(scale, divide, clamp, cast), independently of the library and of the reference model. The cases are
those of TransformerEngine's and FlashInfer's own tests. One difference is intended: an element that
is -0, or that underflows to -0, keeps its sign bit (code 8), as TransformerEngine's kernels do and
its Python reference does not.

Large shapes take one combination of the options per kind of input, small ones take all.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from quantize_raw import quantize_raw

FLOAT_MAX = np.finfo(np.float32).max
E2M1_MAX = np.float32(6)
E4M3_MAX = np.float32(448)

SMALL_SHAPES = (
    (1, 64), (1, 1024), (3, 128), (16, 64), (64, 128), (128, 64), (256, 128), (120, 64), (200, 256),
    (17, 512), (33, 1024), (127, 96),
)  # fmt: skip
LARGE_SHAPES = (
    (512, 256), (128, 1024), (1024, 2048), (128, 16384), (2048, 2048), (1025, 1024), (1025, 6144),
)  # fmt: skip
KINDS = ("random", "boundary", "zeros", "maxes")
LAYOUTS = ("linear", "swizzled_128x4", "swizzled_8x4")
FORMATS = ("nvfp4", "nvfp4_per_token")
DTYPES = ("BF16", "F16")


@dataclass(frozen=True)
class FourOverSix:
    """A variant of the 4-over-6 option."""

    error: str
    error_math: str
    e4m3_max: int


VARIANTS = (None, *itertools.starmap(
    FourOverSix, itertools.product(("mae", "mse"), ("strict", "fast"), (448, 256))
))  # fmt: skip


def make_case(kind: str, shape: tuple[int, int], dtype: str) -> tuple[bytes, np.ndarray]:
    """Input bytes and the same numbers as float32."""
    rows, cols = shape
    if kind == "random":
        x = np.random.default_rng([rows, cols]).standard_normal(shape)
        x[0] *= rows == 1
    elif kind == "boundary":
        base = np.linspace(-12.0, 12.0, cols // 2)
        x = np.broadcast_to(np.stack([base - 1e-3, base + 1e-3], axis=1).reshape(-1), shape)
    elif kind == "zeros":
        x = np.zeros(shape)
    else:
        x = np.full(shape, 65504.0 if dtype == "F16" else (2 - 2.0**-7) * 2.0**127)
    x = np.ascontiguousarray(x, dtype=np.float32)
    if dtype == "F16":
        half = x.astype(np.float16)
        return half.tobytes(), half.astype(np.float32)
    bits = x.view(np.uint32)
    bits = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return bits.astype(np.uint16).tobytes(), (bits << np.uint32(16)).view(np.float32)


def to_e4m3(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes and values of non-negative numbers, clamped to the largest E4M3 number."""
    x = np.minimum(x, E4M3_MAX).astype(np.float64)
    exponent = np.where(x < 2.0**-6, -6, np.frexp(x)[1] - 1)
    steps = np.rint(np.ldexp(x, 3 - exponent)).astype(np.int64)  # In units of 2^(exponent - 3).
    value = np.ldexp(steps.astype(np.float64), exponent - 3)
    codes = (exponent + 6) * 8 + steps
    return codes.astype(np.uint8), value.astype(np.float32)


def to_e2m1(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes and values, by comparison as in the reference; the sign bit is always kept."""
    a = np.abs(x)
    code = np.zeros(x.shape, np.uint8)
    code[a > 0.25] = 1
    code[a >= 0.75] = 2
    code[a > 1.25] = 3
    code[a >= 1.75] = 4
    code[a > 2.5] = 5
    code[a >= 3.5] = 6
    code[a > 5.0] = 7
    value = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)[code]
    negative = np.signbit(x)
    return code | (negative.astype(np.uint8) << np.uint8(3)), np.where(negative, -value, value)


def encode_blocks(blocks, scale, decode_scale) -> tuple[np.ndarray, np.ndarray]:
    """Codes and values of blocks with a decoded scale each."""
    multiplier = np.minimum(np.float32(1) / (scale * decode_scale), FLOAT_MAX)
    return to_e2m1(blocks * multiplier[..., None])


def block_error(blocks, candidate, g, decode_scale, row_amax, variant: FourOverSix) -> np.ndarray:
    """Sum over each block, one element after another."""
    scale, values = candidate
    total = np.zeros(blocks.shape[:-1], np.float32)
    for i in range(16):
        decoded, x = values[..., i] * scale, blocks[..., i]
        if variant.error_math == "fast":
            e = decoded - x * g
        elif row_amax is None:
            e = decoded * decode_scale - x
        else:
            e = decoded * row_amax / np.float32(6 * variant.e4m3_max) - x
        total = total + (np.abs(e) if variant.error == "mae" else e * e)
    return total


def encode_four_over_six(blocks, amax, g, row_amax, variant: FourOverSix):
    """Scale codes and element codes; zero blocks have no signs."""
    decode_scale = np.float32(1) / g
    to_six = amax / E2M1_MAX * g
    candidates = []
    for unrounded in (to_six, to_six * np.float32(1.5)):
        scale_codes, scale = to_e4m3(unrounded)
        codes, values = encode_blocks(blocks, scale, decode_scale)
        error = block_error(blocks, (scale, values), g, decode_scale, row_amax, variant)
        candidates.append((scale_codes, codes, error))
    (scale6, codes6, error6), (scale4, codes4, error4) = candidates
    four = error4 < error6
    zero = amax == 0
    scale_codes = np.where(zero, np.uint8(0), np.where(four, scale4, scale6))
    codes = np.where(four[..., None], codes4, codes6)
    return scale_codes, np.where(zero[..., None], np.uint8(0), codes)


def reference(x: np.ndarray, fmt: str, variant: FourOverSix | None):
    """(scale codes [rows, blocks], codes [rows, cols], global decode scales)."""
    rows, cols = x.shape
    blocks = x.reshape(rows, cols // 16, 16)
    per_token = fmt == "nvfp4_per_token"
    largest = np.abs(x).max(axis=1) if per_token else np.abs(x).max(keepdims=True).reshape(1)
    numerator = np.float32((variant.e4m3_max if variant else 448) * 6)
    g = np.minimum(numerator / largest, FLOAT_MAX)
    if not per_token:
        g = np.where(largest == 0, np.float32(1), g)
    stored = np.float32(1) / g
    if per_token:
        stored = np.where(largest == 0, np.float32(0), stored)
    g = g.astype(np.float32)[:, None]
    amax = np.abs(blocks).max(axis=-1)
    if variant:
        row_amax = largest[:, None] if per_token else None
        scale_codes, codes = encode_four_over_six(blocks, amax, g, row_amax, variant)
    else:
        scale_codes, scale = to_e4m3(np.minimum(amax * (g * (np.float32(1) / E2M1_MAX)), FLOAT_MAX))
        codes, _ = encode_blocks(blocks, scale, np.float32(1) / g)
        codes = np.where((amax == 0)[..., None], np.signbit(blocks) * np.uint8(8), codes)
    return scale_codes, codes.reshape(rows, cols), stored.astype(np.float32)


def packed_scales(scales: np.ndarray, layout: str) -> np.ndarray:
    """Scales in memory order, by padding and permuting axes."""
    if layout == "linear":
        return scales
    tile = 128 if layout == "swizzled_128x4" else 8
    rows, blocks = scales.shape
    padded = np.pad(scales, [(0, -rows % tile), (0, -blocks % 4)])
    tiles = padded.reshape(padded.shape[0] // tile, tile, padded.shape[1] // 4, 4)
    if tile == 8:
        return tiles.transpose(0, 2, 1, 3)
    tiles = tiles.reshape(tiles.shape[0], 4, 32, tiles.shape[2], 4)
    return tiles.transpose(0, 3, 2, 1, 4)


def check(scratch: Path, shape, kind: str, dtype: str, fmt: str, variant, layout: str) -> None:
    """Compares one call of the library with the reference."""
    data, x = make_case(kind, shape, dtype)
    with np.errstate(all="ignore"):
        scales, codes, stored = reference(x, fmt, variant)
    arguments = {"format": fmt, "layout": layout, "math": "exact", "dtype": dtype}
    if variant:
        arguments["fos"] = f"{variant.error},{variant.error_math},{variant.e4m3_max}"
    got = quantize_raw(scratch, data, (1, *shape), arguments)
    packed = codes[:, 0::2] | (codes[:, 1::2] << np.uint8(4))
    expected = (packed.tobytes(), packed_scales(scales, layout).tobytes(), stored.tobytes())
    for name, came, wanted in zip(("values", "scales", "global scale"), got, expected):
        assert came == wanted, f"{name} of {kind} {shape} {arguments}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SMALL_SHAPES, ids=str)
def test_small_shapes(shape: tuple[int, int], kind: str, tmp_path: Path) -> None:
    """Every format, input type and 4-over-6 variant; the layouts alternate."""
    layouts = itertools.cycle(LAYOUTS)
    for fmt, dtype, variant in itertools.product(FORMATS, DTYPES, VARIANTS):
        layout = next(layouts)
        check(tmp_path, shape, kind, dtype, fmt, variant, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SMALL_SHAPES, ids=str)
def test_layouts(shape: tuple[int, int], layout: str, tmp_path: Path) -> None:
    """Every layout with every small shape."""
    for fmt in FORMATS:
        check(tmp_path, shape, "random", "BF16", fmt, None, layout)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", LARGE_SHAPES, ids=str)
def test_large_shapes(shape: tuple[int, int], kind: str, tmp_path: Path) -> None:
    """One combination each, chosen so that all options occur over the shapes and kinds."""
    number = LARGE_SHAPES.index(shape) * len(KINDS) + KINDS.index(kind)
    variant = VARIANTS[number % len(VARIANTS)] if number % 2 else None
    fmt, dtype = FORMATS[number // 2 % 2], DTYPES[number % 3 % 2]
    check(tmp_path, shape, kind, dtype, fmt, variant, LAYOUTS[number % 3])
