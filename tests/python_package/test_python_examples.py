"""The programs of examples/python run, from another folder, and print what they promise."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODEL = str(ROOT / "models" / "tiny-moe")


def run(name: str, folder: Path, *arguments: str) -> str:
    """Output of an example."""
    program = ROOT / "examples" / "python" / name
    result = subprocess.run([sys.executable, program, *arguments], capture_output=True, text=True,
                            check=False, cwd=folder)  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout


def needs(*modules: str) -> None:
    """Skips where an example's own libraries are not installed."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")


def test_quantize_checkpoint(tmp_path: Path) -> None:
    """The model is written, and smaller."""
    text = run("quantize_checkpoint.py", tmp_path, MODEL, "quantized")
    assert (tmp_path / "quantized" / "config.json").is_file()
    found = re.search(r"([\d,]+) bytes -> ([\d,]+)", text)
    before, after = (int(size.replace(",", "")) for size in found.groups())
    assert after < 0.6 * before and "mxfp8" in text


def test_moe_layer(tmp_path: Path) -> None:
    """Every stage is named."""
    text = run("moe_layer.py", tmp_path, MODEL)
    assert 0.001 < float(re.search(r"([\d.]+) relative error", text)[1]) < 0.2
    assert all(f"  {stage}" in text for stage in ("route", "permute", "activation", "combine"))


def test_compare_formats(tmp_path: Path) -> None:
    """Fewer bits, more error; a picture."""
    needs("matplotlib", "safetensors")
    text = run("compare_formats.py", tmp_path, MODEL, "plot.png", "--tokens", "32")
    errors = {line.split()[0]: float(line.split()[5]) for line in text.splitlines()
              if "bits a weight" in line}  # fmt: skip
    assert errors["bf16"] == 0 < errors["mxfp8"] < errors["nvfp4_bf16"] < errors["mxfp4_bf16"]
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_torch_compile(tmp_path: Path) -> None:
    """Compiled and eager agree."""
    needs("torch")
    text = run("torch_compile.py", tmp_path, MODEL, "--backend", "aot_eager")
    assert float(re.search(r"eager: (\S+)", text)[1]) < 1e-4
    assert float(re.search(r"([\d.]+) dB", text)[1]) > 25
