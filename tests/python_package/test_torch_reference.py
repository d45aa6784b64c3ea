"""NVFP4, MXFP4, MXFP8 and FP8 against formulas written with torch from the specification alone.

Bitwise equal, on many cases, sizes and layouts: the largest sizes with random numbers
of one type, 4-over-6 on every third of the others. On a GPU, where there is one, too.
"""

from __future__ import annotations

import pytest

import narrowfloat as nf

torch = pytest.importorskip("torch", reason="torch is not installed; ./test.sh --with-torch")

import torch_formulas as formulas  # noqa: E402

DEVICES = ["cpu"]
if torch.cuda.is_available() and nf.build_info()["cuda_enabled"]:
    DEVICES.append("cuda")

SHAPES = [(1, 64), (1, 1024), (3, 128), (16, 64), (64, 128), (128, 64), (256, 128), (512, 256),
          (128, 1024), (120, 64), (200, 256), (17, 512), (33, 1024), (127, 96)]  # fmt: skip
LARGE = [(1024, 2048), (128, 16384), (2048, 2048), (1025, 1024), (1025, 6144)]
LAYOUTS = ("swizzled_128x4", "swizzled_8x4", "linear")
FORMATS = ("nvfp4", "nvfp4_per_token", "mxfp4", "mxfp8")


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """Where the tensors lie."""
    return request.param


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


def check(x: torch.Tensor, wanted: formulas.Coded, device: str, format: str,
          layouts: tuple[str, ...] = LAYOUTS, **options: object) -> None:  # fmt: skip
    """Codes, the packed scales in each layout, the factor beside them."""
    for layout in layouts:
        got = nf.quantize(x.to(device), format, layout=layout, **options)
        where = (tuple(x.shape), layout)
        assert torch.equal(got.values.cpu(), wanted.codes.view(torch.uint8)), where
        assert torch.equal(got.scales.cpu(), formulas.packed_scales(wanted.scales, layout)), where
        if got.global_scale is not None:
            assert torch.equal(got.global_scale.cpu(), wanted.factor), where


@DTYPES
@CASES
@pytest.mark.parametrize("format", FORMATS)
def test_blocks(format: str, case, dtype: torch.dtype, device: str) -> None:
    """All four block formats."""
    for shape in SHAPES:
        x = case(*shape, dtype)
        check(x, getattr(formulas, format)(x), device, format)


@pytest.mark.parametrize("shape", LARGE, ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_large_tensors(format: str, shape: tuple[int, int], device: str) -> None:
    """All four block formats, and both factors of 4-over-6 on one of the sizes."""
    x = random(*shape, torch.bfloat16)
    check(x, getattr(formulas, format)(x), device, format)
    if format.startswith("nvfp4") and shape == (1025, 1024):
        wanted = formulas.four_over_six(x, "mae", 448, format == "nvfp4_per_token")
        check(x, wanted, device, format, four_over_six=nf.FourOverSix())


@DTYPES
@CASES
@pytest.mark.parametrize("math", ["strict", "fast"])
@pytest.mark.parametrize("e4m3_max", [448, 256])
@pytest.mark.parametrize("error", ["mae", "mse"])
@pytest.mark.parametrize("format", ["nvfp4", "nvfp4_per_token"])
def test_four_over_six(
    format: str, error: str, e4m3_max: int, math: str, case, dtype: torch.dtype, device: str
) -> None:
    """Both errors, both ways to compute them, both largest scales; layouts in turn."""
    option = nf.FourOverSix(error=error, error_math=math, e4m3_max=e4m3_max)
    for number, shape in enumerate(SHAPES[::3]):
        x = case(*shape, dtype)
        wanted = formulas.four_over_six(x, error, e4m3_max, format == "nvfp4_per_token",
                                        math == "fast")  # fmt: skip
        layout = LAYOUTS[number % len(LAYOUTS)]
        check(x, wanted, device, format, (layout,), four_over_six=option)


@DTYPES
@CASES
def test_fp8_groups(case, dtype: torch.dtype, device: str) -> None:
    """float32 scales of 1x128 groups, the token as the fast index."""
    for shape in ((1, 128), (16, 256), (33, 1024)):
        x = case(*shape, dtype)
        wanted = formulas.fp8_1x128(x)
        got = nf.quantize(x.to(device), "fp8_1x128", layout="linear")
        assert torch.equal(got.values.cpu(), wanted.codes.view(torch.uint8)), shape
        assert torch.equal(got.scales.cpu(), wanted.scales), shape
