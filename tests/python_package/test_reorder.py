"""Shuffles, packed bits and 8-bit groups against plain NumPy."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import narrowfloat as nf

BF16 = ml_dtypes.bfloat16
MAXIMA = {"float8_e4m3fn": 448, "float8_e5m2": 57344, "int8": 127}


def source_rows(rows: int, tile: int) -> np.ndarray:
    """Which row of the plain matrix a place of the shuffled one holds."""
    p = np.arange(rows)
    if tile % 128 == 0:
        return p // 32 * 32 + p % 32 % 8 * 4 + p % 32 // 8
    return p // 16 * 16 + p % 16 % 8 * 2 + p % 16 // 8


@pytest.mark.parametrize("tile", [64, 128, 192, 256])
@pytest.mark.parametrize("dtype", [np.uint8, BF16, np.float32, ml_dtypes.float8_e4m3fn, np.int64])
def test_rows_are_shuffled_and_back(tile, dtype):
    matrix = np.random.default_rng(tile).integers(0, 100, (3, 64, 10)).astype(dtype)
    shuffled = nf.shuffle_rows(matrix, tile)
    assert shuffled.dtype == matrix.dtype
    expected = matrix[:, source_rows(64, tile)]
    np.testing.assert_array_equal(shuffled.view(np.uint8), expected.view(np.uint8))
    back = nf.unshuffle_rows(shuffled, tile, out=np.empty_like(matrix))
    np.testing.assert_array_equal(back.view(np.uint8), matrix.view(np.uint8))


@pytest.mark.parametrize("shape", [(128, 8), (256, 5), (2, 128, 3)])
@pytest.mark.parametrize("tile", [64, 128])
def test_scales_are_shuffled_and_swizzled(shape, tile):
    scales = np.random.default_rng(1).integers(0, 256, shape, np.uint8)
    shuffled = nf.shuffle_scales(scales, tile)
    *_, rows, blocks = shape
    padded = np.pad(scales, [(0, 0)] * (len(shape) - 1) + [(0, -blocks % 4)])
    plain = padded.reshape(-1, rows, padded.shape[-1])[:, source_rows(rows, tile)]
    # [row tiles][row / 32 % 4][row % 32][block tiles][4] -> [row tiles][block tiles][32][4][4]
    tiles = plain.reshape(plain.shape[0], rows // 128, 4, 32, -1, 4).transpose(0, 1, 4, 3, 2, 5)
    np.testing.assert_array_equal(shuffled.reshape(-1), tiles.reshape(-1))
    np.testing.assert_array_equal(nf.unshuffle_scales(shuffled, rows, blocks, tile), scales)


@pytest.mark.parametrize("order", ["big", "little"])
@pytest.mark.parametrize("dtype", [np.bool_, np.uint8])
def test_bits_are_numpys(order, dtype):
    random = np.random.default_rng(2)
    for count in (0, 1, 8, 9, 1000):
        x = (random.integers(0, 2, count) * random.integers(1, 200, count)).astype(dtype)
        np.testing.assert_array_equal(nf.pack_bits(x, order), np.packbits(x != 0, bitorder=order))
    for width in (np.int32, np.int64):
        offsets = np.array([0, 3, 3, 500, 1000], width)
        packed, starts = nf.segment_pack_bits(x, offsets, order)
        parts = [np.packbits(x[a:b] != 0, bitorder=order)
                 for a, b in zip(offsets, offsets[1:], strict=False)]  # fmt: skip
        assert starts.dtype == width and packed.size == starts[-1]
        np.testing.assert_array_equal(packed, np.concatenate(parts))
        np.testing.assert_array_equal(starts, np.cumsum([0] + [part.size for part in parts]))


def groups_of(x: np.ndarray, size: int, dtype: str, eps: float, divides: bool, power: bool):
    groups = x.astype(np.float32).reshape(*x.shape[:-1], -1, size)
    largest = np.maximum(np.fmax.reduce(np.abs(groups), axis=-1, initial=0), np.float32(eps))
    scale = (largest / np.float32(MAXIMA[dtype])).astype(np.float32)
    if power:
        mantissa, exponent = np.frexp(np.maximum(scale, np.float32(1e-10)))
        scale = np.ldexp(np.float32(1), exponent - (mantissa == 0.5)).astype(np.float32)
    with np.errstate(invalid="ignore"):
        scaled = (groups / scale[..., None] if divides
                  else groups * (np.float32(1) / scale)[..., None])  # fmt: skip
        scaled = np.clip(scaled, -MAXIMA[dtype] - (dtype == "int8"), MAXIMA[dtype])
        if dtype == "int8":
            rounded = np.floor(scaled + np.float32(0.5))
            codes = np.where(np.isnan(rounded), 0, rounded).astype(np.int8)
        else:
            codes = scaled.astype(getattr(ml_dtypes, dtype)).view(np.uint8)
            codes = np.where(np.isnan(scaled), np.uint8(0x7F), codes)
    return codes.reshape(x.shape), scale


@pytest.mark.parametrize("dtype", list(MAXIMA))
@pytest.mark.parametrize("x_dtype", [np.float32, np.float16, BF16])
def test_groups_have_their_scales(dtype, x_dtype):
    random = np.random.default_rng(3)
    x = random.standard_normal((2, 5, 96)) * 2.0 ** random.integers(-8, 8, (2, 5, 1))
    x[0, 0, 3], x[1, 2, 32:64] = np.nan, 0
    x = x.astype(x_dtype)
    for size in (16, 32, 12):
        codes, scales = nf.quantize_group_8bit(x, size, dtype)
        expected = groups_of(x, size, dtype, 1e-10, False, False)
        np.testing.assert_array_equal(scales, expected[1])
        np.testing.assert_array_equal(codes, expected[0])
    for order, rows in (("column_major", 5), ("column_major_aligned", 8)):
        for power in (False, True):
            codes, scales = nf.quantize_group_8bit(x[0], 32, dtype, scale_order=order,
                                                   power_of_two_scales=power)  # fmt: skip
            expected = groups_of(x[0], 32, dtype, 1e-10, True, power)
            assert scales.shape == (3, rows)
            np.testing.assert_array_equal(scales[:, :5], expected[1].T)
            np.testing.assert_array_equal(scales[:, 5:], 0)
            np.testing.assert_array_equal(codes, expected[0])


def test_errors_name_the_argument():
    with pytest.raises(ValueError, match="group_size: expected a divisor of the 32 columns, got 5"):
        nf.quantize_group_8bit(np.zeros((2, 32), np.float32), 5)
    with pytest.raises(ValueError, match="power_of_two_scales: expected column-major scales"):
        nf.quantize_group_8bit(np.zeros((2, 32), np.float32), 16, power_of_two_scales=True)
    with pytest.raises(ValueError, match="dtype: expected one of float8_e4m3fn, float8_e5m2, int8"):
        nf.quantize_group_8bit(np.zeros((2, 32), np.float32), 16, "uint8")
    with pytest.raises(ValueError, match="input: expected a multiple of 32 rows"):
        nf.shuffle_rows(np.zeros((16, 4), np.uint8), 128)
    with pytest.raises(ValueError, match="order: expected one of big, little"):
        nf.pack_bits(np.zeros(8, np.uint8), "middle")
    with pytest.raises(ValueError, match="offsets: expected ascending values"):
        nf.segment_pack_bits(np.zeros(8, np.uint8), np.array([0, 5, 2]))
