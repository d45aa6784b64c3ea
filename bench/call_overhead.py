"""What a call from Python costs more than the same call from C++ (docs/python.md).

    python bench/call_overhead.py [--device cpu|cuda] [--calls N]

Quantizes 1 x 64 numbers to NVFP4 into given memory with one thread: the arithmetic is short.
The time from C++ is what `narrowfloat bench` says. Times are those of the processor, the best of
several rounds, so that other programs count for little. torch is measured where it is installed.
On a GPU the time is that of handing work over, launches included, and C++ is not measured.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import narrowfloat as nf
import narrowfloat.compat.flashinfer as fi
from narrowfloat import _core

ROWS, COLS, SCALE, ROUNDS = 1, 64, 300.0, 9


def microseconds(call: Callable[[], Any], calls: int, settle: Callable[[], None]) -> float:
    """Of the processor for one call; settle() ends what a round has left behind."""
    best = float("inf")
    for _ in range(ROUNDS):
        begin = time.process_time()
        for _ in range(calls):
            call()
        best = min(best, (time.process_time() - begin) / calls)
        settle()
    return best * 1e6


def from_cpp() -> float:
    """The same call in a C++ program."""
    command = ["-m", "narrowfloat", "bench", "quantize", "--format", "nvfp4", "--dtype", "fp32",
               "--device", "cpu", "--threads", "1", "--rows", str(ROWS), "--cols", str(COLS),
               "--l2", "warm", "--json"]  # fmt: skip
    result = subprocess.run([sys.executable, *command], check=True, stdout=subprocess.PIPE)
    (case,) = json.loads(result.stdout)["cases"]
    return float(case["plain"]["median_us"])


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


def main() -> None:
    """A table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--calls", type=int, default=5000, help="calls of a round")
    arguments = parser.parse_args()
    nf.set_num_threads(1)
    calls: dict[str, Callable[[], Any]] = {}
    if arguments.device == "cpu":
        calls |= quantizers("NumPy", np.ones((ROWS, COLS), np.float32))
    settle: Callable[[], None] = lambda: None  # noqa: E731
    try:
        calls |= torch_calls(arguments.device)
        if arguments.device == "cuda":
            settle = sys.modules["torch"].cuda.synchronize
    except ImportError:
        print("torch is not installed: its rows are missing", file=sys.stderr)
    base = from_cpp() if arguments.device == "cpu" else 0.0
    print(f"| Call | us | more than C++ ({base:.2f} us) |\n|---|---|---|")
    for name, call in calls.items():
        call()
        took = microseconds(call, arguments.calls, settle)
        print(f"| {name} | {took:.1f} | {f'{took - base:.1f}' if base else ''} |")


if __name__ == "__main__":
    main()
