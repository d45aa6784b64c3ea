"""Fused forms of the reference model: the 16-bit tensor that a fused operation quantizes."""

from __future__ import annotations

import numpy as np

from reference_floats import (
    EXACT,
    FAST,
    INFINITY,
    NAN,
    ONE,
    ZERO,
    approximate_reciprocal,
    decode_float,
    encode_float,
    flush,
    from_bits,
    fused_multiply_add,
    quiet,
)

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
