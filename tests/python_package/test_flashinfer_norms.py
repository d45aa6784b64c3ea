"""narrowfloat.compat.flashinfer: RMSNorm with quantization, its outputs, its modes.

Each test runs on the libraries of test_flashinfer_quantizers.py.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from flashinfer_table import CLOSE, record
from test_flashinfer_quantizers import BF16, LIBRARIES, SCALE, example, model, torch
from test_flashinfer_steps import near

import narrowfloat as nf
import narrowfloat.compat.flashinfer as fi


@pytest.fixture(params=LIBRARIES, ids=lambda lib: lib.__name__)
def lib(request: pytest.FixtureRequest) -> Any:
    """Where arrays come from."""
    return request.param


SCALE_TYPES = {16: "float8_e4m3fn", 32: "uint8"}


def type_name(array: Any) -> str:
    """Its element type without the library's name."""
    return str(array.dtype).removeprefix("torch.")


def codes_type(lib: Any) -> str:
    """Upstream's for two codes a byte; NumPy has none."""
    return "uint8" if lib.__name__ == "Numpy" else "float4_e2m1fn_x2"


def test_norms(lib: Any) -> None:
    """Both formats and layouts, both layouts at once, given outputs, the sum in the residual."""
    x, residual, weight = example((6, 128)), example((6, 128)), example((2, 128))[1]
    for block, format in ((16, "nvfp4"), (32, "mxfp4")):
        scale = {"math": "fast"} | ({"encode_scale": float(SCALE)} if block == 16 else {})
        for swizzled, layout in ((False, "linear"), (True, "swizzled_128x4")):
            q = nf.rmsnorm_quantize(x, weight, format, layout=layout, **scale)
            arguments = {"global_scale": lib.make(SCALE.reshape(1)), "block_size": block,
                         "is_sf_swizzled_layout": swizzled}  # fmt: skip
            got = fi.rmsnorm_fp4quant(lib.make(x), lib.make(weight), **arguments)
            assert lib.raw(got[0]) == q.values.tobytes() and lib.raw(got[1]) == q.scales.tobytes()
            assert [type_name(part) for part in got] == [codes_type(lib), SCALE_TYPES[block]]
            outs = lib.make(np.zeros((6, 64), np.uint8)), lib.make(np.zeros(q.scales.shape, "u1"))
            got = fi.rmsnorm_fp4quant(lib.make(x), lib.make(weight), *outs, **arguments)
            assert got[0] is outs[0] and lib.raw(outs[1]) == q.scales.tobytes()
            if lib.__name__ != "Numpy":  # Upstream's own type of outputs.
                typed = outs[0].view(getattr(torch, codes_type(lib)))
                got = fi.rmsnorm_fp4quant(lib.make(x), lib.make(weight), typed, **arguments)
                assert got[0] is typed and lib.raw(got[1]) == q.scales.tobytes()
        sums = residual.copy()
        y = np.zeros_like(x)
        q = nf.add_rmsnorm_quantize(x, sums, weight, format, norm_output=y, **scale)
        given = lib.make(residual.copy())
        normed = lib.make(np.zeros_like(x))
        got = fi.add_rmsnorm_fp4quant(
            lib.make(x), given, lib.make(weight), global_scale=lib.make(SCALE.reshape(1)),
            block_size=block, output_both_sf_layouts=True, y_out=normed,
        )  # fmt: skip
        assert lib.raw(given) == sums.tobytes() and lib.raw(normed) == y.tobytes()
        wide = sums.astype(np.float64)
        wanted = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6)
        near(lib, normed, wanted * weight.astype(np.float64), BF16)
        assert lib.raw(got[0]) == q.values.tobytes() and lib.raw(got[1]) == q.scales.tobytes()
        assert lib.raw(got[2]) == q.relayout("linear").scales.tobytes()
        assert [type_name(part) for part in got] == [codes_type(lib), *[SCALE_TYPES[block]] * 2]
    note = "upstream rounds input * weight, here the norm is rounded; E4M3 scales of 32 in steps"
    for name in ("rmsnorm_fp4quant", "add_rmsnorm_fp4quant"):
        record(name, CLOSE, note, "an ulp of the norm, before it is coded")


def wide_blocks(y: np.ndarray, scale: np.float32) -> tuple[np.ndarray, np.ndarray]:
    """Codes and E4M3 scales of 32 elements of each row of y, in exact arithmetic's steps."""
    blocks = y.astype(np.float32).reshape(y.shape[0], -1, 32)
    top = np.abs(blocks).max(-1)
    scales = np.minimum(top * (scale * np.float32(1 / 6)), 448).astype(np.float32).astype(SCALES)
    with np.errstate(divide="ignore", invalid="ignore"):
        factor = np.where(top > 0, 1 / (scales.astype(np.float32) * (1 / scale)), 0)
    values = blocks * factor[..., None].astype(np.float32)
    levels = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    distance = np.abs(np.abs(values)[..., None] - levels)
    nearest = distance.argmin(-1)
    tie = (distance == distance.min(-1, keepdims=True)).sum(-1) > 1
    nearest += tie & (nearest % 2 == 1)  # The first of two is odd: the even one follows it.
    codes = (nearest + 8 * np.signbit(values)).astype(np.uint8).reshape(y.shape)
    return codes[:, 0::2] | codes[:, 1::2] << 4, scales


SCALES = ml_dtypes.float8_e4m3fn


@pytest.mark.parametrize("swizzled", [False, True])
def test_e4m3_scales_of_32(lib: Any, swizzled: bool) -> None:
    """The norm, then blocks of 32 with a scale of E4M3 each; outputs as of the other formats."""
    x, residual, weight = example((6, 160)), example((6, 160)), example((2, 160))[1]
    scale = np.float32(10)
    how = {"global_scale": lib.make(np.float32([scale])), "block_size": 32, "scale_format": "e4m3",
           "is_sf_swizzled_layout": swizzled, "math": "exact"}  # fmt: skip
    for sums in (None, residual):
        y = np.zeros_like(x)
        if sums is None:
            nf.rmsnorm_quantize(x, weight, "nvfp4", norm_output=y)
            got = fi.rmsnorm_fp4quant(lib.make(x), lib.make(weight), **how)
        else:
            nf.add_rmsnorm_quantize(x, sums := residual.copy(), weight, "nvfp4", norm_output=y)
            given = lib.make(residual.copy())
            normed = lib.make(np.zeros_like(x))
            got = fi.add_rmsnorm_fp4quant(lib.make(x), given, lib.make(weight), **how,
                                          output_both_sf_layouts=True, y_out=normed)  # fmt: skip
            assert lib.raw(given) == sums.tobytes() and lib.raw(normed) == y.tobytes()
        codes, scales = wide_blocks(y, scale)
        image = model.pack_scales(scales.view(np.uint8), "swizzled_128x4").tobytes()
        linear = scales.tobytes()
        assert lib.raw(got[0]) == codes.tobytes()
        both = sums is not None
        assert lib.raw(got[1]) == (image if swizzled or both else linear)
        assert [type_name(part) for part in got[1:]] == ["float8_e4m3fn"] * (len(got) - 1)
        assert not both or lib.raw(got[2]) == linear
    outs = lib.make(np.zeros((6, 80), np.uint8)), lib.make(np.zeros(len(got[1].reshape(-1)), "u1"))
    again = fi.add_rmsnorm_fp4quant(lib.make(x), lib.make(residual.copy()), lib.make(weight),
                                    *outs, **how, output_both_sf_layouts=True)  # fmt: skip
    assert again[0] is outs[0] and again[1] is outs[1]
    assert lib.raw(outs[0]) == codes.tobytes() and lib.raw(outs[1]) == image
    with pytest.raises(ValueError, match="four_over_six: an option of scales of 16"):
        fi.rmsnorm_fp4quant(lib.make(x), lib.make(weight), **how, four_over_six=True)


def test_assertions_of_upstream(lib: Any) -> None:
    """Columns, blocks and the normalised output: AssertionError, which is a ValueError as well."""
    x, weight = lib.make(example((6, 128))), lib.make(example((2, 128))[1])
    for call, words in (
        (lambda: fi.rmsnorm_fp4quant(x, weight, block_size=48), "block_size must be 16 or 32"),
        (lambda: fi.rmsnorm_fp4quant(x[:, :120], weight, block_size=32), "divisible by block_size"),
        (lambda: fi.add_rmsnorm_fp4quant(x, x.reshape(6, 128), weight, y_out=lib.make(
            np.zeros((12, 64), BF16))), "y_out: .*must match the input, got bfloat16 .12, 64"),
        (lambda: fi.add_rmsnorm_fp4quant(x, x.reshape(6, 128), weight, y_out=lib.make(
            np.zeros((6, 128), np.float16))), "y_out: expected bfloat16"),
    ):  # fmt: skip
        for kind in (AssertionError, ValueError):
            with pytest.raises(kind, match=f"(?s){words}"):
                call()
    if lib.__name__ == "Cuda":
        long = lib.make(np.zeros(6 * 128 + 1, BF16))
        with pytest.raises(AssertionError, match="y_out: .*16B-aligned"):
            fi.add_rmsnorm_fp4quant(x, x.clone(), weight, y_out=long[1:].reshape(6, 128))


@pytest.mark.parametrize("name", ["y_fp4", "block_scale", "block_scale_unswizzled"])
def test_outputs_are_dense(lib: Any, name: str) -> None:
    """A strided one is refused, not left as it was; nothing else is written before."""
    x, weight = lib.make(example((6, 128))), lib.make(example((2, 128))[1])
    widths = {"y_fp4": 64, "block_scale": 8, "block_scale_unswizzled": 8}
    strided = lib.make(np.zeros((6, 2 * widths[name]), np.uint8))[:, ::2]
    residual = lib.make(example((6, 128)))
    before = lib.raw(residual)
    with pytest.raises(ValueError, match=f"{name}: .*dense"):
        fi.add_rmsnorm_fp4quant(x, residual, weight, **{name: strided},
                                output_both_sf_layouts=True)  # fmt: skip
    assert lib.raw(residual) == before
    if name != "block_scale_unswizzled":
        with pytest.raises(ValueError, match=f"{name}: .*dense"):
            fi.rmsnorm_fp4quant(x, weight, **{name: strided})


GIVEN = {"y_fp4": ((6, 64), np.uint8), "block_scale": ((128 * 8,), np.uint8),
         "block_scale_unswizzled": ((6, 8), np.uint8), "y_out": ((6, 128), ml_dtypes.bfloat16),
         "residual": ((6, 128), ml_dtypes.bfloat16)}  # fmt: skip
WRONG = {
    "rows of y_fp4": ("y_fp4", (5, 64), np.uint8),
    "axes of y_fp4": ("y_fp4", (6 * 64,), np.uint8),
    "type of y_fp4": ("y_fp4", (6, 64), np.float32),
    "size of block_scale": ("block_scale", (6, 8), np.uint8),
    "type of block_scale": ("block_scale", (128 * 8 // 2,), np.uint16),
    "size of block_scale_unswizzled": ("block_scale_unswizzled", (6, 7), np.uint8),
    "type of block_scale_unswizzled": ("block_scale_unswizzled", (6, 8), np.int32),
    "rows of y_out": ("y_out", (5, 128), ml_dtypes.bfloat16),
    "type of y_out": ("y_out", (6, 128), np.float16),
    "rows of residual": ("residual", (5, 128), ml_dtypes.bfloat16),
}


@pytest.mark.parametrize("name", list(WRONG))
def test_a_wrong_output_leaves_all_of_them(lib: Any, name: str) -> None:
    """The error names it; the residual and the other outputs are as before."""
    argument, shape, dtype = WRONG[name]
    x, weight = lib.make(example((6, 128))), lib.make(example((2, 128))[1])
    given = {key: lib.make(np.full(size, 3, kind)) for key, (size, kind) in GIVEN.items()}
    given[argument] = lib.make(np.full(shape, 3, dtype))
    before = {key: lib.raw(array) for key, array in given.items()}
    with pytest.raises(ValueError, match=f"^{argument}: expected"):
        fi.add_rmsnorm_fp4quant(x, weight=weight, output_both_sf_layouts=True, **given)
    assert {key: lib.raw(array) for key, array in given.items()} == before
    if argument in ("y_fp4", "block_scale"):
        two = {key: given[key] for key in ("y_fp4", "block_scale")}
        with pytest.raises(ValueError, match=f"^{argument}: expected"):
            fi.rmsnorm_fp4quant(x, weight, is_sf_swizzled_layout=True, **two)
        assert {key: lib.raw(given[key]) for key in two} == {key: before[key] for key in two}


def test_the_outputs_work_without_changes(lib: Any) -> None:
    """So that each error above is of its change; results are the arrays that were given."""
    x, weight = lib.make(example((6, 128))), lib.make(example((2, 128))[1])
    given = {key: lib.make(np.zeros(size, kind)) for key, (size, kind) in GIVEN.items()}
    found = fi.add_rmsnorm_fp4quant(x, weight=weight, output_both_sf_layouts=True, **given)
    names = ("y_fp4", "block_scale", "block_scale_unswizzled")
    assert all(part is given[name] for part, name in zip(found, names, strict=True))
    plain = fi.rmsnorm_fp4quant(x, weight, is_sf_swizzled_layout=True)  # The residual was 0.
    assert [lib.raw(part) for part in found[:2]] == [lib.raw(part) for part in plain]


def test_outputs_elsewhere() -> None:
    """Memory that cannot be written, and no arrays at all."""
    x, weight = example((6, 128)), example((2, 128))[1]
    frozen = np.zeros((6, 64), np.uint8)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="^y_fp4: .*read-only"):
        fi.rmsnorm_fp4quant(x, weight, frozen)
    with pytest.raises(TypeError, match="^y_fp4: expected an array.*list"):
        fi.rmsnorm_fp4quant(x, weight, [0])


def test_outputs_on_another_device(lib: Any) -> None:
    """All lie where the input does."""
    if lib.__name__ != "Cuda":
        pytest.skip("needs a GPU")
    x, weight = lib.make(example((6, 128))), lib.make(example((2, 128))[1])
    with pytest.raises(ValueError, match="^y_fp4: expected memory on cuda:0, got cpu"):
        fi.rmsnorm_fp4quant(x, weight, np.zeros((6, 64), np.uint8))


def test_where_linear_scales_go_alone(lib: Any) -> None:
    """An array that nothing would be written to is refused, before the sum is stored."""
    x, weight, residual = (lib.make(part) for part in (example((6, 128)), example((2, 128))[1],
                                                       example((6, 128))))  # fmt: skip
    before = lib.raw(residual)
    with pytest.raises(ValueError, match="^block_scale_unswizzled: .*output_both_sf_layouts"):
        fi.add_rmsnorm_fp4quant(x, residual, weight,
                                block_scale_unswizzled=lib.make(np.zeros((6, 8), np.uint8)))
    assert lib.raw(residual) == before


def both(lib: Any, x: np.ndarray, weight: np.ndarray, **how: Any) -> list[bytes]:
    """Codes and scales of both functions; those with a residual of zeros are the same."""
    parts = fi.rmsnorm_fp4quant(lib.make(x), lib.make(weight), **how)
    sums = lib.make(np.zeros_like(x))
    again = fi.add_rmsnorm_fp4quant(lib.make(x), sums, lib.make(weight), **how)
    found = [lib.raw(part) for part in parts]
    assert found == [lib.raw(part) for part in again]
    return found


VARIABLES = {"FLASHINFER_NVFP4_4OVER6": "1", "FLASHINFER_NVFP4_4OVER6_ERR_MODE": "MSE",
             "FLASHINFER_NVFP4_4OVER6_E4M3_USE_256": "1",
             "FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH": "1"}  # fmt: skip


def test_mode_and_four_over_six(lib: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The norm, then the quantizer with the same options; upstream's norms read no variable."""
    x, weight = example((64, 256), np.float16), example((2, 256), np.float16)[1]
    x[:, ::5] = 0  # Where scales round to 0, these elements are NaN in one mode.
    scale = 0.002
    option = nf.FourOverSix(error="mse", e4m3_max=256)
    y = np.zeros_like(x)
    nf.rmsnorm_quantize(x, weight, "nvfp4", norm_output=y)

    def wanted(math: str, choice: Any) -> list[bytes]:
        q = nf.quantize(y, "nvfp4", layout="linear", encode_scale=scale, math=math,
                        four_over_six=choice)  # fmt: skip
        return [q.values.tobytes(), q.scales.tobytes()]

    def found(**how: Any) -> list[bytes]:
        return both(lib, x, weight, global_scale=scale, **how)

    assert found() == found(math="fast") == wanted("fast", None) != wanted("exact", None)
    assert found(math="exact") == wanted("exact", None)
    assert found(four_over_six=True) == wanted("fast", nf.FourOverSix()) != wanted("fast", None)
    chosen = wanted("fast", option)
    assert found(math="fast", four_over_six=option) == chosen != wanted("exact", option)
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    assert found() == found(four_over_six=False) == wanted("fast", None)
    assert found(math="exact", four_over_six=option) == wanted("exact", option) != chosen
    monkeypatch.setenv("FLASHINFER_NVFP4_4OVER6_ERR_MODE", "MAX")
    assert found() == wanted("fast", None)


def test_modes_of_mxfp4(lib: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the mode of the argument alone, and no 4-over-6."""
    x, weight = example((8, 128)), example((2, 128))[1]
    modes: list[str] = []
    watched = {name: getattr(nf, name) for name in ("rmsnorm_quantize", "add_rmsnorm_quantize")}
    for name, function in watched.items():
        monkeypatch.setattr(nf, name, lambda *args, function=function, **how: (
            modes.append(how["math"]), function(*args, **how))[1])  # fmt: skip
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    both(lib, x, weight, block_size=32)
    both(lib, x, weight, block_size=32, math="exact", four_over_six=False)
    assert modes == ["fast"] * 2 + ["exact"] * 2
    with pytest.raises(ValueError, match="^four_over_six: "):
        fi.rmsnorm_fp4quant(lib.make(x), lib.make(weight), block_size=32, four_over_six=True)
    with pytest.raises(ValueError, match="^math: "):
        fi.rmsnorm_fp4quant(lib.make(x), lib.make(weight), math="rough")


def test_outputs_at_any_address(lib: Any) -> None:
    """Given ones begin where they begin, too: nothing is written beside them."""
    x = np.random.default_rng(3).standard_normal((3, 128)).astype(np.float16)
    weight = np.ones(128, np.float16)
    codes, scales = fi.rmsnorm_fp4quant(lib.make(x), lib.make(weight))
    for shift in (1, 8):
        y = lib.make(np.full(3 * 64 + 16, 7, np.uint8))
        block = lib.make(np.full(3 * 8 + 16, 7, np.uint8))
        own = y[shift : shift + 192].reshape(3, 64), block[shift : shift + 24].reshape(3, 8)
        found = fi.rmsnorm_fp4quant(lib.make(x), lib.make(weight), *own)
        assert found[0] is own[0] and found[1] is own[1]
        for held, part in ((y, codes), (block, scales)):
            size = len(lib.raw(part))
            beside = lib.raw(held)[:shift] + lib.raw(held)[shift + size :]
            assert lib.raw(held)[shift : shift + size] == lib.raw(part) and set(beside) == {7}
