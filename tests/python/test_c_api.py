"""The C API from Python's ctypes and from a Rust program: bytes of MXFP4 that can be told by hand.

The shared library is the one of the build whose programs NARROWFLOAT_TEST_BIN names.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(os.environ.get("NARROWFLOAT_TEST_BIN", ROOT / "build/cpu/tests/bin")).parents[1] / "src"
# E2M1 in the order of its codes, which 4 multiplies: the scale is 2^2, UE8M0 0x81.
MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
INPUT = np.concatenate([MAGNITUDES, -MAGNITUDES, MAGNITUDES, -MAGNITUDES]) * np.float32(4)
VALUES = "10325476" "98badcfe" "10325476" "98badcfe"
SCALES = "81"


class Tensor(ctypes.Structure):
    """NfTensor."""

    _fields_ = (("data", ctypes.c_void_p), ("dtype", ctypes.c_char_p), ("device", ctypes.c_int32),
                ("rank", ctypes.c_int32), ("shape", ctypes.c_int64 * 4),
                ("strides", ctypes.c_int64 * 4))  # fmt: skip


class Quantized(ctypes.Structure):
    """NfQuantized."""

    _fields_ = (("struct_size", ctypes.c_uint32), ("device", ctypes.c_int32),
                ("format", ctypes.c_char_p), ("layout", ctypes.c_char_p),
                *((name, ctypes.c_int64) for name in (
                    "batch", "rows", "cols", "alignment", "value_cols", "values_bytes",
                    "scales_bytes", "global_scales")),
                ("values", ctypes.c_void_p), ("scales", ctypes.c_void_p),
                ("global_scale", ctypes.c_void_p))  # fmt: skip


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    """The shared library."""
    found = ctypes.CDLL(str(FOLDER / "libnarrowfloat.so"))
    found.nf_last_error.restype = found.nf_version.restype = ctypes.c_char_p
    return found


def test_ctypes_quantizes_and_dequantizes(library: ctypes.CDLL) -> None:
    version = re.search(r"project\(narrowfloat VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text())
    assert version is not None and library.nf_version().decode() == version[1]
    quantized = Quantized(struct_size=ctypes.sizeof(Quantized), device=-1, format=b"mxfp4",
                          layout=b"linear", rows=1, cols=32)  # fmt: skip
    assert library.nf_quantized_sizes(ctypes.byref(quantized)) == 0
    assert (quantized.values_bytes, quantized.scales_bytes, quantized.global_scales) == (16, 1, 0)
    values, scales = np.zeros(16, np.uint8), np.zeros(1, np.uint8)
    quantized.values, quantized.scales = values.ctypes.data, scales.ctypes.data
    back = np.zeros(32, np.float32)
    shape = (ctypes.c_int64 * 4)(1, 32)
    source, target = (Tensor(array.ctypes.data, b"F32", -1, 2, shape) for array in (INPUT, back))
    assert library.nf_quantize(ctypes.byref(source), ctypes.byref(quantized), None, None) == 0
    assert (values.tobytes().hex(), scales.tobytes().hex()) == (VALUES, SCALES)
    assert library.nf_dequantize(ctypes.byref(quantized), ctypes.byref(target), None) == 0
    assert back.tobytes() == INPUT.tobytes()
    target.dtype = b"F31"
    assert library.nf_dequantize(ctypes.byref(quantized), ctypes.byref(target), None) == 1
    assert "F31" in library.nf_last_error().decode()


@pytest.mark.skipif(shutil.which("rustc") is None, reason="rustc is not installed")
def test_a_program_in_rust_quantizes(tmp_path: Path) -> None:
    program = tmp_path / "quantize"
    subprocess.run(["rustc", "-o", program, "-L", FOLDER, "-C", f"link-arg=-Wl,-rpath,{FOLDER}",
                    "-D", "warnings", ROOT / "tests/c_api/quantize.rs"], check=True)  # fmt: skip
    lines = subprocess.run([program], check=True, text=True, capture_output=True).stdout.splitlines()
    assert lines[0] == f"{VALUES} {SCALES}"
    assert lines[1].startswith("status 1: ") and "mxfp5" in lines[1]
