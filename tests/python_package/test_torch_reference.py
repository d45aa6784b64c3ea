"""NVFP4, MXFP4, MXFP8 and FP8 against formulas written with torch from the specification alone.

Bitwise equal, on the cases and sizes of spec 14.3.
"""

from __future__ import annotations

import pytest

import narrowfloat as nf

torch = pytest.importorskip("torch", reason="torch is not installed; ./test.sh --with-torch")

import torch_formulas as formulas  # noqa: E402

SHAPES = [(1, 64), (1, 1024), (3, 128), (16, 64), (64, 128), (128, 64), (256, 128), (512, 256),
          (128, 1024), (120, 64), (200, 256), (17, 512), (33, 1024), (127, 96)]  # fmt: skip


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


DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
CASES = pytest.mark.parametrize("case", [random, boundary, zeros, maxes])


def check(got: nf.QuantizedTensor, wanted: formulas.Coded, shape: tuple[int, int]) -> None:
    """Codes, the 128x4 image of the scales, the factor beside them."""
    assert torch.equal(got.values, wanted.codes.view(torch.uint8)), shape
    assert torch.equal(got.scales, formulas.swizzled(wanted.scales)), shape
    if got.global_scale is not None:
        assert torch.equal(got.global_scale, wanted.factor), shape


@DTYPES
@CASES
@pytest.mark.parametrize("format", ["nvfp4", "nvfp4_per_token", "mxfp4", "mxfp8"])
def test_blocks(format: str, case, dtype: torch.dtype) -> None:
    """All four block formats."""
    for shape in SHAPES:
        x = case(*shape, dtype)
        check(nf.quantize(x, format), getattr(formulas, format)(x), shape)


@DTYPES
@CASES
@pytest.mark.parametrize("e4m3_max", [448, 256])
@pytest.mark.parametrize("error", ["mae", "mse"])
@pytest.mark.parametrize("format", ["nvfp4", "nvfp4_per_token"])
def test_four_over_six(format: str, error: str, e4m3_max: int, case, dtype: torch.dtype) -> None:
    """Both errors, both largest scales."""
    option = nf.FourOverSix(error=error, e4m3_max=e4m3_max)
    is_per_token = format == "nvfp4_per_token"
    for shape in SHAPES[::4]:
        x = case(*shape, dtype)
        wanted = formulas.four_over_six(x, error, e4m3_max, is_per_token)
        check(nf.quantize(x, format, four_over_six=option), wanted, shape)


@DTYPES
@CASES
def test_fp8_groups(case, dtype: torch.dtype) -> None:
    """float32 scales of 1x128 groups, the token as the fast index."""
    for shape in ((1, 128), (16, 256), (33, 1024)):
        x = case(*shape, dtype)
        wanted = formulas.fp8_1x128(x)
        got = nf.quantize(x, "fp8_1x128", layout="linear")
        assert torch.equal(got.values, wanted.codes.view(torch.uint8)), shape
        assert torch.equal(got.scales, wanted.scales), shape
