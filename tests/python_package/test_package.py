"""The package as a whole: versions, what an import needs, the program, threads, memory."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import re
import subprocess
import sys
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import narrowfloat as nf

PACKAGE = Path(nf.__file__).parent
ROOT = Path(__file__).resolve().parents[2]


def run(*command: str, **options) -> subprocess.CompletedProcess[str]:
    """A subprocess far from the repository, so that nothing of it is imported by accident."""
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd="/", **options)


def test_versions_agree() -> None:
    """The wheel's, the library's, the program's and CMake's."""
    assert importlib.metadata.version("narrowfloat") == nf.version() == nf.__version__
    assert f"narrowfloat VERSION {nf.__version__} " in (ROOT / "CMakeLists.txt").read_text()
    printed = run(sys.executable, "-m", "narrowfloat", "--version").stdout
    assert printed.startswith(f"narrowfloat {nf.__version__}\n")
    assert nf.build_info()["version"] == nf.__version__


def start_time(before: str, code: str) -> float:
    """Work of the processor, seconds, from a place in a new process on; the best of five."""
    program = f"import sys, time; {before}; {code}; print(time.process_time() - begin)"
    results = [run(sys.executable, "-c", program) for _ in range(5)]
    assert all(result.returncode == 0 for result in results), results[0].stderr
    return min(float(result.stdout) for result in results)


@pytest.mark.parametrize("module", ["narrowfloat", "narrowfloat.compat.flashinfer"])
def test_import_is_fast_and_needs_numpy_alone(module: str) -> None:
    """Below 0.3 s with NumPy, which takes most of it, and Python's own start.

    Time that the processor works: disks and other programs count for nothing. Where Python and
    NumPy alone take nearly all of it, 0.15 s beyond them, and the rest is skipped.
    """
    code = (
        f"import {module}; "
        "assert not {'torch', 'ml_dtypes', 'nanobind', 'safetensors'} & set(sys.modules)"
    )
    took = start_time("begin = 0", code)
    if took >= 0.3:
        without = start_time("begin = 0", "import numpy")
        assert start_time("import numpy; begin = time.process_time()", code) < 0.15
        if without >= 0.25:
            pytest.skip(f"{took:.2f} s, not below 0.3 s: NumPy alone takes {without:.2f} s here")
    assert took < 0.3


def test_works_without_ml_dtypes() -> None:
    """bfloat16 then is uint16."""
    code = (
        "import sys; sys.modules['ml_dtypes'] = None; import numpy, narrowfloat as nf; "
        "q = nf.quantize(numpy.ones((2, 32), numpy.uint16), 'mxfp4'); "
        "print(q.dequantize('bfloat16').dtype)"
    )
    result = run(sys.executable, "-c", code)
    assert result.stdout == "uint16\n", result.stderr


def test_the_program(tmp_path: Path) -> None:
    """`python -m narrowfloat` and the script: arguments, output, exit codes are the program's."""
    assert run(sys.executable, "-m", "narrowfloat", "no-such-command").returncode == 2
    script = Path(sys.executable).parent / "narrowfloat"
    result = run(str(script), "explain", "quantize", "--format", "nvfp4", "--shape", "4x96")
    assert result.returncode == 0 and "cpu_baseline" in result.stdout
    tensors = {"layer.weight": np.ones((32, 64), ml_dtypes.bfloat16)}
    source = tmp_path / "in.safetensors"
    safetensors.numpy.save_file(tensors, source)
    missing = run(sys.executable, "-m", "narrowfloat", "inspect", str(tmp_path / "absent"))
    assert missing.returncode == 3 and "absent" in missing.stderr


def test_the_benchmark_program() -> None:
    """The script `narrowfloat-bench` measures and checks; `narrowfloat` says where it went."""
    script = Path(sys.executable).parent / "narrowfloat-bench"
    arguments = ["bench", "quantize", "--format", "nvfp4", "--shape", "8x64", "--min-time", "0"]
    result = run(str(script), *arguments, "--csv")
    assert result.returncode == 0 and "correct" in result.stdout, result.stderr
    moved = run(sys.executable, "-m", "narrowfloat", *arguments)
    assert moved.returncode == 2 and "narrowfloat-bench bench" in moved.stderr


def test_bytes_of_the_program(tmp_path: Path) -> None:
    """A weight in a file of compressed-tensors and the same weight through the package."""
    x = np.random.default_rng(1).standard_normal((48, 128)).astype(ml_dtypes.bfloat16)
    source, target = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    safetensors.numpy.save_file({"layer.weight": x}, source)
    for fmt, values in (("nvfp4", "weight_packed"), ("mxfp4", "weight_packed"),
                        ("mxfp8", "weight")):  # fmt: skip
        result = run(sys.executable, "-m", "narrowfloat", "quantize", str(source), str(target),
                     "--to", fmt, "--include", "*", "--force")  # fmt: skip
        assert result.returncode == 0, result.stderr
        q = nf.quantize(x, fmt, layout="linear")
        with safetensors.safe_open(target, "numpy") as file:
            sizes = {name: file.get_slice(name).get_shape() for name in file.keys()}
        stored = target.read_bytes()
        assert sizes[f"layer.{values}"] == list(q.values.shape)
        assert q.values.tobytes() in stored and q.scales.tobytes() in stored


def modules() -> list[types.ModuleType]:
    """Those that users import; narrowfloat.torch where torch is."""
    found = [nf, importlib.import_module("narrowfloat.compat.flashinfer")]
    if importlib.util.find_spec("torch") is not None:
        found.append(importlib.import_module("narrowfloat.torch"))
    return found


@pytest.mark.parametrize("module", modules(), ids=lambda module: module.__name__)
def test_everything_public_is_documented_and_typed(module: types.ModuleType) -> None:
    """Docstrings and annotations."""
    for name in module.__all__:
        thing = getattr(module, name)
        assert inspect.getdoc(thing), name
        if inspect.isfunction(thing):
            signature = inspect.signature(thing)
            assert signature.return_annotation is not inspect.Signature.empty, name
            for parameter in signature.parameters.values():
                assert parameter.annotation is not inspect.Parameter.empty, (name, parameter)


def test_marker_and_stubs() -> None:
    """The files of a typed package, and of its extension."""
    assert (PACKAGE / "py.typed").is_file()
    stubs = (PACKAGE / "_core.pyi").read_text()
    assert "def quantized_layout(format: str, rows: int, cols: int" in stubs


# Neither take arrays nor give them, or those of any shape.
WITHOUT_ARRAYS = {"autotune", "clear_prepared_cache", "compute_fp4_swizzled_layout_sf_size",
                  "is_gated_activation", "next_positive_power_of_2", "resolve_nvfp4_4over6",
                  "check_checkpoint", "convert_checkpoint", "create_allreduce_fusion_workspace",
                  "cutlass_fused_moe_workspace_size", "dequantize_checkpoint", "diff",
                  "explain_allreduce", "explain_expert_parallel", "fix_checkpoint",
                  "prepared_cache_size",
                  "quantize_checkpoint", "relayout",
                  "trtllm_destroy_ipc_workspace_for_all_reduce_fusion", "use_stream"}  # fmt: skip
SHAPE = r"\[[^\]]+\]"
DTYPES = r"float(32|16|8_e4m3fn)|bfloat16|u?int(8|16|32|64)|bool|any (dtype|type)"


def described(function: Any, others: Any) -> str:
    """A docstring, followed by those of the functions of a module that it points to."""
    text = inspect.getdoc(function) or ""
    return text + "".join(inspect.getdoc(getattr(others, name)) or "" for name in
                          re.findall(r"(\w+)\(", text) if hasattr(others, name))  # fmt: skip


def flashinfer_functions() -> dict[str, Any]:
    """Those that are offered."""
    fi = importlib.import_module("narrowfloat.compat.flashinfer")
    return {name: getattr(fi, name) for name in fi.__all__
            if name[0].islower() and not re.search("mxint4|humming", name)}  # fmt: skip


def test_flashinfer_s_functions_name_every_argument() -> None:
    """Each is in the docstring, or in that of a function it points to."""
    fi = importlib.import_module("narrowfloat.compat.flashinfer")
    for name, function in flashinfer_functions().items():
        text = described(function, fi)
        missing = [argument for argument in inspect.signature(function).parameters
                   if not re.search(rf"\b{argument}\b", text)]  # fmt: skip
        assert not missing, (name, missing)


def test_functions_name_shapes_and_dtypes() -> None:
    """In square brackets, and by the names that NumPy, ml_dtypes and torch have for types."""
    modules = {nf: {name: getattr(nf, name) for name in nf.__all__},
               importlib.import_module("narrowfloat.compat.flashinfer"): flashinfer_functions()}
    for module, functions in modules.items():
        for name, function in functions.items():
            if name in WITHOUT_ARRAYS or not inspect.isfunction(function):
                continue
            text = described(function, module)
            assert re.search(SHAPE, text), (name, "no shape")
            assert re.search(DTYPES, text), (name, "no dtype")


def test_methods_and_operators_name_shapes_and_dtypes() -> None:
    """As the functions, by themselves."""
    things = [nf.MoeLayer.prepare, nf.MoeLayer.run, nf.MoeLayer.new_workspace,
              nf.AllReduce.__call__, nf.AllReduce.moe_reduction, nf.AllReduce.moe_finalize,
              nf.AllReduceResult, nf.Fp8Rows]
    if importlib.util.find_spec("torch") is not None:
        nft = importlib.import_module("narrowfloat.torch")
        things += [nft.Moe.forward, nft.AllReduceTensors,
                   *(getattr(nft, name) for name in nft.__all__
                     if inspect.isfunction(getattr(nft, name)))]  # fmt: skip
    for thing in things:
        text = inspect.getdoc(thing) or ""
        assert re.search(SHAPE, text), (thing.__qualname__, "no shape")
        assert re.search(DTYPES, text), (thing.__qualname__, "no dtype")


def test_documentation_names_every_function() -> None:
    """The table of docs/python.md is complete."""
    text = (ROOT / "docs" / "python.md").read_text()
    missing = [name for name in nf.__all__ if f"`{name}" not in text]
    assert not missing


def test_documented_code_runs(tmp_path: Path) -> None:
    """The blocks of docs/python.md, one after another."""
    text = (ROOT / "docs" / "python.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    assert len(blocks) >= 4
    (tmp_path / "models").symlink_to(ROOT / "models")
    checks = "assert restored.shape == (256, 512) and q.shape == (4, 64, 512)"
    code = "\n".join([*blocks, checks])
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr


def test_threads_get_the_bytes_of_one() -> None:
    """Concurrent calls on shared inputs with outputs of their own."""
    x = np.random.default_rng(2).standard_normal((64, 256)).astype(np.float32)
    wanted = {info.name: nf.quantize(x, info.name).values.tobytes() for info in nf.formats()}

    def work(number: int) -> bool:
        names = list(wanted)
        name = names[number % len(names)]
        q = nf.quantize(x, name)
        return q.values.tobytes() == wanted[name] and q.dequantize().shape == x.shape

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(400)))


def test_interpreter_is_free_during_a_call() -> None:
    """Another thread counts while one long call runs."""
    x = np.ones((2048, 4096), np.float32)
    q = nf.QuantizedTensor.empty(x.shape, "nvfp4")
    counts, done = [0], threading.Event()

    def count() -> None:
        while not done.is_set():
            counts[0] += 1
            time.sleep(0.0005)

    counter = threading.Thread(target=count)
    before = nf.num_threads()
    nf.set_num_threads(1)
    counter.start()
    try:
        started = counts[0]
        deadline = time.perf_counter() + 20
        while counts[0] - started < 5 and time.perf_counter() < deadline:
            at_begin = counts[0]
            nf.quantize(x, out=q)
            if counts[0] - at_begin >= 5:  # Within one call: the lock was released.
                break
        during = counts[0] - at_begin
    finally:
        done.set()
        counter.join()
        nf.set_num_threads(before)
    assert during >= 5


def resident_bytes() -> int:
    """Memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_no_memory_is_kept() -> None:
    """10,000 calls of each kind, refused ones among them; a leak of one small buffer would show."""
    x = np.random.default_rng(3).standard_normal((16, 64)).astype(np.float32)
    lone = np.zeros(1, np.int64)

    def calls(count: int) -> None:
        for _ in range(count):
            q = nf.quantize(x, "nvfp4", encode_scale=np.ones(16, np.float32))
            q.relayout("swizzled_8x4").dequantize()
            nf.amax(x)
            try:
                nf.quantize(x, "nvfp4_per_token", row_list=lone)
            except ValueError:
                pass

    references = sys.getrefcount(x), sys.getrefcount(lone)
    calls(1000)
    before = resident_bytes()
    calls(10_000)
    grown = resident_bytes() - before
    assert (sys.getrefcount(x), sys.getrefcount(lone)) == references
    assert grown < 1_000_000, f"{grown} bytes"
