"""Every format in every legal layout, on odd shapes, against the independent model of tests/golden;
and what only Python has: strides, outputs, files, types of ml_dtypes.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import narrowfloat as nf

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "golden"))

import reference_model as model  # noqa: E402

LEGAL = [(info.name, layout) for info in nf.formats() for layout in info.layouts]
ROWS = (1, 3, 9, 130)
UNITS = (1, 3, 5)
RAW = {"BF16": np.uint16, "F16": np.uint16, "F32": np.uint32}
DTYPES = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32}


def cols_of(fmt: str, units: int) -> int:
    """The smallest legal numbers of columns; FP8 formats take any multiple of 16."""
    return (32 if fmt.startswith("mx") else 16) * units


def example(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Numbers of several magnitudes."""
    rng = np.random.default_rng([seed, *shape])
    return (rng.standard_normal(shape) * np.exp2(rng.integers(-6, 6, shape))).astype(np.float32)


def test_all_formats_and_layouts_are_listed() -> None:
    """The listing is the model's."""
    assert {fmt: set(layouts) for fmt, layouts in model.LAYOUTS.items()} == {
        info.name: set(info.layouts) for info in nf.formats()
    }
    assert sorted({layout for _, layout in LEGAL}) == sorted(nf.layouts())


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize(("fmt", "layout"), LEGAL)
def test_bytes(fmt: str, layout: str, dtype: str) -> None:
    """Values, scales and global scales, in both math modes."""
    for rows in ROWS:
        for units in UNITS:
            x = example((rows, cols_of(fmt, units))).astype(DTYPES[dtype])
            for math in ("exact", "fast"):
                options = model.Options(mode=math)
                wanted = model.quantize(x.view(RAW[dtype])[None], dtype, fmt, layout, options)
                q = nf.quantize(x, fmt, layout=layout, math=math)
                assert q.values.tobytes() == wanted.values.tobytes()
                assert q.scales.tobytes() == wanted.scales.tobytes()
                stored = b"" if q.global_scale is None else q.global_scale.tobytes()
                assert stored == wanted.global_scale.tobytes()


@pytest.mark.parametrize(("fmt", "layout"), LEGAL)
def test_dequantize_and_relayout(fmt: str, layout: str) -> None:
    """The layout changes no number, there and back changes no byte."""
    q = nf.quantize(example((37, cols_of(fmt, 3))), fmt)
    other = q.relayout(layout)
    assert other.scale_layout == layout and other.values is q.values
    assert other.scales.tobytes() == nf.quantize(
        example((37, cols_of(fmt, 3))), fmt, layout=layout
    ).scales.tobytes()
    for dtype in DTYPES.values():
        assert other.dequantize(dtype).tobytes() == q.dequantize(dtype).tobytes()
    assert other.relayout(q.scale_layout).scales.tobytes() == q.scales.tobytes()


@pytest.mark.parametrize("fmt", [info.name for info in nf.formats()])
def test_strides_and_addresses_of_empty_arrays_mean_nothing(fmt: str) -> None:
    """Zeros in NumPy 2.4, those of a dense array in older versions; odd where bytes are empty."""
    cols = cols_of(fmt, 2)
    memory = memoryview(bytearray(64))[1:1]

    def empty(*shape: int, dtype: Any) -> np.ndarray:
        strides = (0,) * len(shape)
        made = np.lib.stride_tricks.as_strided(np.frombuffer(memory, dtype), shape, strides)
        assert made.__array_interface__["data"][0] % 2
        return made

    for shape in ((0, cols), (0, 3, 5, cols)):
        x = empty(*shape, dtype=np.float32)
        q = nf.quantize(x, fmt)
        values = empty(*q.values.shape, dtype=np.uint8)
        again = nf.QuantizedTensor(values, q.scales, q.global_scale, q.layout, shape=q.shape)
        assert again.dequantize().shape == x.shape
        nf.dequantize(q, out=empty(*shape, dtype=np.float32))


@pytest.mark.parametrize("fmt", [info.name for info in nf.formats()])
def test_shapes(fmt: str) -> None:
    """Leading axes are rows, or batches; one row may have no axis of its own; none may be there."""
    cols = cols_of(fmt, 2)
    x = example((2, 3, 5, cols))
    q = nf.quantize(x, fmt)
    assert q.shape == x.shape and q.values.shape[:-1] == x.shape[:-1]
    assert q.dequantize().shape == x.shape
    assert q.values.tobytes() == nf.quantize(x.reshape(30, cols), fmt).values.tobytes()
    one = nf.quantize(x[0, 0, 0], fmt)
    assert one.shape == (cols,) and one.dequantize().shape == (cols,)
    deep = nf.quantize(x.reshape(1, 2, 1, 3, 5, cols), fmt)
    assert deep.values.tobytes() == q.values.tobytes()
    assert deep.dequantize().tobytes() == q.dequantize().tobytes()
    empty = nf.quantize(x[:0], fmt)
    assert empty.dequantize().shape == (0, 3, 5, cols)
    batched = nf.quantize(x[0], fmt, batched=True)
    assert batched.layout.batch == 3 and batched.layout.rows == 5
    assert batched.scales.shape[0] == 3
    assert batched.dequantize().shape == (3, 5, cols)


def test_strided_inputs_and_outputs_are_not_copied() -> None:
    """Views of wider arrays give the bytes of dense ones; nothing between the rows is written."""
    wide = example((6, 96))
    dense = np.ascontiguousarray(wide[:, 16:80])
    q = nf.quantize(wide[:, 16:80], "nvfp4")
    assert q.values.tobytes() == nf.quantize(dense, "nvfp4").values.tobytes()
    transposed = example((4, 3, 32)).transpose(1, 0, 2)
    assert nf.quantize(transposed, "mxfp8", batched=True).values.tobytes() == nf.quantize(
        np.ascontiguousarray(transposed), "mxfp8", batched=True
    ).values.tobytes()
    target = np.full((6, 96), 7, np.float32)
    assert nf.dequantize(q, out=target[:, 16:80]).base is target
    assert target[:, 16:80].tobytes() == q.dequantize().tobytes()
    assert (target[:, :16] == 7).all() and (target[:, 80:] == 7).all()


def test_narrow_types_and_their_stand_ins() -> None:
    """uint16 stands for bfloat16, uint8 for float8_e4m3fn; read-only arrays are inputs, too."""
    x = example((4, 64)).astype(ml_dtypes.bfloat16)
    q = nf.quantize(x, "mxfp4")
    assert q.values.tobytes() == nf.quantize(x.view(np.uint16), "mxfp4").values.tobytes()
    codes = x.astype(ml_dtypes.float8_e4m3fn)
    codes.flags.writeable = False
    from_codes = nf.quantize(codes, "mxfp4", encode_scale=2.0)
    from_bytes = nf.quantize(codes.view(np.uint8), "mxfp4", encode_scale=2.0)
    assert from_codes.values.tobytes() == from_bytes.values.tobytes()
    typed = nf.QuantizedTensor(
        q.values, q.scales.view(ml_dtypes.float8_e8m0fnu), None, q.layout, q.shape
    )
    assert typed.dequantize("bfloat16").dtype == ml_dtypes.bfloat16
    assert typed.dequantize("bfloat16").tobytes() == q.dequantize(np.uint16).tobytes()


def test_other_producers_of_dlpack() -> None:
    """An object that only speaks DLPack is an input and an output."""

    class Foreign:
        def __init__(self, array: np.ndarray) -> None:
            self.array, self.shape = array, array.shape

        def __dlpack__(self, **arguments):
            return self.array.__dlpack__(**arguments)

        def __dlpack_device__(self):
            return self.array.__dlpack_device__()

    x = example((4, 64))
    q = nf.quantize(Foreign(x), "nvfp4")
    assert q.values.tobytes() == nf.quantize(x, "nvfp4").values.tobytes()
    y = np.zeros_like(x)
    nf.dequantize(q, out=Foreign(y))
    assert y.tobytes() == q.dequantize().tobytes()


@pytest.mark.parametrize(("fmt", "layout"), LEGAL)
def test_save_and_load(fmt: str, layout: str, tmp_path: Path) -> None:
    """Everything of a tensor comes back; safetensors reads the file, with types."""
    from safetensors import safe_open

    path = tmp_path / "q.safetensors"
    batched = fmt in model.BLOCK_OF_BYTE_SCALE
    padded = {"alignment": 128} if fmt == "mxfp8" else {}
    q = nf.quantize(example((2, 5, 96)), fmt, layout=layout, batched=batched, **padded)
    q.save(path, "weight")
    back = nf.QuantizedTensor.load(path, "weight")
    assert (back.format, back.scale_layout, back.shape) == (fmt, layout, (2, 5, 96))
    assert back.layout.batch == q.layout.batch and back.layout.value_cols == q.layout.value_cols
    for part in ("values", "scales", "global_scale"):
        ours, theirs = getattr(q, part), getattr(back, part)
        assert (ours is None) == (theirs is None)
        assert ours is None or (ours.tobytes() == theirs.tobytes() and ours.shape == theirs.shape)
    with safe_open(path, "numpy") as file:
        assert file.metadata()["narrowfloat.format"] == fmt
        assert "weight.values" in file.keys()


def test_groups_of_rows(tmp_path: Path) -> None:
    """The offsets belong to the tensor: dequantize() and files know them."""
    x = example((13, 144))
    offsets = np.array([0, 5, 5, 13], np.int64)
    q = nf.quantize(x, "fp8_1x128", layout="mn_major", row_offsets=offsets)
    plain = nf.quantize(x, "fp8_1x128", layout="mn_major")
    assert q.scales.size > plain.scales.size
    assert q.dequantize().tobytes() == plain.dequantize().tobytes()
    q.save(tmp_path / "q")
    back = nf.QuantizedTensor.load(tmp_path / "q")
    assert back.dequantize().tobytes() == plain.dequantize().tobytes()


def test_scale_formulas() -> None:
    """encode_scale_from_amax is what quantize() uses by default."""
    x = example((4, 64))
    largest = float(nf.amax(x)[0])
    assert largest == np.abs(x).max()
    scale = nf.encode_scale_from_amax(largest)
    q = nf.quantize(x, "nvfp4", encode_scale=scale)
    assert q.values.tobytes() == nf.quantize(x, "nvfp4").values.tobytes()
    assert q.global_scale is not None
    assert q.global_scale[0] == np.float32(nf.decode_scale_from_encode(scale))
    assert nf.encode_scale_from_decode(0.5) == 2
