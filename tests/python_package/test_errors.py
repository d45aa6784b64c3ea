"""The calls that are refused, with which exception, and that the message names the argument."""

from __future__ import annotations

import ctypes
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import narrowfloat as nf
from narrowfloat import _core

X = np.arange(4 * 64, dtype=np.float32).reshape(4, 64) - 100
Q = nf.quantize(X, "nvfp4")
TOKENS = nf.quantize(X, "nvfp4_per_token")
BF16 = X.astype(ml_dtypes.bfloat16)


def unaligned() -> np.ndarray:
    """float32 at an odd address."""
    return np.frombuffer(bytearray(X.nbytes + 1), np.uint8)[1:].view(np.float32).reshape(4, 64)


REFUSED_ARGUMENTS = {
    "unknown format": (lambda: nf.quantize(X, "nvfp5"), "format"),
    "no format": (lambda: nf.quantize(X), "format"),
    "unknown layout": (lambda: nf.quantize(X, "nvfp4", layout="spiral"), "layout"),
    "illegal layout": (lambda: nf.quantize(X, "nvfp4", layout="mn_major"), "mn_major"),
    "columns": (lambda: nf.quantize(X[:, :17], "nvfp4"), "16"),
    "dtype": (lambda: nf.quantize(X.astype(np.float64), "nvfp4"), "input"),
    "integers": (lambda: nf.quantize(X.astype(np.int32), "nvfp4"), "input"),
    "E5M2": (lambda: nf.quantize(X.astype(ml_dtypes.float8_e5m2), "nvfp4"), "input"),
    "complex": (lambda: nf.quantize(X.astype(np.complex64), "nvfp4"), "input"),
    "objects": (lambda: nf.quantize(X.astype(object), "nvfp4"), "input"),
    "byte order": (lambda: nf.quantize(X.astype(">f4"), "nvfp4"), "input"),
    "scalar": (lambda: nf.quantize(np.float32(1), "nvfp4"), "input"),
    "five axes": (lambda: nf.quantize(X.reshape(2, 1, 2, 2, 32)[..., :16], "nvfp4"), "input"),
    "column stride": (lambda: nf.quantize(X[:, ::2], "nvfp4"), "input"),
    "backwards": (lambda: nf.quantize(X[::-1], "nvfp4"), "input"),
    "unaligned": (lambda: nf.quantize(unaligned(), "nvfp4"), "input"),
    "batched matrix": (lambda: nf.quantize(X, "nvfp4", batched=True), "batched"),
    "math": (lambda: nf.quantize(X, "nvfp4", math="quick"), "math"),
    "mx_scale": (lambda: nf.quantize(X, "mxfp4", mx_scale="odd"), "UE8M0"),
    "fp8_rule": (lambda: nf.quantize(X, "fp8_tensor", fp8_rule="none"), "fp8_rule"),
    "option of another format": (lambda: nf.quantize(X, "mxfp8", fp8_eps=1.0), "fp8_eps"),
    "encode_scale": (lambda: nf.quantize(X, "nvfp4", encode_scale=-1.0), "encode_scale"),
    "four_over_six": (
        lambda: nf.quantize(X, "nvfp4", four_over_six=nf.FourOverSix(error="max")),
        "four_over_six.error",
    ),
    "type of row_list": (
        lambda: nf.quantize(X, "nvfp4_per_token", row_list=np.zeros(1, np.int64)),
        "row_list",
    ),
    "base_decode_scale": (
        lambda: nf.quantize(X, "nvfp4_per_token", base_decode_scale=0.0), "base_decode_scale",
    ),
    "array of base_decode_scale": (
        lambda: nf.quantize(X, "nvfp4_per_token", base_decode_scale=np.full(1, np.nan, "f4")),
        "base_decode_scale",
    ),
    "type of base_decode_scale": (
        lambda: nf.quantize(X, "nvfp4_per_token", base_decode_scale=np.ones(1)),
        "base_decode_scale",
    ),
    "count of base_decode_scale": (
        lambda: nf.quantize(X, "nvfp4_per_token", base_decode_scale=np.ones(4, np.float32)),
        "base_decode_scale",
    ),
    "base_decode_scale in out": (
        lambda: nf.quantize(X, out=TOKENS, base_decode_scale=TOKENS.global_scale[:1]),
        "overlaps base_decode_scale",
    ),
    "count of valid_rows": (
        lambda: nf.quantize(X, "nvfp4", valid_rows=np.zeros(2, np.int32)),
        "valid_rows",
    ),
    "format of out": (lambda: nf.quantize(X, "mxfp4", out=Q), "out"),
    "columns of out": (lambda: nf.quantize(X[:, :32], out=Q), "out"),
    "rows of out": (lambda: nf.quantize(X[:2], out=Q), "input"),
    "odd gate_up": (lambda: nf.silu_mul_quantize(BF16[:, :63], "nvfp4"), "gate_up"),
    "F32 to silu": (lambda: nf.silu_mul_quantize(X, "nvfp4"), "BF16 or F16"),
    "weight": (lambda: nf.rmsnorm_quantize(BF16, BF16[0, :32], "nvfp4"), "weight"),
    "extra_layout alone": (
        lambda: nf.rmsnorm_quantize(BF16, BF16[0], "nvfp4", extra_layout="linear"),
        "extra_scales",
    ),
    "size of values": (
        lambda: nf.QuantizedTensor(Q.values[:2], Q.scales, Q.global_scale, Q.layout), "values",
    ),
    "gaps in values": (
        lambda: nf.QuantizedTensor(
            np.zeros((4, 64), np.uint8)[:, ::2], Q.scales, Q.global_scale, Q.layout
        ),
        "values",
    ),
    "size of scales": (
        lambda: nf.QuantizedTensor(Q.values, Q.scales[:1], Q.global_scale, Q.layout), "scales",
    ),
    "type of scales": (
        lambda: nf.QuantizedTensor(
            Q.values, Q.scales.astype(np.float32), Q.global_scale, Q.layout
        ),
        "scales",
    ),
    "no global scale": (
        lambda: nf.QuantizedTensor(Q.values, Q.scales, None, Q.layout), "global_scale",
    ),
    "shape": (
        lambda: nf.QuantizedTensor(Q.values, Q.scales, Q.global_scale, Q.layout, (4, 32)),
        "shape",
    ),
    "shape of dequantize's out": (lambda: nf.dequantize(Q, out=np.zeros((4, 32), np.float32)),
                                  "out"),
    "type of dequantize's out": (lambda: nf.dequantize(Q, out=np.zeros((4, 64), np.float64)),
                                 "out"),
    "count of amax's out": (lambda: nf.amax(X, per_row=True, out=np.zeros(3, np.float32)), "out"),
    "overlap": (lambda: nf.dequantize(
        nf.QuantizedTensor(X.view(np.uint8).reshape(-1)[:128], Q.scales, Q.global_scale, Q.layout),
        out=X), "overlap"),
    "threads": (lambda: nf.set_num_threads(-1), "-1"),
}  # fmt: skip


@pytest.mark.parametrize("case", list(REFUSED_ARGUMENTS))
def test_value_errors(case: str) -> None:
    """Arguments that can never work."""
    call, word = REFUSED_ARGUMENTS[case]
    with pytest.raises(ValueError, match=f"(?i){word}"):
        call()


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: nf.quantize([[1.0, 2.0]], "nvfp4"), "input"),
        (lambda: nf.quantize(None, "nvfp4"), "input"),
        (lambda: nf.quantize(X, "nvfp4", out=X), "out"),
        (lambda: nf.quantize(X, "nvfp4", sharpness=1), "sharpness"),
        (lambda: nf.quantize(X, "nvfp4_per_token", row_list=[1]), "row_list"),
        (lambda: nf.quantize(X, "nvfp4", encode_scale="1"), "encode_scale"),
        (lambda: nf.quantize(X, "nvfp4", four_over_six=True), "four_over_six"),
        (lambda: nf.quantize(X, "nvfp4", math=1), "math"),
        (lambda: nf.dequantize(X), "input: expected a QuantizedTensor, got ndarray"),
        (lambda: nf.relayout(X, "linear"), "input: expected a QuantizedTensor, got ndarray"),
        (lambda: nf.QuantizedTensor.empty((2.5, 16), "nvfp4"), r"shape: .*, got \(2.5, 16\)"),
        (lambda: nf.explain("quantize", "nvfp4"), "shape: .*, got 'nvfp4'"),
    ],
)
def test_type_errors(call, word: str) -> None:
    """Objects that are no array, no tensor, no option."""
    with pytest.raises(TypeError, match=word):
        call()


def test_read_only_outputs() -> None:
    """Nothing is written to arrays that may not be."""
    values = Q.values.copy()
    values.flags.writeable = False
    q = nf.QuantizedTensor(values, Q.scales, Q.global_scale, Q.layout)
    assert q.dequantize().tobytes() == Q.dequantize().tobytes()
    with pytest.raises(ValueError, match="read-only"):
        nf.quantize(X, out=q)
    target = np.zeros((4, 64), np.float32)
    target.flags.writeable = False
    with pytest.raises(ValueError, match="out: .*read-only"):
        nf.dequantize(Q, out=target)


def test_nothing_is_written_before_all_is_checked() -> None:
    """A refused call leaves its outputs alone."""
    q = nf.QuantizedTensor.empty((4, 64), "nvfp4")
    q.values.fill(5)
    with pytest.raises(ValueError, match="encode_scale"):
        nf.quantize(X, out=q, encode_scale=float("nan"))
    with pytest.raises(ValueError, match="row_offsets"):
        nf.quantize(X, out=q, row_offsets=np.array([0, 4]))
    assert (q.values == 5).all() and q.row_offsets is None


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's variables count here, too; implementations agree to the bit."""
    monkeypatch.setenv("NARROWFLOAT_FORCE", "quantize:cpu_reference")
    assert nf.quantize(X, "nvfp4").values.tobytes() == Q.values.tobytes()
    monkeypatch.setenv("NARROWFLOAT_FORCE", "quantize:imaginary")
    with pytest.raises(ValueError, match="imaginary"):
        nf.quantize(X, "nvfp4")


def test_groups_of_rows_have_one_layout() -> None:
    """The other layouts have no place for groups."""
    offsets = np.array([0, 2, 4], np.int64)
    q = nf.quantize(np.ones((4, 128), np.float32), "fp8_1x128", layout="mn_major",
                    row_offsets=offsets)  # fmt: skip
    with pytest.raises(ValueError, match="input: .*groups of rows"):
        q.relayout("linear")


class Tensor(ctypes.Structure):
    """DLTensor and DLManagedTensor of dlpack.h."""

    _fields_ = (("data", ctypes.c_void_p), ("device_type", ctypes.c_int32),
                ("device_id", ctypes.c_int32), ("ndim", ctypes.c_int32),
                ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
                ("shape", ctypes.POINTER(ctypes.c_int64)),
                ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64),
                ("manager", ctypes.c_void_p), ("deleter", ctypes.c_void_p))  # fmt: skip


class CudaArray:
    """Claims to lie on a GPU; its memory is never touched."""

    def __init__(self, bits: int = 32, shape: tuple[int, int] = (4, 64)) -> None:
        self.shape = shape
        self.extents = (ctypes.c_int64 * 2)(*shape)
        self.steps = (ctypes.c_int64 * 2)(shape[1], 1)
        code = 1 if bits == 8 else 2
        address = 4096 * (bits + shape[0])  # Different for the parts of a tensor.
        self.tensor = Tensor(address, 2, 1, 2, code, bits, 1, self.extents, self.steps, 0,
                             None, None)  # fmt: skip

    def __dlpack__(self, **_arguments):
        make = ctypes.pythonapi.PyCapsule_New
        make.restype = ctypes.py_object
        make.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return make(ctypes.addressof(self.tensor), b"dltensor", None)

    def __dlpack_device__(self):
        return (2, 1)


def on_the_gpu() -> nf.QuantizedTensor:
    """A quantized tensor on cuda:1, of memory that is never touched."""
    values, scales, scale = (CudaArray(bits, shape) for bits, shape in
                             ((8, (4, 32)), (8, (128 * 4, 1)), (32, (1, 1))))  # fmt: skip
    return nf.QuantizedTensor(values, scales, scale, Q.layout)


def test_cuda_arrays() -> None:
    """Results are made for torch alone; devices must agree; a build without CUDA says so."""
    array = CudaArray()
    with pytest.raises(NotImplementedError, match="input: .*cuda:1.*give out"):
        nf.quantize(array, "nvfp4")
    with pytest.raises(ValueError, match="cuda:1"):
        nf.quantize(X, out=on_the_gpu())
    with pytest.raises(ValueError, match="cuda:1"):
        nf.dequantize(Q, out=array)
    with pytest.raises(ValueError, match="scales: .*cuda:1"):
        nf.QuantizedTensor(CudaArray(8, (4, 32)), Q.scales, Q.global_scale, Q.layout)
    with pytest.raises(ValueError, match="values: .*cuda:1"):
        on_the_gpu().save("never")
    if not nf.build_info()["cuda_enabled"]:
        with pytest.raises(NotImplementedError, match="on cuda:1"):
            nf.quantize(array, out=on_the_gpu())


def test_streams_are_restored() -> None:
    """Nested choices, also after an exception."""
    with nf.use_stream(12345), nf.use_stream(99, programmatic_launch=True):
        assert nf._core.set_stream(99, True) == (99, True)
    with pytest.raises(KeyError), nf.use_stream(7):
        raise KeyError
    assert nf._core.set_stream(None, False) == (None, False)


@pytest.mark.parametrize(
    ("kind", "exception"),
    [("invalid argument", ValueError), ("corrupt data", ValueError),
     ("unsupported", NotImplementedError), ("I/O error", OSError),
     ("device error", RuntimeError)])  # fmt: skip
def test_exceptions_of_error_kinds(kind: str, exception: type[Exception]) -> None:
    """All that docs/python.md promises, with the library's text."""
    with pytest.raises(exception, match="^cuda:0: out of memory$") as caught:
        _core.raise_error(kind, "cuda:0: out of memory")
    assert caught.type is exception
    with pytest.raises(ValueError, match="kind: expected one of .*device error"):
        _core.raise_error("weather", "")


def test_files(tmp_path: Path) -> None:
    """OSError where the system refuses, ValueError for what a file should not hold."""
    with pytest.raises(OSError, match="absent"):
        nf.QuantizedTensor.load(tmp_path / "absent")
    with pytest.raises(OSError, match="nowhere"):
        Q.save(tmp_path / "nowhere" / "q")
    torn = tmp_path / "torn"
    torn.write_bytes(b"\x07")
    with pytest.raises(ValueError, match="torn"):
        nf.QuantizedTensor.load(torn)
    other = tmp_path / "other"
    _core.write_safetensors(str(other), [("tensor.values", "F32", X)], {})
    with pytest.raises(ValueError, match="other: tensor.values"):
        nf.QuantizedTensor.load(other)
    Q.save(other)
    with pytest.raises(ValueError, match="weight"):
        nf.QuantizedTensor.load(other, "weight")


def test_files_with_bad_metadata(tmp_path: Path) -> None:
    """Each fact is checked against the others and against the arrays."""
    path = str(tmp_path / "q")
    Q.save(path)
    good = _core.SafetensorsReader.open(path).metadata()
    arrays = [("tensor.values", "U8", Q.values), ("tensor.scales", "F8_E4M3", Q.scales),
              ("tensor.global_scale", "F32", Q.global_scale)]  # fmt: skip
    for key, value in (("format", "mxfp4"), ("format", "x"), ("shape", "4,32"), ("shape", "a"),
                       ("shape", "-4,64"), ("shape", ""), ("batch", "0"), ("batch", "3"),
                       ("scale_layout", "mn_major"), ("value_cols", "x"),
                       ("global_scale_axis", "row")):  # fmt: skip
        _core.write_safetensors(path, arrays, {**good, f"narrowfloat.{key}": value})
        with pytest.raises(ValueError, match="tensor"):
            nf.QuantizedTensor.load(path)
