#!/usr/bin/env python3
"""Times whole Mixture-of-Experts layers of Triton (moe_kernels.py), of PyTorch's grouped matrix
multiplications and of Humming, and writes a document beside those of `narrowfloat-bench moe bench`:

    bench/peers/moe.py OUT.json [--bench PROGRAM] [--shape NAME] [--mode MODE,...] [--peer PEER,...]
                       [--tokens T,...] [--device cuda:N] [--commit TEXT]

With --bench, the path of narrowfloat-bench, narrowfloat's own layers are timed in the same run on
the same experts. Routing and the sorting of slots happen before the clock starts, which flatters
these peers. Ranges of tokens alternate, so that weights come from memory. In the same run a few
tokens of every result are compared with fp32 arithmetic on the same quantized weights.

Humming is left out where it is not installed: pip install humming-kernels. It compiles kernels at
run time with NVRTC or nvcc, into a temporary folder unless HUMMING_CACHE_DIR names another.
"""

from __future__ import annotations

import argparse
import functools
import json
import tempfile
import traceback
from importlib.metadata import version
from pathlib import Path

try:
    import torch
    import triton
except ImportError as error:
    raise SystemExit(f"peers: left out: {error}") from error

import harness
import moe_layers
import narrowfloat_bench
from moe_problem import (BF16, MAX_ERROR, SHAPES, Routing, Shape, Weights, format_of, random_ids,
                         reference, routings_of, write_ids)

TOKENS = (1, 4, 16, 64, 256, 1024, 4096)
PEERS = ("triton", "torch", "humming")
CHECKED_TOKENS = 4
# How peers refuse what they have no kernel for.
REFUSALS = (AssertionError, NotImplementedError, RuntimeError, ValueError)


def measure(shape: Shape, mode: str, layer, weights, x, routings: list[Routing]) -> dict:
    """The times of a layer, and the relative error of a few tokens."""
    tokens = len(routings[0].ids)
    picked = list(range(0, tokens, -(-tokens // CHECKED_TOKENS)))
    got = layer.run(x[:tokens], routings[0])[picked].float()
    wanted = reference(shape, x, routings[0], *weights, picked)
    error = ((got - wanted).norm() / wanted.norm()).item()

    def call(index: int):
        place = index % len(routings)
        return layer.run(x[place * tokens:(place + 1) * tokens], routings[place])

    times = harness.time_burst_and_sustained(call, len(routings))
    return {"mode": mode, "tokens": tokens, "weight_bytes": sum(w.num_bytes for w in weights),
            **times, "error": error, "correct": error <= MAX_ERROR[mode], "note": layer.note}


class Measurement:
    def __init__(self, name: str, peers: list[str], tokens: list[int], device: str):
        self.shape, self.peers, self.tokens, self.device = SHAPES[name], peers, tokens, device
        self.ids = random_ids(self.shape, max(tokens))
        self.x = torch.randn((len(self.ids), self.shape.hidden), device=device).to(BF16)
        self.cases: list[dict] = []
        self.left_out: list[str] = []

    def add(self, peer: str, mode: str, weights, layers_of) -> None:
        """The fastest of layers_of(tokens) for each number of tokens. They are functions that make
        a layer, or raise one of REFUSALS, as a layer may when it runs."""
        for tokens in self.tokens:
            routings = routings_of(self.shape, self.ids, tokens, self.device)
            results = []
            for make in layers_of(tokens):
                try:
                    results.append(measure(self.shape, mode, make(), weights, self.x, routings))
                except REFUSALS as error:
                    self.leave_out(f"{peer} {mode} T={tokens}", error)
            if results:
                best = min(results, key=lambda result: result["plain"]["median_us"])
                self.cases.append({"peer": peer, **best})
                print_case(self.cases[-1])

    def measure_mode(self, mode: str) -> None:
        shape = self.shape
        sizes = ((2 * shape.inter, shape.hidden), (shape.hidden, shape.inter))
        weights = [Weights(format_of(mode), shape.experts, *size, self.device, shape.is_gpt_oss)
                   for size in sizes]

        def triton_layers(tokens: int):
            per_expert = tokens * shape.top_k / min(shape.experts, tokens * shape.top_k)
            for config in moe_layers.configs(mode, per_expert):
                yield functools.partial(moe_layers.TritonLayer, shape, mode, *weights, tokens,
                                        config)

        if "triton" in self.peers and mode in moe_layers.TritonLayer.modes:
            self.add("triton", mode, weights, triton_layers)
        if "torch" in self.peers and mode in moe_layers.TorchLayer.modes:
            self.add("torch", mode, weights,
                     lambda tokens: [functools.partial(moe_layers.TorchLayer, shape, mode,
                                                       *weights)])
        if "humming" in self.peers:
            self.measure_humming(mode, weights)

    def measure_humming(self, mode: str, weights) -> None:
        import moe_humming  # Imports Humming, which need not be installed.
        if mode not in moe_humming.HummingMoe.modes:
            return
        prepared = []
        for pad in moe_humming.pads_of(self.shape):
            try:
                prepared.append(moe_humming.HummingWeights(self.shape, mode, *weights, pad))
                prepared[-1].compile(self.tokens)
            except REFUSALS as error:  # The sizes that did compile are timed all the same.
                self.leave_out(f"humming {mode}, padded to {pad}", error)
        if prepared:
            self.add("humming", mode, weights, lambda tokens: [
                functools.partial(moe_humming.HummingMoe, one, kind, tokens)
                for one in prepared for kind in one.kinds(tokens)])

    def leave_out(self, what: str, error: Exception) -> None:
        """A peer that refuses a layer; its assertions often have no text but a place."""
        place = traceback.extract_tb(error.__traceback__)[-1]
        self.left_out.append(f"{what}: {type(error).__name__}: {str(error)[:300]} "
                             f"({Path(place.filename).name}:{place.lineno}: {place.line})")
        print(f"peers: left out: {self.left_out[-1]}", flush=True)


def print_case(case: dict) -> None:
    times = " / ".join(f"{case[key]['median_us']:.1f}" for key in ("plain", "sustained"))
    print(f"{case['peer']:12s} {case['mode']:16s} T={case['tokens']:<6d}{times:>20s} us   error "
          f"{case['error']:.1e}{'' if case['correct'] else '  WRONG'}  {case.get('note', '')}",
          flush=True)


def available_peers(wanted: list[str]) -> list[str]:
    if "humming" not in wanted:
        return wanted
    try:
        import humming  # noqa: F401  Only whether it is there.
    except ImportError as error:
        print(f"peers: humming left out: {error}; pip install humming-kernels", flush=True)
        return [peer for peer in wanted if peer != "humming"]
    return wanted


def versions_of(peers: list[str]) -> dict[str, str]:
    names = {"humming": version("humming-kernels")} if "humming" in peers else {}
    return {"torch": torch.__version__, "triton": triton.__version__, **names}


def measure_shape(name: str, arguments, peers: list[str]) -> dict:
    measurement = Measurement(name, peers, arguments.tokens, arguments.device)
    shape, ours = SHAPES[name], []
    modes = [*shape.modes, *(["fp8_rows"] if "fp8_block" in shape.modes else [])]
    for mode in modes:
        if arguments.mode and mode not in arguments.mode:
            continue
        if arguments.bench and mode != "fp8_rows":
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "ids.safetensors"
                write_ids(measurement.ids, file)
                ours += narrowfloat_bench.layers(arguments.bench, name, mode, arguments.tokens,
                                                 file, arguments.device)
            for case in ours[-len(arguments.tokens):]:
                print_case(case)
        measurement.measure_mode(mode)
        torch.cuda.empty_cache()
    return {"shape": name, "cases": measurement.cases, "narrowfloat": ours,
            "left_out": measurement.left_out}


def names(choices):
    def parse(text: str) -> list[str]:
        for name in text.split(","):
            if name not in choices:
                raise argparse.ArgumentTypeError(
                    f"expected some of {', '.join(choices)}, got {name!r}")
        return text.split(",")
    return parse


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = dict.fromkeys(mode for shape in SHAPES.values() for mode in (*shape.modes, "fp8_rows"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--bench", type=Path, help="the path of narrowfloat-bench")
    parser.add_argument("--shape", choices=SHAPES, action="append")
    parser.add_argument("--mode", type=names(modes))
    parser.add_argument("--peer", type=names(PEERS), default=list(PEERS))
    parser.add_argument("--tokens", type=lambda text: [int(part) for part in text.split(",")],
                        default=list(TOKENS))
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--commit", default="")
    arguments = parser.parse_args()
    caches = harness.use_temporary_caches()
    torch.cuda.set_device(arguments.device)
    peers = available_peers(arguments.peer)
    document = {"schema_version": 1, "command": "moe bench peers", "commit": arguments.commit,
                "machine": {"device": arguments.device,
                            "name": torch.cuda.get_device_properties(arguments.device).name},
                **versions_of(peers), "layers": []}
    for name in arguments.shape or SHAPES:
        print(name)
        document["layers"].append(measure_shape(name, arguments, peers))
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    caches.cleanup()
    return 0 if all(case["correct"] for layer in document["layers"]
                    for case in (*layer["cases"], *layer["narrowfloat"])) else 1


if __name__ == "__main__":
    raise SystemExit(main())
