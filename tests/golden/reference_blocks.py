"""Block quantizers of the reference model: from the elements of blocks to scales and codes.

Arrays are [..., V] with one scale argument per block [...]. Names follow the documentation: a is a
block maximum, g an encode scale (multiplies before quantization), d a decode scale, m what a block
is multiplied by.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from reference_floats import (
    ARITHMETIC,
    Arithmetic,
    C448,
    C6,
    EXACT,
    FAST,
    FLT_MAX,
    FP16_MAX,
    NAN,
    ONE,
    SIX,
    ZERO,
    absolute_max,
    approximate_reciprocal,
    decode_e2m1,
    decode_e4m3,
    decode_e8m0,
    decode_float,
    encode_e2m1,
    encode_e4m3,
    encode_e8m0_up,
    encode_float,
    inverse_power,
    number_min,
    pick,
    quiet,
)


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
    """The factor that takes a block with stored scale `scale` to the range of E2M1."""
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
