#!/usr/bin/env python3
"""Measures Triton and torch.compile versions of some of the library's operations, and writes a
document in the form of `narrowfloat-bench bench --json`:

    bench/peers/run.py OUT.json [--quick] [--device cuda:N] [--commit TEXT] [--peers triton,...]

Every result is checked in the same run against torch_functions.py on the CPU, on the same input:
all bytes for NVFP4, MXFP8 and FP8 1x128 with Triton; where a compiler is free to contract or to use
approximate divisions (torch.compile, SwiGLU), 2 % of the codes and of the scales may differ.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

try:
    import torch
    import triton
except ImportError as error:
    raise SystemExit(f"peers: left out: {error}") from error

import harness
import torch_functions
import triton_kernels

ROWS = (1, 16, 128, 1024, 4096, 16384)
QUICK_ROWS = (1, 1024, 16384)
COLS = 7168
TOKENS = (1, 32, 256, 1024, 4096, 16384)
INTER, TOP_K, EXPERTS, TILE = 2048, 8, 256, 8
# As in `narrowfloat-bench bench`: a given scale for a maximum of 6.
ENCODE = float(torch.tensor(448 * 6, dtype=torch.float32) / 6)
DECODE = float(1 / torch.tensor(ENCODE, dtype=torch.float32))
FP8 = torch.float8_e4m3fn
MAX_DIFFERING = 0.02
PEERS = ("triton", "torch.compile")
LAYOUTS = {"nvfp4": "linear", "mxfp8": "linear", "fp8_1x128": "mn_major"}


def padded_to(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def empty_outputs(name: str, rows: int, cols: int, device: str) -> list[torch.Tensor]:
    """Values and scales, poisoned."""
    shapes = {
        "nvfp4": [((rows * cols // 16, 8), torch.uint8), ((rows * cols // 16,), FP8)],
        "mxfp8": [((rows * cols // 32, 32), FP8), ((rows * cols // 32,), torch.uint8)],
        "fp8_1x128": [((rows, cols), FP8),
                      ((cols // 128, padded_to(rows, 4)), torch.float32)],
    }[name]
    return [poisoned(shape, dtype, device) for shape, dtype in shapes]


def poisoned(shape, dtype, device: str) -> torch.Tensor:
    bytes_ = torch.full((*shape[:-1], shape[-1] * dtype.itemsize), 0xFF, dtype=torch.uint8,
                        device=device)
    return bytes_.view(dtype)


def share_of_differing(a: torch.Tensor, b: torch.Tensor) -> float:
    if a.dtype == torch.float32:
        return (~torch.isclose(a, b, rtol=1e-5)).float().mean().item()
    return (a.view(torch.uint8) != b.view(torch.uint8)).float().mean().item()


def difference(got: list, expected: list, is_exact: bool) -> tuple[str, str]:
    """(what is wrong, a note)."""
    values, scales = got
    wanted_values, wanted_scales = expected
    wanted_values = wanted_values.view(values.shape)
    scales = scales[..., :wanted_scales.shape[-1]].contiguous()
    if is_exact:
        # A matrix of one column need not be dense enough for view().
        same = (torch.equal(values.view(torch.uint8), wanted_values.view(torch.uint8))
                and torch.equal(scales.reshape(-1).view(torch.uint8),
                                wanted_scales.reshape(-1).view(torch.uint8)))
        return ("" if same else "bytes differ from the reference", "same bytes")
    codes = share_of_differing(values, wanted_values)
    other = share_of_differing(scales, wanted_scales)
    note = f"{codes:.1e} of the codes and {other:.1e} of the scales differ"
    return ("" if max(codes, other) <= MAX_DIFFERING else note), note


def document(device: str, commit: str) -> dict:
    properties = torch.cuda.get_device_properties(device)
    driver = Path("/proc/driver/nvidia/version")
    words = driver.read_text().split() if driver.exists() else []
    version = next((w for w in words if w.replace(".", "").isdigit() and "." in w), "")
    return {"schema_version": 1, "command": "bench peers", "commit": commit, "l2": "cold",
            "machine": {"device": device, "name": properties.name, "driver": version,
                        "cuda_runtime": torch.version.cuda},
            "torch": torch.__version__, "triton": triton.__version__, "cases": []}


def case_of(peer: str, fields: dict, sets: int, time: dict | None, wrong: str, note: str) -> dict:
    return {"peer": peer, "math": "exact", "dtype": "BF16", "source": "plain",
            "encode_scale": None, "four_over_six": False, **fields, "buffer_sets": sets,
            "plain": time, "programmatic": None, "checked_with": "torch_functions.py",
            "correct": not wrong, "message": wrong, "note": note}


class Quantizer:
    """A quantizer on rotated buffers, for one peer."""

    def __init__(self, name: str, peer: str, rows: int, device: str):
        self.name, self.peer = name, peer
        self.scalars = (ENCODE, DECODE) if name == "nvfp4" else ()
        generator = torch.Generator(device=device).manual_seed(1)
        self.x = torch.randn(rows, COLS, generator=generator, device=device, dtype=torch.bfloat16)
        outputs = empty_outputs(name, rows, COLS, device)
        set_bytes = sum(t.numel() * t.itemsize for t in (self.x, *outputs))
        self.sets = harness.num_sets(set_bytes)
        self.inputs = [self.x.clone() for _ in range(self.sets)]
        self.outputs = [[t.clone() for t in outputs] for _ in range(self.sets)]
        if peer == "torch.compile":
            self.compiled = torch.compile(getattr(torch_functions, name), dynamic=False)

    def call(self, index: int):
        at = index % self.sets
        if self.peer == "triton":
            kernel = triton_kernels.KERNELS[self.name]
            kernel(self.inputs[at], *self.outputs[at], *self.scalars, config=self.config)
            return self.outputs[at]
        return self.compiled(self.inputs[at], *self.scalars)

    def check(self) -> tuple[str, str]:
        got = [t.cpu() for t in self.call(self.sets - 1)]
        expected = getattr(torch_functions, self.name)(self.x.cpu(), *self.scalars)
        return difference(got, expected, is_exact=self.peer == "triton")

    def fields(self) -> dict:
        return {"op": "quantize", "format": self.name, "layout": LAYOUTS[self.name],
                "encode_scale": "given" if self.name == "nvfp4" else None,
                "rows": self.x.shape[0], "cols": COLS}


class Activation:
    """SwiGLU and FP8 1x128 of rows sorted by expert; torch.compile takes all rows in order."""

    def __init__(self, peer: str, tokens: int, device: str):
        self.name, self.peer, self.tokens = "activation", peer, tokens
        self.map, rows = sorted_rows(tokens)
        self.map = self.map.to(device)
        self.num_rows = torch.tensor([rows], dtype=torch.int32, device=device)
        generator = torch.Generator(device=device).manual_seed(1)
        x = torch.randn(rows, 2 * INTER, generator=generator, device=device)
        self.x = x.to(FP8)
        self.x_scales = 0.5 + torch.rand(2 * INTER // 128, rows, generator=generator,
                                         device=device)
        del x
        outputs = [poisoned((rows, INTER), FP8, device),
                   poisoned((INTER // 128, rows), torch.float32, device)]
        tensors = (self.x, self.x_scales, *outputs)
        self.sets = harness.num_sets(sum(t.numel() * t.itemsize for t in tensors))
        self.inputs = [(self.x.clone(), self.x_scales.clone()) for _ in range(self.sets)]
        self.outputs = [[t.clone() for t in outputs] for _ in range(self.sets)]
        if peer == "torch.compile":
            self.compiled = torch.compile(torch_functions.swiglu_fp8, dynamic=False)

    def call(self, index: int):
        at = index % self.sets
        if self.peer == "triton":
            triton_kernels.swiglu_fp8(*self.inputs[at], self.map, self.num_rows, *self.outputs[at],
                                      config=self.config)
            return self.outputs[at]
        return self.compiled(*self.inputs[at])

    def check(self) -> tuple[str, str]:
        values, scales = self.call(self.sets - 1)
        # The reference on the CPU is slow: rows of the first slots are enough to see wrong ones.
        rows = self.map[:256].long()
        x, x_scales = self.x.view(torch.uint8)[rows].view(FP8), self.x_scales[:, rows]
        expected = torch_functions.swiglu_fp8(x.cpu(), x_scales.cpu())
        got = [values.view(torch.uint8)[rows].view(FP8).cpu(), scales[:, rows].cpu()]
        return difference(got, expected, is_exact=False)

    def fields(self) -> dict:
        return {"op": "activation", "format": None, "layout": None, "rows": None, "cols": INTER,
                "tokens": self.tokens, "top_k": TOP_K, "experts": EXPERTS, "tile": TILE,
                "input": "fp8"}


def sorted_rows(tokens: int) -> tuple[torch.Tensor, int]:
    """(row of every slot, number of rows): random experts, stable order, padded tiles."""
    generator = torch.Generator().manual_seed(7)
    experts = torch.rand(tokens, EXPERTS, generator=generator).topk(TOP_K).indices.flatten()
    counts = torch.bincount(experts, minlength=EXPERTS)
    padded = (counts + TILE - 1) // TILE * TILE
    starts = torch.cumsum(padded, 0) - padded
    order = torch.argsort(experts, stable=True)
    within = torch.arange(len(order)) - (torch.cumsum(counts, 0) - counts)[experts[order]]
    rows = torch.empty(len(order), dtype=torch.int32)
    rows[order] = (starts[experts[order]] + within).int()
    return rows, int(padded.sum())


def choose_config(work) -> None:
    """The fastest of the configurations that fit a kernel."""
    times = {}
    for config in triton_kernels.CONFIGS[work.name]:
        work.config = config
        time = harness.time_calls(work.call, work.sets, replay_ms=1, replays=3)
        times[config] = time["median_us"]
    work.config = min(times, key=times.get)


def measure(work, peer: str) -> dict:
    try:
        if peer == "triton":
            choose_config(work)
        time = harness.time_calls(work.call, work.sets)
        wrong, note = work.check()
    except Exception as error:  # A peer that cannot do a case does not end the run.
        return case_of(peer, work.fields(), work.sets, None, f"{type(error).__name__}: {error}", "")
    return case_of(peer, work.fields(), work.sets, time, wrong, note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--quick", action="store_true", help="fewer sizes, Triton only")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--commit", default="")
    parser.add_argument("--peers", default="", help=f"of {', '.join(PEERS)}")
    arguments = parser.parse_args()
    peers = arguments.peers.split(",") if arguments.peers else list(PEERS)
    if arguments.quick and not arguments.peers:
        peers = ["triton"]
    if not torch.cuda.is_available():
        raise SystemExit("peers: PyTorch finds no GPU")
    device = "cuda:0" if arguments.device == "cuda" else arguments.device
    torch.cuda.set_device(device)
    result = document(device, arguments.commit)
    for peer in peers:
        # Compiling takes seconds for each shape.
        few = arguments.quick or peer == "torch.compile"
        for name in LAYOUTS:
            for rows in QUICK_ROWS if few else ROWS:
                result["cases"].append(measure(Quantizer(name, peer, rows, device), peer))
        for tokens in (1, 1024, 16384) if few else TOKENS:
            result["cases"].append(measure(Activation(peer, tokens, device), peer))
        torch.cuda.empty_cache()
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    wrong = [case for case in result["cases"] if not case["correct"]]
    for case in wrong:
        print(f"peers: {case['peer']} {case['format'] or case['op']}: {case['message']}")
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
