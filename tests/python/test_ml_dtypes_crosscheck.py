"""The model's element codecs against ml_dtypes, an unrelated implementation of the same types.

Differences that are decisions of the library, not errors:
    * ml_dtypes turns what lies beyond the largest E4M3 number (above the midpoint to where the next
      one would be, 464) into NaN; here E4M3 saturates at 448, infinities too.
    * ml_dtypes keeps the sign of NaN in E4M3 (0xFF); here NaN is 0x7F.
    * E2M1 has no NaN: ml_dtypes gives a negative zero (0x8), the library 7.
"""

from __future__ import annotations

import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "golden"))

import reference_floats as floats  # noqa: E402
import reference_model as model  # noqa: E402

EVERY_16 = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
EVERY_8 = np.arange(256, dtype=np.uint32).astype(np.uint8)


def same(x: np.ndarray, y: np.ndarray) -> bool:
    """Equal as numbers, signs of zeros included; any NaN equals any NaN."""
    signs = (np.signbit(x) == np.signbit(y)) | np.isnan(x)
    return bool(np.all(signs & ((x == y) | (np.isnan(x) & np.isnan(y)))))


def inputs(dtype: str) -> np.ndarray:
    """All 2^16 numbers of a 16-bit type, by a conversion that is not the model's."""
    if dtype == "BF16":
        return EVERY_16.view(ml_dtypes.bfloat16).astype(np.float32)
    return EVERY_16.view(np.float16).astype(np.float32)


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_decode_16_bit(dtype: str) -> None:
    """All bit patterns of both 16-bit types."""
    assert same(floats.decode_float(EVERY_16, dtype), inputs(dtype))


@pytest.mark.parametrize(
    ("decode", "name"),
    [
        (floats.decode_e4m3, "float8_e4m3fn"),
        (floats.decode_e5m2, "float8_e5m2"),
        (floats.decode_e8m0, "float8_e8m0fnu"),
    ],
)
def test_decode_8_bit(decode, name: str) -> None:
    """All 256 codes."""
    assert same(decode(EVERY_8), EVERY_8.view(getattr(ml_dtypes, name)).astype(np.float32))


def test_decode_e2m1() -> None:
    """All 16 codes."""
    codes = EVERY_8[:16]
    assert same(floats.decode_e2m1(codes), codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32))


def scaled_inputs(dtype: str) -> np.ndarray:
    """All numbers of a 16-bit type with several multipliers, so that every rounding occurs."""
    x = inputs(dtype)
    with np.errstate(all="ignore"):
        return np.concatenate([x, *(x * np.float32(m) for m in (1 / 3, 1 / 448, 6.0, 2.0**-9))])


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_encode_e4m3(dtype: str) -> None:
    """Equal below the overflow of ml_dtypes; NaN and saturation as documented above."""
    x = scaled_inputs(dtype)
    in_range = np.abs(x) <= 464
    with np.errstate(all="ignore"):
        expected = x.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    codes = floats.encode_e4m3(x)
    assert np.array_equal(codes[in_range], expected[in_range])
    above = np.abs(x) > 464
    assert np.array_equal(codes[above], np.where(x[above] > 0, 0x7E, 0xFE))
    assert set(codes[np.isnan(x)]) == {0x7F}


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_encode_e2m1(dtype: str) -> None:
    """Equal for every number; ml_dtypes saturates too."""
    x = scaled_inputs(dtype)
    numbers = ~np.isnan(x)
    with np.errstate(all="ignore"):
        expected = x.astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 0xF
    codes = floats.encode_e2m1(x)
    assert np.array_equal(codes[numbers], expected[numbers])
    assert set(codes[~numbers]) == {7}


@pytest.mark.parametrize("source", ["BF16", "F16"])
def test_encode_16_bit(source: str) -> None:
    """BF16 from products that need rounding."""
    x = scaled_inputs(source)
    numbers = ~np.isnan(x)
    with np.errstate(all="ignore"):
        expected = x.astype(ml_dtypes.bfloat16).view(np.uint16)
    assert np.array_equal(floats.encode_float(x, "BF16")[numbers], expected[numbers])


@pytest.mark.parametrize(
    ("fmt", "element"), [("mxfp4", "float4_e2m1fn"), ("mxfp8", "float8_e4m3fn")]
)
def test_decode_mx(fmt: str, element: str) -> None:
    """Every code with every scale byte."""
    count = 16 if fmt == "mxfp4" else 256
    columns = max(count, 32)
    codes = np.tile(EVERY_8[:count], (256, columns // count))
    values = codes if fmt == "mxfp8" else model.pack_nibbles(codes)
    scales = EVERY_8.repeat(columns // 32)
    q = model.Quantized(fmt, "linear", 1, 256, columns, values[None], scales)
    got = floats.decode_float(model.dequantize(q, "F32"), "F32")[0]
    scale = EVERY_8.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    expected = codes.view(getattr(ml_dtypes, element)).astype(np.float64) * scale[:, None]
    with np.errstate(all="ignore"):
        assert same(got, expected.astype(np.float32))
