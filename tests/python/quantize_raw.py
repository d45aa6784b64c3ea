"""Runs the test program quantize_raw, which quantizes a file of raw bytes with the library."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

TEST_BINARIES = "NARROWFLOAT_TEST_BIN"


def program(name: str) -> Path:
    """Path of a test program; a missing one is a failure, since a skip would hide it."""
    folder = os.environ.get(TEST_BINARIES)
    if not folder:
        raise RuntimeError(f"set {TEST_BINARIES} to the folder with the built test programs")
    path = Path(folder) / name
    if not path.is_file():
        raise RuntimeError(f"{path} does not exist: build the target {name}")
    return path


def quantize_raw(
    scratch: Path, data: bytes, shape: tuple[int, int, int], arguments: dict[str, str]
) -> tuple[bytes, bytes, bytes]:
    """(values, scales, global scales) of a tensor [batch, rows, cols].

    `arguments` are the program's options without their dashes.
    """
    source, result = scratch / "in.bin", scratch / "out"
    source.write_bytes(data)
    batch, rows, cols = (str(extent) for extent in shape)
    command = [str(program("quantize_raw")), "--batch", batch, "--rows", rows, "--cols", cols]
    for key, value in arguments.items():
        command.append(f"--{key}={value}")
    done = subprocess.run([*command, source, result], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    values, scales, global_scales = (
        result.with_suffix(suffix).read_bytes() for suffix in (".values", ".scales", ".global")
    )
    return values, scales, global_scales
