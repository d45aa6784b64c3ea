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


class MoeConfig(ctypes.Structure):
    """NfMoeConfig."""

    _fields_ = (("struct_size", ctypes.c_uint32), ("experts", ctypes.c_int32),
                ("hidden", ctypes.c_int64), ("inter", ctypes.c_int64),
                *((name, ctypes.c_int32) for name in (
                    "top_k", "expert_offset", "local_experts", "n_group", "topk_group")),
                ("routed_scale", ctypes.c_float),
                *((name, ctypes.c_char_p) for name in (
                    "mode", "routing", "gate_order", "activation")),
                *((name, ctypes.c_float) for name in ("alpha", "beta", "limit_gate", "limit_up")),
                ("out_dtype", ctypes.c_char_p), ("fast_sums", ctypes.c_int32),
                ("reserved", ctypes.c_int32))  # fmt: skip


class MoeWeights(ctypes.Structure):
    """NfMoeWeights."""

    _fields_ = (("struct_size", ctypes.c_uint32), ("reserved", ctypes.c_int32),
                ("scale_layout", ctypes.c_char_p),
                *((name, Tensor) for name in (
                    "w1", "w1_scales", "w2", "w2_scales", "up_scale", "gate_scale", "down_scale",
                    "input_multiplier", "inter_multiplier", "bias1", "bias2")))  # fmt: skip


class MoeLoadOptions(ctypes.Structure):
    """NfMoeLoadOptions."""

    _fields_ = (("struct_size", ctypes.c_uint32), ("expert_offset", ctypes.c_int32),
                ("local_experts", ctypes.c_int32), ("input_amax", ctypes.c_float),
                ("inter_amax", ctypes.c_float), ("tensor_rank", ctypes.c_int32),
                ("tensor_ranks", ctypes.c_int32), ("fast_sums", ctypes.c_int32),
                ("mode", ctypes.c_char_p), ("out_dtype", ctypes.c_char_p))  # fmt: skip


class MoeRun(ctypes.Structure):
    """NfMoeRun."""

    _fields_ = (("struct_size", ctypes.c_uint32), ("reserved", ctypes.c_int32),
                *((name, Tensor) for name in (
                    "hidden", "scales", "row_scale", "logits", "bias", "ids", "weights", "out",
                    "workspace")))  # fmt: skip


DTYPES = {"uint16": b"BF16", "float32": b"F32", "int32": b"I32", "uint8": b"U8"}


def tensor(array: np.ndarray) -> Tensor:
    """NfTensor of a dense array on the CPU; uint16 stands for bfloat16."""
    shape = (ctypes.c_int64 * 4)(*array.shape)
    return Tensor(array.ctypes.data, DTYPES[array.dtype.name], -1, array.ndim, shape)


def bfloat16(numbers: np.ndarray) -> np.ndarray:
    """Rounded towards zero."""
    return (numbers.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


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


def run_layer(library: ctypes.CDLL, layer: ctypes.c_void_p, hidden: np.ndarray) -> np.ndarray:
    """Each token goes to experts 0 and 1. Frees the layer."""
    tokens = len(hidden)
    arrays = {"hidden": hidden, "ids": np.tile(np.arange(2, dtype=np.int32), (tokens, 1)),
              "weights": np.full((tokens, 2), 0.5, np.float32),
              "out": np.zeros(hidden.shape, np.float32)}  # fmt: skip
    size = ctypes.c_int64()
    assert library.nf_moe_workspace_bytes(layer, ctypes.c_int64(tokens), ctypes.byref(size)) == 0
    memory = np.empty(size.value + 256, np.uint8)
    begin = -memory.ctypes.data % 256
    arrays["workspace"] = memory[begin : begin + size.value]
    run = MoeRun(struct_size=ctypes.sizeof(MoeRun),
                 **{name: tensor(array) for name, array in arrays.items()})  # fmt: skip
    status = library.nf_moe_run(layer, ctypes.byref(run), None)
    assert status == 0, library.nf_last_error()
    library.nf_moe_free(layer)
    return arrays["out"]


def test_ctypes_asks_layers_for_fast_sums(library: ctypes.CDLL) -> None:
    """Where a processor has them they show in some of many results, which are rounded to bf16."""
    rng = np.random.default_rng(32)
    hidden = bfloat16(rng.standard_normal((768, 256)))
    w1 = bfloat16(rng.standard_normal((2, 256, 256)) / 16)
    w2 = bfloat16(rng.standard_normal((2, 256, 128)) / 16)
    given = MoeWeights(struct_size=ctypes.sizeof(MoeWeights), w1=tensor(w1), w2=tensor(w2))
    results: dict[str, list[np.ndarray]] = {"of buffers": [], "of a checkpoint": []}
    for fast in (0, 1):
        layer = ctypes.c_void_p()
        config = MoeConfig(struct_size=ctypes.sizeof(MoeConfig), experts=2, hidden=256, inter=128,
                           top_k=2, out_dtype=b"F32", fast_sums=fast)  # fmt: skip
        status = library.nf_moe_prepare(ctypes.byref(config), ctypes.byref(given), None,
                                        ctypes.byref(layer))  # fmt: skip
        assert status == 0, library.nf_last_error()
        results["of buffers"].append(run_layer(library, layer, hidden))
        options = MoeLoadOptions(struct_size=ctypes.sizeof(MoeLoadOptions), mode=b"bf16",
                                 out_dtype=b"F32", fast_sums=fast)  # fmt: skip
        status = library.nf_moe_load(str(ROOT / "models/tiny-moe").encode(), ctypes.c_int64(0),
                                     ctypes.byref(options), ctypes.byref(layer))  # fmt: skip
        assert status == 0, library.nf_last_error()
        results["of a checkpoint"].append(run_layer(library, layer, hidden))
    for name, (exact, fast_sums) in results.items():
        assert np.linalg.norm(exact) > 0, name
        assert np.linalg.norm(fast_sums - exact) <= 3e-3 * np.linalg.norm(exact), name
        if " avx512_bf16 " in Path("/proc/cpuinfo").read_text():
            assert (fast_sums != exact).any(), name


@pytest.mark.skipif(shutil.which("rustc") is None, reason="rustc is not installed")
def test_a_program_in_rust_quantizes(tmp_path: Path) -> None:
    program = tmp_path / "quantize"
    subprocess.run(["rustc", "-o", program, "-L", FOLDER, "-C", f"link-arg=-Wl,-rpath,{FOLDER}",
                    "-D", "warnings", ROOT / "tests/c_api/quantize.rs"], check=True)  # fmt: skip
    lines = subprocess.run([program], check=True, text=True, capture_output=True).stdout.splitlines()
    assert lines[0] == f"{VALUES} {SCALES}"
    assert lines[1].startswith("status 1: ") and "mxfp5" in lines[1]
