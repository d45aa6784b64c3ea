"""Formats and quantizers written with torch from the specification alone, mode `exact`.

Shares nothing with the library or with the NumPy model of tests/golden. Sections are of the
specification of quantization. Every operation is float32 and rounds once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

LARGEST = torch.finfo(torch.float32).max
SIXTH = torch.tensor(1 / 6, dtype=torch.float32)
MAGNITUDES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


class Coded(NamedTuple):
    """A quantized matrix: codes as stored, linear scales, the factor kept beside them."""

    codes: torch.Tensor
    scales: torch.Tensor | None
    factor: torch.Tensor
    decoded: torch.Tensor  # float64, without the factor.


def number(value: float) -> torch.Tensor:
    """float32."""
    return torch.tensor(value, dtype=torch.float32)


def e4m3(x: torch.Tensor) -> torch.Tensor:
    """Saturating (5)."""
    return x.clamp(-448, 448).to(torch.float8_e4m3fn)


def e2m1(x: torch.Tensor) -> torch.Tensor:
    """Codes 0 to 15: nearest, ties to the even code (5)."""
    a = x.abs()
    code = (
        (a > 0.25).int() + (a >= 0.75).int() + (a > 1.25).int() + (a >= 1.75).int()
        + (a > 2.5).int() + (a >= 3.5).int() + (a > 5).int()
    )  # fmt: skip
    return code + 8 * torch.signbit(x).int()


def e2m1_values(code: torch.Tensor) -> torch.Tensor:
    """float32 of codes 0 to 15."""
    return MAGNITUDES[(code & 7).long()] * torch.where(code > 7, -1.0, 1.0)


def pack(code: torch.Tensor) -> torch.Tensor:
    """Two codes a byte, the even column in the low half."""
    return (code[..., 0::2] + 16 * code[..., 1::2]).to(torch.uint8)


def swizzled(scales: torch.Tensor) -> torch.Tensor:
    """A matrix of bytes in layout 128x4 (8.2): [M tiles][K tiles][32][4][4]."""
    rows, cols = scales.shape
    padded = torch.zeros(-(-rows // 128) * 128, -(-cols // 4) * 4, dtype=torch.uint8)
    padded[:rows, :cols] = scales
    tiles = padded.reshape(-1, 4, 32, padded.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)


def swizzled_8x4(scales: torch.Tensor) -> torch.Tensor:
    """A matrix of bytes in layout 8x4 (8.2): [M tiles][K tiles][8][4]."""
    rows, cols = scales.shape
    padded = torch.zeros(-(-rows // 8) * 8, -(-cols // 4) * 4, dtype=torch.uint8)
    padded[:rows, :cols] = scales
    return padded.reshape(-1, 8, padded.shape[1] // 4, 4).transpose(1, 2).reshape(-1)


def packed_scales(scales: torch.Tensor, layout: str) -> torch.Tensor:
    """Bytes of linear scales in a layout."""
    if layout == "linear":
        return scales
    return swizzled(scales) if layout == "swizzled_128x4" else swizzled_8x4(scales)


def encode_scale(amax: torch.Tensor, target: float = 2688.0) -> torch.Tensor:
    """448 * 6 / amax, finite; 1 for a tensor of zeros."""
    return (number(target) / amax).clamp(max=LARGEST) if amax else number(1)


def _code_blocks(blocks: torch.Tensor, scale: torch.Tensor,
                 decode: torch.Tensor) -> torch.Tensor:  # fmt: skip
    """Codes of blocks with E4M3 scales; `decode` is what multiplies decoded values."""
    m = (1 / (scale.float() * decode)).clamp(max=LARGEST)
    return e2m1(blocks * m)


def _nvfp4(x: torch.Tensor, g: torch.Tensor) -> Coded:
    """With encode scales [1] or [rows, 1, 1] (6.1)."""
    rows, cols = x.shape
    blocks = x.float().reshape(rows, cols // 16, 16)
    a = blocks.abs().amax(-1, keepdim=True)
    scale = e4m3(torch.where(a != 0, a * (g * SIXTH), 0.0))
    code = torch.where(a != 0, _code_blocks(blocks, scale, 1 / g),
                       e2m1(torch.zeros_like(blocks).copysign(blocks)))  # fmt: skip
    return _assembled(code, scale, (1 / g).reshape(-1))


def _assembled(code: torch.Tensor, scale: torch.Tensor, factor: torch.Tensor) -> Coded:
    rows = code.shape[0]
    decoded = e2m1_values(code).double() * scale.double()
    return Coded(pack(code.reshape(rows, -1)), scale.view(torch.uint8).reshape(rows, -1), factor,
                 decoded.reshape(rows, -1))  # fmt: skip


def nvfp4(x: torch.Tensor, g: torch.Tensor | None = None) -> Coded:
    """Encode scale from the maximum, unless it is given."""
    return _nvfp4(x, encode_scale(x.float().abs().max()) if g is None else g)


def row_encode_scales(x: torch.Tensor, inverse_base: float) -> tuple[torch.Tensor, ...]:
    """Row maxima, encode scales, stored row scales, each [rows, 1, 1] (6.2)."""
    top = x.float().abs().amax(-1).reshape(-1, 1, 1)
    g = (number(inverse_base) / top).clamp(max=LARGEST)
    g = torch.where(g == 0, 1.0, g)
    return top, g, torch.where(top == 0, 0.0, 1 / g)


def nvfp4_per_token(x: torch.Tensor) -> Coded:
    """A scale for each row (6.2)."""
    _, g, row_scale = row_encode_scales(x, 2688.0)
    return _nvfp4(x, g)._replace(factor=row_scale.reshape(-1))


def _in_order(terms: torch.Tensor) -> torch.Tensor:
    """Sum over the last axis, one rounding for each element."""
    total = torch.zeros_like(terms[..., :1])
    for i in range(terms.shape[-1]):
        total = total + terms[..., i : i + 1]
    return total


def four_over_six(x: torch.Tensor, error: str, e4m3_max: int, per_token: bool,
                  is_fast: bool = False) -> Coded:  # fmt: skip
    """Each block keeps the better of two scales (6.3); is_fast: by errors in units of the codes.

    Those flush denormals, which the tests' numbers never give.
    """
    rows, cols = x.shape
    blocks = x.float().reshape(rows, cols // 16, 16)
    top, g, stored = row_encode_scales(x, 6.0 * e4m3_max)
    if not per_token:
        g = encode_scale(x.float().abs().max(), 6.0 * e4m3_max)
        stored = 1 / g
    a = blocks.abs().amax(-1, keepdim=True)
    s6 = a / 6 * g
    candidates = []
    for s in (s6, s6 * 1.5):
        scale = e4m3(s)
        code = _code_blocks(blocks, scale, 1 / g)
        decoded = e2m1_values(code) * scale.float()
        if is_fast:
            e = decoded - blocks * g
        elif per_token:
            e = decoded * top / number(6.0 * e4m3_max) - blocks
        else:
            e = decoded * (1 / g) - blocks
        candidates.append((code, scale, _in_order(e.abs() if error == "mae" else e * e)))
    (code6, scale6, error6), (code4, scale4, error4) = candidates
    four = error4 < error6
    code = torch.where(a == 0, 0, torch.where(four, code4, code6))
    byte = torch.where(four, scale4.view(torch.uint8), scale6.view(torch.uint8))
    scale = torch.where(a == 0, 0, byte).to(torch.uint8).view(torch.float8_e4m3fn)
    return _assembled(code, scale, stored.reshape(-1))


def _power(x: torch.Tensor, largest: float) -> tuple[torch.Tensor, ...]:
    """Blocks of 32, scale bytes by the rule up, multipliers (6.4, 6.6)."""
    rows, cols = x.shape
    blocks = x.float().reshape(rows, cols // 32, 32)
    bits = (blocks.abs().amax(-1) / largest).view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    up = torch.where(exponent == 0, mantissa > 0x400000, mantissa != 0)
    byte = (exponent + up.int()).clamp(max=254)
    return blocks, byte, torch.exp2((127 - byte).double()).float()[..., None]


def mxfp8(x: torch.Tensor) -> Coded:
    """E4M3 with powers of two for 32 elements (6.5)."""
    blocks, byte, m = _power(x, 448)
    code = e4m3(blocks * m)
    decoded = code.double() * torch.exp2((byte - 127).double())[..., None]
    return Coded(code.reshape(x.shape), byte.to(torch.uint8), number(1), decoded.reshape(x.shape))


def mxfp4(x: torch.Tensor) -> Coded:
    """E2M1 with powers of two for 32 elements (6.4)."""
    blocks, byte, m = _power(x, 6)
    code = e2m1(blocks * m)
    decoded = e2m1_values(code).double() * torch.exp2((byte - 127).double())[..., None]
    return Coded(pack(code.reshape(x.shape)), byte.to(torch.uint8), number(1),
                 decoded.reshape(x.shape))  # fmt: skip


def fp8_1x128(x: torch.Tensor) -> Coded:
    """E4M3 with a float32 scale for 128 elements, rule `reciprocal` (6.7)."""
    rows, cols = x.shape
    blocks = x.float().reshape(rows, cols // 128, 128)
    a = blocks.abs().amax(-1, keepdim=True)
    m = torch.where(a == 0, 1.0, number(448) / a)  # A Python number would become a reciprocal.
    code = e4m3(blocks * m)
    decoded = code.double() * (1 / m).double()
    return Coded(code.reshape(x.shape), (1 / m)[..., 0], number(1), decoded.reshape(x.shape))


def fp8_128x128(x: torch.Tensor) -> Coded:
    """The same for tiles of weights (6.8); scales [rows / 128, cols / 128]."""
    rows, cols = x.shape
    tiles = x.float().reshape(rows // 128, 128, cols // 128, 128)
    m = number(448) / tiles.abs().amax((1, 3), keepdim=True)
    code = e4m3(tiles * m)
    decoded = code.double() * (1 / m).double()
    return Coded(code.reshape(x.shape), (1 / m)[:, 0, :, 0].contiguous(), number(1),
                 decoded.reshape(x.shape))  # fmt: skip


def fp8_tensor(x: torch.Tensor, multiplier: torch.Tensor | None = None) -> Coded:
    """E4M3 with one factor, from the maximum unless a multiplier is given."""
    m = number(448) / x.float().abs().max() if multiplier is None else multiplier
    code = e4m3(x.float() * m)
    return Coded(code, None, 1 / m, code.double())
