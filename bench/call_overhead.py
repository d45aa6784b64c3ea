"""Measures how much more a call from Python costs than the same call from C++ (docs/python.md).

    python bench/call_overhead.py [--device cpu|cuda] [--calls N] [--json FILE]

Quantizes 1 x 64 numbers to NVFP4 into given memory with one thread: the arithmetic is short. The
calls from C++ are a loop in the extension, with the same memory and stream. Times are those of the
processor, the best of many rounds, so that other programs count for little. torch is measured where
it is installed. On a GPU they are those of handing work over, launches included; a round is shorter
than the GPU's queue, which would make the host wait.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import narrowfloat as nf
import narrowfloat.compat.flashinfer as fi
from narrowfloat import _core

ROWS, COLS, SCALE, ROUNDS = 1, 64, 300.0, 30
QUEUE = 500  # Launches that a GPU takes without making the host wait.


def microseconds(call: Callable[[], Any], calls: int, settle: Callable[[], None]) -> float:
    """Processor time of one call; settle() ends the work that a round has left running."""
    best = float("inf")
    for _ in range(ROUNDS):
        begin = time.process_time()
        for _ in range(calls):
            call()
        best = min(best, (time.process_time() - begin) / calls)
        settle()
    return best * 1e6


def from_cpp(x: Any, calls: int, settle: Callable[[], None]) -> float:
    """The same call without Python."""
    target, options = nf.quantize(x, "nvfp4"), _core.QuantizeOptions()
    options.set_encode_scale(SCALE)
    loop = lambda: _core.repeat_quantize(x, target._buffers, options, calls)  # noqa: E731
    return microseconds(loop, 1, settle) / calls


def quantizers(name: str, x: Any) -> dict[str, Callable[[], Any]]:
    """Ways to quantize an array."""
    target = nf.quantize(x, "nvfp4")
    options = _core.QuantizeOptions()
    options.set_encode_scale(SCALE)
    half = x.astype(np.float16) if isinstance(x, np.ndarray) else x.half()
    return {
        f"{name}: extension alone": lambda: _core.quantize(x, target._buffers, options),
        f"{name}: quantize(out=)": lambda: nf.quantize(x, out=target, encode_scale=SCALE),
        f"{name}: quantize(), new results": lambda: nf.quantize(x, "nvfp4", encode_scale=SCALE),
        f"{name}: compat nvfp4_quantize()": lambda: fi.nvfp4_quantize(half, SCALE),
    }


def torch_calls(device: str) -> dict[str, Callable[[], Any]]:
    """Those of tensors, and an operator."""
    import torch

    import narrowfloat.torch as nft

    x, scale = torch.ones(ROWS, COLS, device=device), torch.tensor([SCALE], device=device)
    parts = nft.quantize(x, "nvfp4", encode_scale=scale)
    return quantizers("torch", x) | {
        "torch: operator(out=)": lambda: nft.quantize(x, "nvfp4", encode_scale=scale, out=parts)
    }


def conditions(device: str) -> dict[str, str]:
    """The facts that the times depend on."""
    facts = {"python": platform.python_version(), "numpy": np.__version__}
    facts["narrowfloat"] = nf.version()
    if torch := sys.modules.get("torch"):
        facts["torch"] = torch.__version__
        if device == "cuda":
            facts["gpu"] = torch.cuda.get_device_name()
    return facts


def main() -> None:
    """A table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--calls", type=int, default=2000, help="calls of a round; at most "
                        f"{QUEUE} on a GPU")  # fmt: skip
    parser.add_argument("--json", type=Path, help="write the numbers to this file, too")
    arguments = parser.parse_args()
    nf.set_num_threads(1)
    count = min(arguments.calls, QUEUE) if arguments.device == "cuda" else arguments.calls
    calls: dict[str, Callable[[], Any]] = {}
    x: Any = np.ones((ROWS, COLS), np.float32)
    if arguments.device == "cpu":
        calls |= quantizers("NumPy", x)
    settle: Callable[[], None] = lambda: None  # noqa: E731
    try:
        calls |= torch_calls(arguments.device)
        if arguments.device == "cuda":
            torch = sys.modules["torch"]
            settle, x = torch.cuda.synchronize, torch.ones(ROWS, COLS, device="cuda")
    except ImportError:
        if arguments.device == "cuda":
            raise
        print("torch is not installed: its rows are missing", file=sys.stderr)
    base = from_cpp(x, count, settle)
    times = {"C++": base}
    print(f"| Call | us | more than C++ |\n|---|---|---|\n| C++ | {base:.2f} | |")
    for name, call in calls.items():
        call()
        settle()
        took = times[name] = microseconds(call, count, settle)
        print(f"| {name} | {took:.1f} | {took - base:.1f} |")
    if arguments.json:
        document = {"conditions": conditions(arguments.device), "microseconds": times}
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
