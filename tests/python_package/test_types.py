"""The package in the eyes of a type checker: its own sources, the stub, programs that use it.

mypy, strict (pyproject.toml), on the package as it is installed. Where torch is not, its types are
unknown, and what uses them is checked less.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import pytest
from test_python_examples import WITH_TORCH
from test_wheel import why_not

import narrowfloat as nf

ROOT = Path(__file__).resolve().parents[2]
HAS_TORCH = importlib.util.find_spec("torch") is not None
# mypy looks for installed packages only. ./test.sh expects both: there nothing may skip.
REASON = why_not() or ("" if importlib.util.find_spec("mypy") else "mypy is not installed")
checked = pytest.mark.skipif(bool(REASON) and os.environ.get("NARROWFLOAT_EXPECT_WHEEL") != "1",
                             reason=REASON or "nothing is missing")  # fmt: skip
PROGRAMS = [*sorted((ROOT / "examples" / "python").glob("*.py")), ROOT / "bench/call_overhead.py"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache of mypy, for the runs of this module."""
    return tmp_path_factory.mktemp("mypy")


def mypy(cache: Path, *what: str | Path) -> list[str]:
    """The findings of mypy, a line each, with the last part of paths; empty if all is well."""
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", ROOT / "pyproject.toml", "--cache-dir",
         cache, "--no-error-summary", "--hide-error-context", *what],
        capture_output=True, text=True, check=False, cwd=cache,
    )  # fmt: skip
    assert done.returncode in (0, 1) and not done.stderr, done.stderr + done.stdout
    return [re.sub(r"^\S*/", "", line) for line in done.stdout.splitlines()]


@checked
def test_the_package(cache: Path) -> None:
    """Its sources, and the stub of the extension."""
    assert mypy(cache, "-p", "narrowfloat") == []


@checked
def test_programs(cache: Path) -> None:
    """The examples and a benchmark are as strictly typed."""
    assert len(PROGRAMS) >= 5
    known = [path for path in PROGRAMS if HAS_TORCH or path.name not in WITH_TORCH]
    assert mypy(cache, *known) == []


def documented(language: str) -> str:
    """The blocks of docs/python.md in one program."""
    text = (ROOT / "docs" / "python.md").read_text()
    blocks = re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)
    assert blocks
    return "\n".join(blocks)


@checked
def test_documented_code(cache: Path, tmp_path: Path) -> None:
    """Users may copy it into typed programs."""
    program = tmp_path / "tour.py"
    program.write_text(documented("python"))
    assert mypy(cache, program) == []


@checked
def test_documented_operators(cache: Path, tmp_path: Path) -> None:
    """The same of torch's."""
    pytest.importorskip("torch", reason="torch is not installed; ./test.sh --with-torch")
    program = tmp_path / "operators.py"
    given = "import narrowfloat as nf\nlayer: nf.MoeLayer\nhidden: torch.Tensor\n" \
        "logits: torch.Tensor\nweight: torch.Tensor\nbias: torch.Tensor\n"  # fmt: skip
    code = documented("py").replace("moe = ", f"{given}moe = ", 1)
    program.write_text(code)
    assert mypy(cache, program) == []


# A line that ends in a comment of this kind must be refused with that code, no other line.
WRONG = """
import numpy as np
import narrowfloat as nf
import narrowfloat.compat.flashinfer as flashinfer

x = np.ones((4, 64), np.float32)
nf.quantize(x, 4)  # error: arg-type
nf.quantize(x, "nvfp4", rounding="up")  # error: call-arg
nf.quantize(x, "nvfp4", math="quick")  # error: arg-type
nf.quantize(x, "nvfp4", math=None, encode_scale=300.0)
q = nf.quantize(x, "nvfp4", encode_scale=np.ones(4, np.float32))
q.scale  # error: attr-defined
q.layout.rows = 3  # error: misc
nf.FourOverSix("mad")  # error: arg-type
nf.dequantize(x)  # error: arg-type
nf.amax()  # error: call-arg
nf.quantized_layout("nvfp4", 4, "64")  # error: arg-type
nf.build_info().version  # error: attr-defined
sizes: dict[str, int] = nf.moe_modes()  # error: assignment
nf.formats()[0].block_shape[2]  # error: misc
nf.MoeConfig(hidden=64, inter=64, experts=4)  # error: call-arg
nf.MoeConfig(hidden=64, inter=64, experts=4, top_k=2).hidden = 128  # error: misc
nf.MoeLayer.prepare(x, x)  # error: call-arg
layer = nf.MoeLayer.from_checkpoint("model", 0)
layer.run(x, x).astype(np.float32)
layer.run(x, x, x)  # error: call-arg
layer.explain(4)[0].implementation  # error: attr-defined
nf.diff("a", "b").cosine  # error: attr-defined
nf.diff(x, x).cosine
nf.quantize_checkpoint("a", "b", "nvfp4").figures  # error: attr-defined
flashinfer.nvfp4_quantize(x, x, math="quick")  # error: arg-type
flashinfer.cutlass_fused_moe(x, x)  # error: call-arg
flashinfer.trtllm_gen_routing(x, None, 1, 2).topk_ids.shape
"""
WRONG_WITH_TORCH = """
import torch
import narrowfloat as nf
import narrowfloat.compat.flashinfer as flashinfer
import narrowfloat.torch as nft

x = torch.ones(4, 64)
parts = nft.quantize(x, "nvfp4", encode_scale=torch.ones(1))
parts[0].view(torch.int8)
parts[3]  # error: misc
nft.quantize(x, "nvfp4", encode_scales=torch.ones(1))  # error: call-arg
nft.quantize([1.0], "nvfp4")  # error: arg-type
nft.dequantize(*parts, "nvfp4", x.shape).bfloat16()
nft.dequantize(*parts, "nvfp4", 4)  # error: arg-type
nf.dequantize(nf.quantize(x, "nvfp4")).cuda()
nft.route(x, 2)[0].long()
nft.Moe(x)  # error: arg-type
flashinfer.cutlass_fused_moe(x, x, x, x, x, torch.bfloat16, [x])[0].float()
flashinfer.trtllm_bf16_routed_moe((x, x), x, x, x, 8, 2, None, None, 64, 0, 8).float()
flashinfer.trtllm_bf16_routed_moe(x, "x", x, x, 8, 2, None, None, 64, 0, 8)  # error: arg-type
"""


def expected(code: str) -> dict[int, str]:
    """Line -> code of the error that its comment promises."""
    found = [re.search(r"# error: ([\w-]+)$", line) for line in code.splitlines()]
    return {number: match[1] for number, match in enumerate(found, 1) if match}


def check_wrong(cache: Path, program: Path, code: str) -> None:
    """Each wrong line is found, and no other."""
    program.write_text(code)
    found = [re.search(r":(\d+): error: .*\[([\w-]+)\]$", line) for line in mypy(cache, program)]
    assert {int(match[1]): match[2] for match in found if match} == expected(code)


@checked
def test_wrong_calls_are_found(cache: Path, tmp_path: Path) -> None:
    """Types of functions, of names from the stub, of results."""
    check_wrong(cache, tmp_path / "wrong.py", WRONG)


@checked
def test_wrong_calls_of_operators_are_found(cache: Path, tmp_path: Path) -> None:
    """Tensors in and out have their type."""
    pytest.importorskip("torch", reason="torch is not installed; ./test.sh --with-torch")
    check_wrong(cache, tmp_path / "wrong.py", WRONG_WITH_TORCH)


def test_the_stub_is_of_this_module() -> None:
    """Made again from the functions of the module that is loaded, it is the same text."""
    stubgen = pytest.importorskip("nanobind.stubgen")
    generator = stubgen.StubGen(nf._core)
    generator.put(nf._core)
    (path,) = Path(nf.__file__).parent.glob("_core.pyi")
    stub = path.read_text()
    assert generator.get() == stub
    assert not re.search(r"\b(dict|list|tuple)\b(?!\[)", re.sub(r'""".*?"""', "", stub, flags=re.S))


def public_functions() -> list[tuple[str, Any]]:
    """Functions, and methods of classes, that are written in Python."""
    modules = [nf, importlib.import_module("narrowfloat.compat.flashinfer")]
    if HAS_TORCH:
        modules.append(importlib.import_module("narrowfloat.torch"))
    found = []
    for module in modules:
        for name in module.__all__:
            thing = getattr(module, name)
            things = [thing]
            if inspect.isclass(thing):
                things = [getattr(value, "fget", None) or getattr(value, "__func__", value)
                          for value in vars(thing).values()]  # fmt: skip
            found += [(f"{module.__name__}.{name}", each) for each in things
                      if inspect.isfunction(each) and not each.__name__.startswith("_")]
    return found


def test_annotations_are_types_at_run_time() -> None:
    """They name what their modules have, so that other tools can read them, too."""
    functions = public_functions()
    assert len(functions) > 100
    for name, function in functions:
        hints = typing.get_type_hints(function)
        assert "return" in hints, (name, function)
