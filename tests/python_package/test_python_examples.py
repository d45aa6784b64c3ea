"""The programs of examples/python run, from another folder, and print what they promise.

With NumPy alone, as in an environment that `pip install .` made, but for those that need torch.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

import narrowfloat as nf

ROOT = Path(__file__).resolve().parents[2]
OTHERS = ("ml_dtypes", "safetensors", "matplotlib", "torch")
WITH_TORCH = ("chat_with_moe.py", "expert_parallel.py", "tensor_parallel_layer.py",
              "torch_compile.py")  # fmt: skip
MODEL = str(ROOT / "models" / "tiny-moe")


def run(name: str, folder: Path, *arguments: str, without: tuple[str, ...] = OTHERS) -> str:
    """Output of an example; the modules `without` cannot be imported."""
    program = str(ROOT / "examples" / "python" / name)
    code = (f"import runpy, sys; sys.modules |= dict.fromkeys({without!r}); "
            f"sys.argv = {[program, *arguments]!r}; runpy.run_path(sys.argv[0], None, '__main__')")
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                            check=False, cwd=folder)  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_documented_commands(tmp_path: Path) -> None:
    """Those of docs/python.md, in a folder that holds nothing but the examples and the model."""
    for name in ("examples", "models"):
        (tmp_path / name).symlink_to(ROOT / name)
    text = (ROOT / "docs" / "python.md").read_text()
    commands = re.findall(r"^python examples/python/(\S+\.py) ([^#\n]*)", text, re.M)
    assert {name for name, _ in commands} == {path.name for path in
                                              (ROOT / "examples/python").glob("*.py")}  # fmt: skip
    for name, arguments in commands:
        if name not in WITH_TORCH:
            run(name, tmp_path, *arguments.split())


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
    text = run("compare_formats.py", tmp_path, MODEL, "plot.svg", "--tokens", "32")
    errors = {line.split()[0]: float(line.split()[5]) for line in text.splitlines()
              if "bits a weight" in line}  # fmt: skip
    assert errors["bf16"] == 0 < errors["mxfp8"] < errors["nvfp4_bf16"] < errors["mxfp4_bf16"]
    drawn = ElementTree.fromstring((tmp_path / "plot.svg").read_text())
    points = [element for element in drawn if element.tag.endswith("circle")]
    heights = {text.text: float(text.get("y")) for text in drawn if text.text in errors}
    assert len(points) == len(errors) - 1 == len(heights)
    assert sorted(heights, key=heights.get, reverse=True) == sorted(heights, key=errors.get)


def test_torch_compile(tmp_path: Path) -> None:
    """Compiled and eager agree."""
    pytest.importorskip("torch", reason="torch is not installed; ./test.sh --with-torch")
    text = run("torch_compile.py", tmp_path, MODEL, without=())
    assert float(re.search(r"eager: (\S+)", text)[1]) < 1e-4
    assert float(re.search(r"([\d.]+) dB", text)[1]) > 25


@pytest.mark.parametrize("convention", [None, "nvfp4-modelopt"])
def test_chat_with_moe(convention: str | None, tmp_path: Path) -> None:
    """Words of the text that the model was trained on, how fast, and memory."""
    pytest.importorskip("transformers", minversion="5.9",
                        reason="transformers is not installed; ./test.sh --with-torch")  # fmt: skip
    model = MODEL
    if convention is not None:
        model = str(tmp_path / "quantized")
        nf.quantize_checkpoint(MODEL, model, convention)
    program = ROOT / "examples" / "python" / "chat_with_moe.py"
    done = subprocess.run([sys.executable, program, model, "--prompt", "In the beginning",
                           "--tokens", "60"], capture_output=True, text=True, check=False,
                          cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.search(r"\b(the|and|of)\b", done.stdout) and len(done.stdout) > 50
    assert re.search(r"60 tokens, [\d.]+ tokens per second", done.stderr)
    linears = "" if convention is None else r"16 packed Linear layers: [\d.]+ MB; "
    assert re.search(rf"4 layers of experts \(\w+\): [\d.]+ MB; {linears}peak of the process",
                     done.stderr)  # fmt: skip


def test_tensor_parallel_layer(tmp_path: Path) -> None:
    """Two processes agree, and are near to one."""
    pytest.importorskip("torch", reason="torch is not installed; ./test.sh --with-torch")
    program = ROOT / "examples" / "python" / "tensor_parallel_layer.py"
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False,
                          cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(": True") == 3 and "False" not in done.stdout
    errors = [float(word) for word in re.findall(r"^  \S.* ([\d.]+)$", done.stdout, re.M)]
    assert 0 < errors[0] < 0.01 < errors[1] < 0.05 < errors[2] < 0.15


@pytest.mark.parametrize(("transport", "tensor_ranks"), [("auto", 1), ("all_to_all", 2)])
def test_expert_parallel(transport: str, tensor_ranks: int, tmp_path: Path) -> None:
    """Four processes give the bits of one, or of its parts."""
    pytest.importorskip("torch", reason="torch is not installed; ./test.sh --with-torch")
    program = ROOT / "examples" / "python" / "expert_parallel.py"
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4",
                           str(program), "--transport", transport, "--tensor-ranks",
                           str(tensor_ranks)], capture_output=True, text=True, check=False,
                          cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stderr
    expected = "peer_memory" if transport == "auto" else transport
    assert done.stdout.count(f"4 ranks, {expected}, payload bf16: equal to the bit") == 2
    # Parts are quantized on their own, and rounded once more.
    distance = float(re.search(r"whole layer: ([\d.]+)", done.stdout)[1])
    assert distance < 0.1 if tensor_ranks > 1 else distance < 0.005
