"""NVFP4 and MXFP8 against formulas written with torch from the specification alone (spec 6.1, 6.5).

Bitwise equal, on the cases and sizes of spec 14.3. Shares nothing with the library or with the
NumPy model of tests/golden.
"""

from __future__ import annotations

import pytest

import narrowfloat as nf

torch = pytest.importorskip("torch", reason="torch is not installed; ./test.sh --with-torch")

SHAPES = [(1, 64), (1, 1024), (3, 128), (16, 64), (64, 128), (128, 64), (256, 128), (512, 256),
          (128, 1024), (120, 64), (200, 256), (17, 512), (33, 1024), (127, 96)]  # fmt: skip
LARGEST = torch.finfo(torch.float32).max


def random(rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
    """Normal numbers; row 0 is zero where there are others."""
    x = torch.randn(rows, cols, generator=torch.Generator().manual_seed(rows * 4096 + cols))
    if rows > 1:
        x[0] = 0
    return x.to(dtype)


def boundary(rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
    """A thousandth below and above evenly spaced numbers, in every row."""
    b = torch.linspace(-12, 12, cols // 2)
    row = torch.stack([b - 1e-3, b + 1e-3], 1).reshape(-1)
    return row.repeat(rows, 1).to(dtype)


def zeros(rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
    """Nothing."""
    return torch.zeros(rows, cols, dtype=dtype)


def maxes(rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
    """The largest finite number everywhere."""
    return torch.full((rows, cols), torch.finfo(dtype).max, dtype=dtype)


def e4m3(x: torch.Tensor) -> torch.Tensor:
    """Saturating."""
    return x.clamp(-448, 448).to(torch.float8_e4m3fn)


def e2m1(x: torch.Tensor) -> torch.Tensor:
    """Codes 0 to 15: nearest, ties to the even code."""
    a = x.abs()
    code = (
        (a > 0.25).int() + (a >= 0.75).int() + (a > 1.25).int() + (a >= 1.75).int()
        + (a > 2.5).int() + (a >= 3.5).int() + (a > 5).int()
    )  # fmt: skip
    return code + 8 * torch.signbit(x).int()


def swizzled(scales: torch.Tensor) -> torch.Tensor:
    """The 128x4 image of a matrix of bytes: [M tiles][K tiles][32][4][4]."""
    rows, cols = scales.shape
    padded = torch.zeros(-(-rows // 128) * 128, -(-cols // 4) * 4, dtype=torch.uint8)
    padded[:rows, :cols] = scales
    tiles = padded.reshape(-1, 4, 32, padded.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", [random, boundary, zeros, maxes])
def test_nvfp4(case, dtype: torch.dtype) -> None:
    """Codes, scales, stored global scale."""
    sixth = torch.tensor(1 / 6, dtype=torch.float32)
    for rows, cols in SHAPES:
        x = case(rows, cols, dtype)
        blocks = x.float().reshape(rows, cols // 16, 16)
        amax = blocks.abs().max()
        g = (torch.tensor(2688.0) / amax).clamp(max=LARGEST) if amax else torch.tensor(1.0)
        a = blocks.abs().amax(-1, keepdim=True)
        scale = e4m3(torch.where(a != 0, a * (g * sixth), 0.0))
        m = (1 / (scale.float() * (1 / g))).clamp(max=LARGEST)
        code = e2m1(blocks * torch.where(a != 0, m, 0.0)).reshape(rows, cols)
        packed = (code[:, 0::2] + 16 * code[:, 1::2]).to(torch.uint8)
        q = nf.quantize(x, "nvfp4")
        assert torch.equal(q.values, packed), (rows, cols)
        assert torch.equal(q.scales, swizzled(scale.view(torch.uint8).reshape(rows, -1)))
        assert float(q.global_scale[0]) == float(1 / g)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", [random, boundary, zeros, maxes])
def test_mxfp8(case, dtype: torch.dtype) -> None:
    """Codes and scales, rule up."""
    for rows, cols in SHAPES:
        x = case(rows, cols, dtype)
        blocks = x.float().reshape(rows, cols // 32, 32)
        bits = (blocks.abs().amax(-1) / 448).view(torch.int32)
        exponent, mantissa = bits >> 23, bits & 0x7FFFFF
        up = torch.where(exponent == 0, mantissa > 0x400000, mantissa != 0)
        byte = (exponent + up.int()).clamp(max=254)
        m = torch.exp2((127 - byte).double()).float()
        code = e4m3(blocks * m[..., None]).reshape(rows, cols)
        q = nf.quantize(x, "mxfp8")
        assert torch.equal(q.values, code.view(torch.uint8)), (rows, cols)
        assert torch.equal(q.scales, swizzled(byte.to(torch.uint8)))
