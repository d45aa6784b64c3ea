"""Independent model of the quantizers: what every output byte must be.

The C++ library is judged by this file, so it shares nothing with it: it was written from the
numerics documentation alone, uses NumPy arrays instead of scalar code, and defines conversions by
searching tables of representable values instead of manipulating bits. It is slow and meant to be
read. Names follow the documentation: a is a block maximum, g an encode scale (multiplies before
quantization), d a decode scale, SF a decoded block scale, m the multiplier of a block.

Conventions
    * "raw" arrays hold bit patterns (uint8, uint16, uint32), other arrays hold float32 values.
    * Every float32 operation is one IEEE operation. The fast mode adds flush-to-zero and the
      approximate reciprocal.
    * NaN never carries information: conversions test for it first and store canonical patterns.
"""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass, field
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


# --- Block quantizers: x [..., V], one scale argument per block [...] -----------------------------


@dataclass(frozen=True)
class FourOverSix:
    """The option of NVFP4 that also tries to map a block's maximum to 4."""

    error: str = "mae"  # mae | mse
    error_math: str = "strict"  # strict | fast
    e4m3_max: int = 448  # 448 | 256


def clamped_reciprocal(x) -> np.ndarray:
    """min(1 / x, FLT_MAX), where a number wins over NaN."""
    return number_min(EXACT.div(ONE, x), FLT_MAX)


def nvfp4_multiplier(scale, decode_scale, math: Arithmetic) -> np.ndarray:
    """What takes a block with stored scale `scale` to the range of E2M1."""
    product = math.mul(scale, decode_scale)
    return approximate_reciprocal(product) if math.is_fast else clamped_reciprocal(product)


def quantize_e2m1(x: np.ndarray, multiplier: np.ndarray, math: Arithmetic) -> np.ndarray:
    """Codes of the elements of blocks, given one multiplier per block."""
    return encode_e2m1(math.mul(x, multiplier[..., None]))


def nvfp4_blocks(x, g, mode: str, d=None) -> tuple[np.ndarray, np.ndarray]:
    """NVFP4 with encode scale g: (scale bytes, codes).

    `d` replaces the decode scale that follows from g; the fast per-token form needs it.
    """
    math = ARITHMETIC[mode]
    a = absolute_max(x, NAN)
    if math.is_fast:
        scale = encode_e4m3(math.mul(g, math.mul(a, C6)))
        d = approximate_reciprocal(g) if d is None else d
    else:
        scale = encode_e4m3(pick(a != 0, math.mul(a, math.mul(g, C6)), ZERO))
        d = EXACT.div(ONE, g) if d is None else d
    m = nvfp4_multiplier(decode_e4m3(scale), d, math)
    return scale, quantize_e2m1(x, pick(math.is_zero(a), ZERO, m), math)


def four_over_six_error(x, codes, scale, g, d, row_amax, mode: str, option: FourOverSix):
    """Sum of |e| or e * e over each block, in index order."""
    math = ARITHMETIC[mode]
    total = np.zeros(x.shape[:-1], np.float32)
    for i in range(x.shape[-1]):
        decoded = math.mul(decode_e2m1(codes[..., i]), scale)
        if option.error_math == "fast":
            e = math.sub(decoded, math.mul(x[..., i], g))
        else:
            e = math.mul(decoded, d)
            if row_amax is not None:
                by_row = math.div(math.mul(decoded, row_amax), np.float32(6 * option.e4m3_max))
                e = np.where(row_amax > 0, by_row, e)
            e = math.sub(e, x[..., i])
        total = math.add(total, np.abs(e) if option.error == "mae" else math.mul(e, e))
    return total


def nvfp4_four_over_six_blocks(
    x, g, mode: str, option: FourOverSix, d=None, row_amax=None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """4-over-6: (scale bytes, codes, whether the candidate 4 won).

    Per-token quantizers give row_amax, and in fast mode the row's decode scale d.
    """
    math = ARITHMETIC[mode]
    a = absolute_max(x, NAN)
    if math.is_fast:
        scale_of_6 = math.mul(g, math.mul(a, C6))
        d = approximate_reciprocal(g) if d is None else d
    else:
        scale_of_6 = math.mul(math.div(a, SIX), g)
        d = EXACT.div(ONE, g)
    candidates = []
    for unrounded in (scale_of_6, math.mul(scale_of_6, np.float32(1.5))):
        scale = encode_e4m3(unrounded)
        value = decode_e4m3(scale)
        codes = quantize_e2m1(x, nvfp4_multiplier(value, d, math), math)
        error = four_over_six_error(x, codes, value, g, d, row_amax, mode, option)
        candidates.append((scale, codes, error))
    (scale6, codes6, error6), (scale4, codes4, error4) = candidates
    four = (error4 < error6) & ~math.is_zero(a)
    scale = np.where(math.is_zero(a), 0, np.where(four, scale4, scale6)).astype(np.uint8)
    codes = np.where(four[..., None], codes4, codes6)
    return scale, np.where(math.is_zero(a)[..., None], np.uint8(0), codes), four


def per_token_scales(amax, base_decode_scale, mode: str) -> tuple[np.ndarray, np.ndarray]:
    """(encode scale, stored decode scale) of rows with these maxima."""
    if mode == "fast":
        d = FAST.mul(amax, base_decode_scale)
        return approximate_reciprocal(d), d
    g = number_min(EXACT.div(EXACT.div(ONE, base_decode_scale), amax), FLT_MAX)
    g = pick(amax == 0, FLT_MAX, pick(g == 0, ONE, g))
    return g, pick(amax == 0, ZERO, EXACT.div(ONE, g))


ELEMENT_OF_MX = {"mxfp4": (SIX, C6, 2, 1), "mxfp8": (np.float32(448), C448, 8, 3)}


@quiet
def mx_scale(a: np.ndarray, fmt: str, rounding: str, mode: str) -> np.ndarray:
    """UE8M0 bytes for block maxima."""
    largest, reciprocal, largest_exponent, mantissa_bits = ELEMENT_OF_MX[fmt]
    if rounding == "up":
        return encode_e8m0_up(FAST.mul(a, reciprocal) if mode == "fast" else EXACT.div(a, largest))
    value = np.where(np.isfinite(a), a, ZERO).astype(np.float64)
    if rounding == "even":
        quantum = np.maximum(np.frexp(value)[1] - 1, -126) - mantissa_bits
        value = np.ldexp(np.floor(np.ldexp(value, -quantum) + 0.5), quantum)
    exponent_field = np.where(value < 2.0**-126, 0, np.frexp(value)[1] - 1 + 127)
    byte = np.maximum(exponent_field - largest_exponent, 0)
    return np.where(np.isnan(a), 255, np.where(np.isinf(a), 254, byte)).astype(np.uint8)


def mx_multiplier(byte: np.ndarray, mode: str) -> np.ndarray:
    """2^(127 - byte), in fast mode 0 for the bytes at either end."""
    m = inverse_power(byte)
    return pick((byte == 0) | (byte == 254), ZERO, m) if mode == "fast" else m


def mx_blocks(x, fmt: str, rounding: str, mode: str) -> tuple[np.ndarray, np.ndarray]:
    """MXFP4 or MXFP8: (scale bytes, codes)."""
    math = ARITHMETIC[mode]
    byte = mx_scale(absolute_max(x, NAN), fmt, rounding, mode)
    product = math.mul(x, mx_multiplier(byte, mode)[..., None])
    if fmt == "mxfp4":
        return byte, encode_e2m1(product)
    if math.is_fast:
        product = pick(np.isnan(product), np.float32(448), product)
    return byte, encode_e4m3(product)


DEFAULT_EPS = {"reciprocal": 0.0, "reciprocal_pow2": 0.0, "amax_div": 1e-4, "pow2_ceil": 1e-4}


def power_of_two_at_least(x: np.ndarray) -> np.ndarray:
    """Least normal power of two that is >= x, at most 2^127."""
    return (2.0 ** (np.clip(encode_e8m0_up(x), 1, 254) - 127.0)).astype(np.float32)


@quiet
def fp8_blocks(x, rule: str, eps, mode: str, largest) -> tuple[np.ndarray, np.ndarray]:
    """FP8 with a float32 scale: (decode scales, codes). `largest` is that of the input's type."""
    a = absolute_max(x)
    if mode == "fast" and rule == "reciprocal":
        m = pick(a == 0, ONE, FAST.mul(np.float32(448), approximate_reciprocal(a)))
        return approximate_reciprocal(m), encode_e4m3(FAST.mul(x, m[..., None]))
    a = np.maximum(a, np.float32(eps))
    if rule in ("amax_div", "pow2_ceil"):
        scale = EXACT.div(a, np.float32(448))
        scale = power_of_two_at_least(scale) if rule == "pow2_ceil" else scale
        m = EXACT.div(ONE, scale)
    else:
        m = EXACT.div(np.float32(448), a)
        m = pick(np.isinf(m), largest, m)
        m = pick((a == 0) | np.isinf(a), ONE, m)
        if rule == "reciprocal_pow2":
            m = np.exp2(np.frexp(m.astype(np.float64))[1] - 1.0).astype(np.float32)
        scale = EXACT.div(ONE, m)
    return scale, encode_e4m3(EXACT.mul(x, m[..., None]))


@quiet
def fp8_input_blocks(x, g, fmt: str, mode: str) -> tuple[np.ndarray, np.ndarray]:
    """FP4 from E4M3 input that counts as scaled already: (scale bytes, codes)."""
    math = ARITHMETIC[mode]
    if math.is_fast:
        t = math.mul(SIX, approximate_reciprocal(g))
    else:
        t = number_min(EXACT.div(SIX, g), FLT_MAX)
    h = math.mul(x, t[..., None])
    if not math.is_fast:
        h = np.where(np.isnan(h), h, np.clip(h, -FP16_MAX, FP16_MAX))
    h = decode_float(encode_float(h, "F16"), "F16")
    if fmt == "nvfp4" and not math.is_fast:
        return nvfp4_blocks(h, g, mode)
    a = absolute_max(h, NAN)
    s = math.mul(g, math.mul(a, C6) if math.is_fast else EXACT.div(a, SIX))
    byte = encode_e4m3(s) if fmt == "nvfp4" else encode_e8m0_up(s)
    if math.is_fast:
        value = decode_e4m3(byte) if fmt == "nvfp4" else decode_e8m0(byte)
        m = math.mul(g, approximate_reciprocal(value))
    else:
        m = number_min(EXACT.mul(g, inverse_power(byte)), FLT_MAX)
        m = pick(byte == 255, NAN, m)
    return byte, quantize_e2m1(h, pick(math.is_zero(s), ZERO, m), math)


@quiet
def kv_blocks(x, d, operation: str, mode: str) -> tuple[np.ndarray, np.ndarray]:
    """KV-cache NVFP4 with decode scale d; operation is kv_quantize or kv_append."""
    math = ARITHMETIC[mode]
    append = operation == "kv_append"
    a = absolute_max(x, ZERO if append else NAN)
    if not math.is_fast:
        scale = encode_e4m3(EXACT.div(a, EXACT.mul(SIX, d)))
        value = decode_e4m3(scale)
        m = pick(value == 0, ZERO, clamped_reciprocal(EXACT.mul(value, d)))
    elif append:
        unrounded = math.mul(a, approximate_reciprocal(math.mul(SIX, d)))
        scale = encode_e4m3(pick(math.is_zero(a) | math.is_zero(d), ZERO, unrounded))
        value = decode_e4m3(scale)
        m = approximate_reciprocal(math.mul(value, d))
        m = pick(math.is_zero(a) | (value == 0), ZERO, m)
    else:
        scale = encode_e4m3(math.mul(approximate_reciprocal(d), math.mul(a, C6)))
        m = approximate_reciprocal(math.mul(decode_e4m3(scale), d))
        m = pick(math.is_zero(a), ZERO, m)
    codes = quantize_e2m1(x, m, math)
    return scale, np.where(np.isnan(x), np.uint8(0), codes) if append else codes


# --- Scale images and packed values ---------------------------------------------------------------


def round_up(x: int, multiple: int) -> int:
    """x rounded up to a multiple."""
    return -(-x // multiple) * multiple


def scale_offset(layout: str, r, c, rows: int, blocks: int):
    """Position of the scale of row r, block c in an image, in scales."""
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
    """Scales in an image, padding included."""
    if layout == "linear":
        return rows * blocks
    if layout == "mn_major":
        return blocks * round_up(rows, 4)
    return round_up(rows, 8 if layout == "swizzled_8x4" else 128) * round_up(blocks, 4)


def pack_scales(matrix: np.ndarray, layout: str) -> np.ndarray:
    """Image of a [rows, blocks] matrix; padding is zero."""
    rows, blocks = matrix.shape
    image = np.zeros(scale_image_size(layout, rows, blocks), matrix.dtype)
    r, c = np.indices(matrix.shape)
    image[scale_offset(layout, r, c, rows, blocks)] = matrix
    return image


def unpack_scales(image: np.ndarray, layout: str, rows: int, blocks: int) -> np.ndarray:
    """Inverse of pack_scales."""
    r, c = np.indices((rows, blocks))
    return image[scale_offset(layout, r, c, rows, blocks)]


def grouped_scale_row(row_offset: int, group: int) -> int:
    """First scale row of a group of the grouped FP8 1x128 image."""
    return (row_offset + 31 * group) // 32 * 32


def pack_grouped_scales(matrix: np.ndarray, offsets: list[int]) -> np.ndarray:
    """mn_major image in which groups of rows start at padded rows; padding is zero."""
    groups = len(offsets) - 1
    image = np.zeros((matrix.shape[1], grouped_scale_row(offsets[-1], groups)), matrix.dtype)
    for i in range(groups):
        start, count = grouped_scale_row(offsets[i], i), offsets[i + 1] - offsets[i]
        image[:, start : start + count] = matrix[offsets[i] : offsets[i + 1]].T
    return image.reshape(-1)


def pack_nibbles(codes: np.ndarray) -> np.ndarray:
    """Two codes a byte, the even element in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << np.uint8(4))


def unpack_nibbles(packed: np.ndarray) -> np.ndarray:
    """Inverse of pack_nibbles."""
    both = np.stack([packed & np.uint8(0xF), packed >> np.uint8(4)], axis=-1)
    return both.reshape(*packed.shape[:-1], packed.shape[-1] * 2)


# --- Whole tensors --------------------------------------------------------------------------------

UNTOUCHED = 0xCC  # What value bytes hold that an operation must not write.

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
    scales: np.ndarray  # All images, flat: uint8 or float32.
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
    images = [pack_scales(scales[b], layout) for b in range(batch)]
    flat = np.concatenate(images) if images else np.zeros(0, np.uint8)
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
        image = pack_grouped_scales(scales, options.row_offsets)
    else:
        image = pack_scales(scales, layout)
    return Quantized(fmt, layout, 1, rows, cols, codes[None], image)


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
    """Logical rows and columns of a scale image."""
    height, width = block_shape(q.fmt, q.rows, q.cols)
    value_cols = q.values.shape[-1] * (1 if has_byte_values(q.fmt) else 2)
    return -(-q.rows // height), -(-value_cols // width)


def element_scales(q: Quantized) -> np.ndarray:
    """Decoded block scale of every element, float32 [batch, rows, cols]."""
    rows, blocks = scale_shape(q)
    images = q.scales.reshape(q.batch, scale_image_size(q.layout, rows, blocks))
    stored = np.stack([unpack_scales(image, q.layout, rows, blocks) for image in images])
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


# --- Fused forms: the 16-bit tensor that is quantized ---------------------------------------------

LOG2_E = from_bits(0x3FB8AA3B)[()]
LN2_HIGH = np.float32(float.fromhex("0x1.62e400p-1"))
LN2_LOW = np.float32(float.fromhex("0x1.7f7d1cp-20"))
EXPONENTIAL_COEFFICIENTS = [np.float32(c) for c in (1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1, 1)]


@quiet
def exponential(x) -> np.ndarray:
    """The library's E(x): the same bits in both modes and on every device."""
    x = np.asarray(x, np.float32)
    in_range = (x <= 89) & (x >= -104)
    safe = np.where(in_range, x, ZERO)
    n = np.rint(EXACT.mul(safe, LOG2_E))
    r = fused_multiply_add(n, -LN2_HIGH, safe)
    r = fused_multiply_add(n, -LN2_LOW, r)
    p = np.full_like(safe, np.float32(1 / 5040))
    for c in EXPONENTIAL_COEFFICIENTS:
        p = fused_multiply_add(p, r, c)
    first = np.floor(n / 2)
    result = EXACT.mul(p, np.exp2(first).astype(np.float32))
    result = EXACT.mul(result, np.exp2(n - first).astype(np.float32))
    result = np.where(in_range, result, np.where(x > 0, INFINITY, ZERO))
    return np.where(np.isnan(x), NAN, result)


@quiet
def silu(v, u, mode: str) -> np.ndarray:
    """silu(v) * u in float32."""
    v = np.asarray(v, np.float32)
    if mode == "fast":
        divisor = FAST.add(ONE, flush(exponential(-v)))
        return FAST.mul(FAST.mul(v, approximate_reciprocal(divisor)), u)
    return EXACT.mul(EXACT.div(v, EXACT.add(ONE, exponential(-v))), u)


def silu_mul(raw: np.ndarray, dtype: str, mode: str) -> np.ndarray:
    """Raw silu(gate) * up of a raw tensor [..., gate | up]."""
    x = decode_float(raw, dtype)
    half = x.shape[-1] // 2
    return encode_float(silu(x[..., :half], x[..., half:], mode), dtype)


@quiet
def smooth(raw: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """Raw BF16 x * factors[col], one rounding."""
    x = decode_float(raw, "BF16").astype(np.float64)
    return encode_float(x * decode_float(factors, "BF16").astype(np.float64), "BF16")


def sum_of_squares(h: np.ndarray) -> np.ndarray:
    """The fixed tree: chains of 8 fused multiply-adds, then neighbours are added pairwise."""
    cols = h.shape[-1]
    leaves = 1 << max(0, (-(-cols // 8) - 1).bit_length())
    padded = np.zeros((*h.shape[:-1], leaves * 8), np.float32)
    padded[..., :cols] = h
    padded = padded.reshape(*h.shape[:-1], leaves, 8)
    total = np.zeros(padded.shape[:-1], np.float32)
    for j in range(8):
        total = fused_multiply_add(padded[..., j], padded[..., j], total)
    while total.shape[-1] > 1:
        total = EXACT.add(total[..., 0::2], total[..., 1::2])
    return total[..., 0]


@quiet
def rmsnorm(
    raw: np.ndarray, weight: np.ndarray, dtype: str, eps: float = 1e-6, residual=None
) -> tuple[np.ndarray, np.ndarray]:
    """(raw norm, raw residual sum) of a raw tensor [..., cols]; without residual the sum is x."""
    x = decode_float(raw, dtype)
    if residual is not None:
        total = x.astype(np.float64) + decode_float(residual, dtype).astype(np.float64)
        raw = encode_float(total, dtype)
        x = decode_float(raw, dtype)
    mean = EXACT.div(sum_of_squares(x), np.float32(x.shape[-1]))
    shifted = EXACT.add(mean, np.float32(eps)).astype(np.float64)
    inverse = (1.0 / np.sqrt(shifted)).astype(np.float32)
    w = EXACT.add(ZERO, decode_float(weight, dtype))
    y = EXACT.mul(EXACT.mul(x, inverse[..., None]), w)
    return encode_float(y, dtype), raw
