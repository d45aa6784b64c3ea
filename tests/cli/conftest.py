"""Helpers of the command line tests: run the real programs, make small safetensors files.

The programs are $NARROWFLOAT_CLI and $NARROWFLOAT_BENCH_CLI, or those in build/cpu.  Files are made
by hand with the standard library, so that a fault of our writer cannot hide one of our reader.
"""

import json
import os
import pty
import select
import struct
import subprocess
from array import array
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
TINY_MOE = ROOT / "models/tiny-moe"
BUILT = ROOT / "build/cpu/src"
CLI = Path(os.environ.get("NARROWFLOAT_CLI", BUILT / "cli/narrowfloat")).resolve()
BENCH_CLI = Path(os.environ.get("NARROWFLOAT_BENCH_CLI",
                                BUILT / "bench_cli/narrowfloat-bench")).resolve()
BENCH_COMMANDS = ["bench", "allreduce", "experts", "ep-model", "eval", "moe run", "moe bench",
                  "moe gemm"]

DONE, FINDINGS, USAGE, INPUT, UNSUPPORTED, INTERRUPTED = 0, 1, 2, 3, 4, 130

# Variables that change what is printed or which implementation runs are set by the tests only.
CLEAN_ENVIRONMENT = {
    name: value for name, value in os.environ.items()
    if not name.startswith("NARROWFLOAT_") and name not in ("COLUMNS", "NO_COLOR", "TERM")
}


def command_of(arguments):
    """The words of the command, "moe run"."""
    return " ".join(map(str, arguments[:2 if arguments[:1] == ("moe",) else 1]))


def run(*arguments, program=None, env=None, **options):
    """Runs the program that has the command, or the one that is named; its output is text and no
    terminal is attached."""
    options.setdefault("capture_output", True)
    program = program or (BENCH_CLI if command_of(arguments) in BENCH_COMMANDS else CLI)
    return subprocess.run([program, *map(str, arguments)], text=True, check=False, timeout=300,
                          stdin=subprocess.DEVNULL, env=CLEAN_ENVIRONMENT | (env or {}), **options)


def run_ok(*arguments, **options):
    result = run(*arguments, **options)
    assert result.returncode == DONE, result.stderr
    return result


def run_json(*arguments, expected=DONE):
    result = run(*arguments, "--json")
    assert result.returncode == expected, result.stderr
    document = json.loads(result.stdout)
    assert document["schema_version"] == 1
    assert document["command"] == command_of(arguments)
    return document


def run_on_terminal(*arguments, env=None):
    """Exit code and everything printed, with stdout and stderr on one pseudo-terminal."""
    main, side = pty.openpty()
    environment = CLEAN_ENVIRONMENT | {"TERM": "xterm"} | (env or {})
    with subprocess.Popen([CLI, *map(str, arguments)], stdin=subprocess.DEVNULL, stdout=side,
                          stderr=side, env=environment) as process:
        os.close(side)
        output = b""
        while select.select([main], [], [], 60)[0]:
            try:
                chunk = os.read(main, 65536)
            except OSError:  # Linux reports the closed other end this way.
                break
            if not chunk:
                break
            output += chunk
        os.close(main)
        return process.wait(60), output.decode()


def write_safetensors(path, tensors, metadata=None):
    """tensors: {name: (dtype, shape, bytes)}."""
    header, offset = {}, 0
    if metadata:
        header["__metadata__"] = metadata
    for name, (dtype, shape, data) in tensors.items():
        end = offset + len(data)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, _, data in tensors.values():
            file.write(data)


def bf16_weight(rows, cols, start=0):
    """A tensor of finite values between 2^-8 and 1, every second one negative."""
    period = array("H", ((0x3B80 + (i * 37 + start) % 0x400) | (i % 2 << 15) for i in range(1024)))
    repeats = -(-rows * cols // len(period))
    return ("BF16", [rows, cols], (period * repeats).tobytes()[:2 * rows * cols])


def read_safetensors(path):
    """{name: float32 array} of the BF16 and F32 tensors of a file."""
    data = Path(path).read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + size])
    header.pop("__metadata__", None)
    tensors = {}
    for name, info in header.items():
        begin, end = (8 + size + offset for offset in info["data_offsets"])
        if info["dtype"] == "BF16":
            words = np.frombuffer(data[begin:end], "<u2").astype(np.uint32) << 16
            values = words.view(np.float32)
        else:
            values = np.frombuffer(data[begin:end], "<f4")
        tensors[name] = values.reshape(info["shape"])
    return tensors


def stored(path):
    """{name: (dtype, shape, bytes)} of a file or of all files of a directory."""
    tensors = {}
    for file in sorted(path.glob("*.safetensors")) if path.is_dir() else [path]:
        data = file.read_bytes()
        size = struct.unpack("<Q", data[:8])[0]
        for name, info in json.loads(data[8:8 + size]).items():
            if name != "__metadata__":
                begin, end = (8 + size + offset for offset in info["data_offsets"])
                tensors[name] = (info["dtype"], info["shape"], data[begin:end])
    return tensors


def modules_of_source():
    names = [name.removesuffix(".weight") for name in stored(TINY_MOE)]
    return [name for name in names if name.endswith("_proj")]


@pytest.fixture
def small_file(tmp_path):
    """Two linear layers, a norm and an embedding in one file."""
    path = tmp_path / "small.safetensors"
    write_safetensors(path, {
        "model.embed_tokens.weight": bf16_weight(32, 128),
        "model.layers.0.mlp.up_proj.weight": bf16_weight(64, 128, 1),
        "model.layers.0.mlp.down_proj.weight": bf16_weight(128, 128, 2),
        "model.norm.weight": ("BF16", [128], bf16_weight(1, 128)[2]),
    })
    return path


@pytest.fixture(scope="session")
def quantized(tmp_path_factory):
    """models/tiny-moe in NVFP4; not to be changed."""
    target = tmp_path_factory.mktemp("quantized") / "nvfp4"
    run_ok("quantize", TINY_MOE, target, "--to", "nvfp4")
    return target


@pytest.fixture(scope="session", name="alone")
def one_format_each(tmp_path_factory):
    """A function from a convention to the tensors of tiny-moe in it."""
    root, known = tmp_path_factory.mktemp("alone"), {}

    def tensors(convention, *more):
        key = (convention, *more)
        if key not in known:
            target = root / str(len(known))
            run_ok("quantize", TINY_MOE, target, "--to", convention, *more)
            known[key] = stored(target)
        return known[key]

    return tensors
