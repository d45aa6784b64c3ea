"""Numbers of the reference model: roundings, codes, and the arithmetic of the two modes.

Conversions search tables of representable values instead of manipulating bits. "Raw" arrays hold
bit patterns (uint8, uint16, uint32), other arrays hold float32 values. Every float32 operation is
one IEEE operation; the fast mode adds flush-to-zero and the approximate reciprocal. NaN never
carries information: conversions test for it first and store canonical patterns.
"""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Callable

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[2]
RECIPROCAL_TABLE = REPOSITORY / "src/formats/data/rcp_approx_ftz_delta_h100.i8.gz"
RECIPROCAL_TABLE_SHA256 = "862bea101da795bf5fd46df9dfe5142a79c29edd831e2da30aa84385d885e8fe"

quiet = np.errstate(all="ignore")

# --- Bit patterns and constants ------------------------------------------------------------------


def from_bits(bits) -> np.ndarray:
    """float32 values with the given bit patterns."""
    return np.asarray(bits, dtype=np.uint32).view(np.float32)


def to_bits(x) -> np.ndarray:
    """Bit patterns of float32 values, NaN as the canonical 0x7FFFFFFF."""
    x = np.asarray(x, dtype=np.float32)
    return np.where(np.isnan(x), np.uint32(0x7FFFFFFF), x.view(np.uint32))


ZERO = np.float32(0)
ONE = np.float32(1)
SIX = np.float32(6)
INFINITY = np.float32(np.inf)
NAN = np.float32(np.nan)
FLT_MAX = np.finfo(np.float32).max
FLT_MIN = np.finfo(np.float32).tiny  # 2^-126, the least normal number.
C6 = from_bits(0x3E2AAAAB)[()]  # The float32 number nearest to 1/6.
C448 = from_bits(0x3B124925)[()]  # The float32 number nearest to 1/448.


def pick(condition, yes, no) -> np.ndarray:
    """np.where that stays in float32."""
    return np.where(condition, np.float32(yes), np.float32(no)).astype(np.float32)


def number_min(x, y) -> np.ndarray:
    """Minimum in which a number wins over NaN."""
    x, y = np.broadcast_arrays(np.asarray(x, np.float32), np.asarray(y, np.float32))
    return np.where(np.isnan(x), y, np.where(np.isnan(y), x, np.where(x < y, x, y)))


def absolute_max(x: np.ndarray, all_nan: np.float32 = ZERO) -> np.ndarray:
    """Maximum of |x| along the last axis; NaN loses, `all_nan` where there is no number."""
    magnitude = np.where(np.isnan(x), np.float32(-1), np.abs(x))
    largest = np.max(magnitude, axis=-1, initial=np.float32(-1))
    return pick(largest < 0, all_nan, largest)


# --- Rounding to narrower types ------------------------------------------------------------------


@quiet
def round_to(x: np.ndarray, precision: int, least_exponent: int, largest: float) -> np.ndarray:
    """Rounds float64 to a binary format, nearest even, overflow to infinity, as float64.

    `precision` counts significant bits with the hidden one; `least_exponent` is that of the least
    normal number; smaller numbers keep its quantum.
    """
    x = np.asarray(x, dtype=np.float64)
    finite = np.isfinite(x)
    safe = np.where(finite, x, 0.0)
    exponent = np.frexp(safe)[1] - 1
    quantum = np.maximum(exponent, least_exponent) - (precision - 1)
    rounded = np.ldexp(np.rint(np.ldexp(safe, -quantum)), quantum)
    rounded = np.where(np.abs(rounded) > largest, np.copysign(np.inf, safe), rounded)
    return np.where(finite, rounded, x)


BF16_MAX = from_bits(0x7F7F0000)[()]
FP16_MAX = np.float32(65504)
LARGEST = {"BF16": BF16_MAX, "F16": FP16_MAX, "F32": FLT_MAX}
RAW_TYPE = {"BF16": np.uint16, "F16": np.uint16, "F32": np.uint32, "F8_E4M3": np.uint8}


@quiet
def encode_float(x: np.ndarray, dtype: str) -> np.ndarray:
    """Raw BF16, F16 or F32 nearest to float64 or float32 numbers; NaN is canonical."""
    x = np.asarray(x)
    if dtype == "F32":
        return to_bits(x.astype(np.float32))
    if dtype == "BF16":
        rounded = round_to(x, 8, -126, float(BF16_MAX)).astype(np.float32)
        raw = (rounded.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    else:
        raw = round_to(x, 11, -14, float(FP16_MAX)).astype(np.float16).view(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), raw)


@quiet
def decode_float(raw: np.ndarray, dtype: str) -> np.ndarray:
    """float32 values of a raw tensor; exact for every type."""
    raw = np.ascontiguousarray(raw, dtype=RAW_TYPE[dtype])
    if dtype == "F32":
        return raw.view(np.float32)
    if dtype == "BF16":
        return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype == "F16":
        return raw.view(np.float16).astype(np.float32)
    return decode_e4m3(raw)


# --- Element and scale codes ---------------------------------------------------------------------


def minifloat_magnitudes(exponent_bits: int, mantissa_bits: int, bias: int) -> np.ndarray:
    """Value of every code without sign, by the definition; special codes are not special here."""
    values = []
    for code in range(1 << (exponent_bits + mantissa_bits)):
        exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
        fraction = mantissa / (1 << mantissa_bits)
        if exponent == 0:
            values.append(fraction * 2.0 ** (1 - bias))
        else:
            values.append((1 + fraction) * 2.0 ** (exponent - bias))
    return np.array(values)


E2M1_VALUES = minifloat_magnitudes(2, 1, 1)
E4M3_VALUES = minifloat_magnitudes(4, 3, 7)[:127]  # Code 127 is NaN.
E5M2_VALUES = minifloat_magnitudes(5, 2, 15)[:124]  # Codes 124 to 127: infinity and NaN.


def nearest_code(x: np.ndarray, values: np.ndarray, sign_bit: int, nan_code: int) -> np.ndarray:
    """Code of the table entry nearest to |x|: ties to the even code, saturating, sign kept."""
    magnitude = np.abs(np.asarray(x, np.float32).astype(np.float64))
    midpoints = (values[:-1] + values[1:]) / 2
    below = np.searchsorted(midpoints, magnitude, side="left")
    tie = midpoints[np.minimum(below, len(midpoints) - 1)] == magnitude
    code = below + (tie & (below % 2 == 1))
    code = code + np.where(np.signbit(x), sign_bit, 0)
    return np.where(np.isnan(x), nan_code, code).astype(np.uint8)


@quiet
def encode_e2m1(x) -> np.ndarray:
    """E2M1 codes (0 to 15); NaN gives 7."""
    return nearest_code(x, E2M1_VALUES, 0x8, 0x7)


@quiet
def encode_e4m3(x) -> np.ndarray:
    """E4M3 codes, saturating at 448; NaN gives 0x7F."""
    return nearest_code(x, E4M3_VALUES, 0x80, 0x7F)


def decode_e2m1(code: np.ndarray) -> np.ndarray:
    """float32 values of E2M1 codes 0 to 15."""
    return np.concatenate([E2M1_VALUES, -E2M1_VALUES]).astype(np.float32)[code]


def decode_e4m3(code: np.ndarray) -> np.ndarray:
    """float32 values of E4M3 codes."""
    positive = np.append(E4M3_VALUES, np.nan)
    return np.concatenate([positive, -positive]).astype(np.float32)[code]


def decode_e5m2(code: np.ndarray) -> np.ndarray:
    """float32 values of E5M2 codes."""
    positive = np.concatenate([E5M2_VALUES, [np.inf, np.nan, np.nan, np.nan]])
    return np.concatenate([positive, -positive]).astype(np.float32)[code]


E8M0_VALUES = 2.0 ** (np.arange(255) - 127.0)


def decode_e8m0(byte: np.ndarray) -> np.ndarray:
    """float32 values of UE8M0 bytes; 0 is 2^-127, 255 is NaN."""
    return np.append(E8M0_VALUES, np.nan).astype(np.float32)[byte]


@quiet
def encode_e8m0_up(x) -> np.ndarray:
    """Least byte whose value is at least |x|, at most 254; NaN gives 255."""
    magnitude = np.abs(np.asarray(x, np.float32).astype(np.float64))
    byte = np.minimum(np.searchsorted(E8M0_VALUES, magnitude, side="left"), 254)
    return np.where(np.isnan(x), 255, byte).astype(np.uint8)


def inverse_power(byte: np.ndarray) -> np.ndarray:
    """float32 2^(127 - byte); NaN for 255."""
    return np.append(2.0 ** (127.0 - np.arange(255)), np.nan).astype(np.float32)[byte]


# --- Arithmetic of the two modes -----------------------------------------------------------------


@cache
def reciprocal_table() -> np.ndarray:
    """Difference in ulp between the approximate and the exact reciprocal, for every mantissa."""
    raw = gzip.decompress(RECIPROCAL_TABLE.read_bytes())
    digest = hashlib.sha256(raw).hexdigest()
    if digest != RECIPROCAL_TABLE_SHA256:
        raise ValueError(f"{RECIPROCAL_TABLE}: SHA-256 {digest}, not {RECIPROCAL_TABLE_SHA256}")
    return np.frombuffer(raw, dtype=np.int8)


def flush(x) -> np.ndarray:
    """Denormals become zero of their sign."""
    x = np.asarray(x, np.float32)
    return np.where(np.abs(x) < FLT_MIN, np.copysign(ZERO, x), x)


@quiet
def approximate_reciprocal(x) -> np.ndarray:
    """rcp.approx.ftz.f32, from the measured table."""
    x = np.asarray(x, np.float32)
    bits = x.view(np.uint32)
    sign, exponent, mantissa = bits >> 31, (bits >> 23) & 0xFF, bits & 0x7FFFFF
    base = (ONE / from_bits(mantissa | 0x3F800000)).view(np.uint32).astype(np.int64)
    base = base + reciprocal_table()[mantissa]
    result_exponent = (base >> 23) - (exponent.astype(np.int64) - 127)
    result = (result_exponent << 23) | (base & 0x7FFFFF)
    result = np.where(result_exponent <= 0, 0, result)
    result = np.where(exponent == 0, 0x7F800000, result)
    result = np.where(exponent == 255, 0, result).astype(np.uint32) | (sign << 31)
    return np.where(np.isnan(x), NAN, result.astype(np.uint32).view(np.float32))


@quiet
def multiply_ftz(x, y) -> np.ndarray:
    """mul.ftz.f32: underflow is judged after rounding to 24 bits with unbounded exponent."""
    x, y = np.broadcast_arrays(flush(x), flush(y))
    exact = np.abs(x.astype(np.float64) * y.astype(np.float64))
    product = x * y
    least = 2.0**-126
    vanishes = exact < least * (1 - 2.0**-25)
    tiny = np.where(vanishes, ZERO, FLT_MIN)
    return np.where(exact < least, np.copysign(tiny, product), product)


@dataclass(frozen=True)
class Arithmetic:
    """The float32 operations of a mode."""

    mode: str
    mul: Callable
    add: Callable
    sub: Callable
    div: Callable
    is_zero: Callable

    @property
    def is_fast(self) -> bool:
        """Whether this is the flush-to-zero arithmetic."""
        return self.mode == "fast"


EXACT = Arithmetic(
    mode="exact",
    mul=quiet(lambda x, y: np.float32(x) * np.float32(y)),
    add=quiet(lambda x, y: np.float32(x) + np.float32(y)),
    sub=quiet(lambda x, y: np.float32(x) - np.float32(y)),
    div=quiet(lambda x, y: np.float32(x) / np.float32(y)),
    is_zero=lambda x: np.asarray(x) == 0,
)
# div is the correctly rounded quotient of flushed operands, not a product with a reciprocal. The
# quotients formed here (by 2688 or 1536) never round up to the least normal number, so flushing the
# IEEE quotient is right.
FAST = Arithmetic(
    mode="fast",
    mul=multiply_ftz,
    add=quiet(lambda x, y: flush(flush(x) + flush(y))),
    sub=quiet(lambda x, y: flush(flush(x) - flush(y))),
    div=quiet(lambda x, y: flush(flush(x) / flush(y))),
    is_zero=lambda x: flush(x) == 0,
)
ARITHMETIC = {"exact": EXACT, "fast": FAST}


@quiet
def fused_multiply_add(x, y, z) -> np.ndarray:
    """x * y + z with a single rounding.

    The product of two float32 numbers is exact in float64. Its sum with z is split into a rounded
    sum and an exact error (TwoSum); the error makes the sum round to odd, after which rounding to
    float32 gives what rounding the exact value would.
    """
    x, y, z = (np.asarray(v, np.float32).astype(np.float64) for v in (x, y, z))
    product = x * y
    total = np.asarray(product + z)
    virtual = total - product
    error = (product - (total - virtual)) + (z - virtual)
    even = (total.view(np.uint64) & np.uint64(1)) == 0
    inexact = np.isfinite(total) & (error != 0)
    toward_error = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    return np.where(inexact & even, toward_error, total).astype(np.float32)


# --- Converters between scale directions ---------------------------------------------------------


def encode_scale_from_amax(amax, e4m3_max: int = 448) -> np.ndarray:
    """g = e4m3_max * 6 / amax, at most FLT_MAX; 1 where that is no use."""
    g = number_min(EXACT.div(np.float32(e4m3_max * 6), amax), FLT_MAX)
    return pick((np.asarray(amax) == 0) | (g == 0), ONE, g)


def decode_scale_from_encode(g) -> np.ndarray:
    """1 / g, in either mode."""
    return EXACT.div(ONE, g)


def encode_scale_from_decode(d, mode: str = "exact") -> np.ndarray:
    """1 / d, approximate in fast mode."""
    return approximate_reciprocal(d) if mode == "fast" else EXACT.div(ONE, d)
