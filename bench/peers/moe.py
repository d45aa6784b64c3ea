#!/usr/bin/env python3
"""Times whole Mixture-of-Experts layers of Triton (moe_kernels.py) and of PyTorch's grouped matrix
multiplications, and writes a document beside those of `narrowfloat-bench moe bench`:

    bench/peers/moe.py OUT.json [--shape NAME] [--tokens T,...] [--device cuda:N] [--commit TEXT]

Routing and the sorting of slots happen before the clock starts, which flatters these peers. Several
routings alternate, so that weights come from memory. In the same run a few tokens of every result
are compared with fp32 arithmetic on the same quantized weights.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

try:
    import torch
    import triton
except ImportError as error:
    raise SystemExit(f"peers: left out: {error}") from error

import harness
import moe_kernels as kernels

FP8 = torch.float8_e4m3fn
BF16 = torch.bfloat16
TOKENS = (1, 4, 16, 64, 256, 1024, 4096)
ROUTINGS = 4
CHECKED_TOKENS = 4
# bf16 rounds rows three times on the way, E4M3 activations have 3 mantissa bits.
MAX_ERROR = {"bf16": 1e-2, "mxfp4_bf16": 1e-2, "fp8_block": 6e-2, "fp8_rows": 8e-2}


@dataclasses.dataclass(frozen=True)
class Shape:
    hidden: int
    inter: int
    experts: int
    top_k: int
    modes: tuple[str, ...]


SHAPES = {
    "deepseek-v3": Shape(7168, 2048, 256, 8, ("fp8_block",)),
    "gpt-oss-120b": Shape(2880, 2880, 128, 4, ("mxfp4_bf16",)),
    "qwen3-30b-a3b": Shape(2048, 768, 128, 8, ("bf16", "fp8_block")),
}


class Weights:
    """[experts, rows, cols] in the mode's format, and expert by expert in fp32."""

    def __init__(self, mode: str, experts: int, rows: int, cols: int, device: str):
        self.mode = mode
        generator = torch.Generator(device=device).manual_seed(rows * 31 + cols)
        deviation = cols**-0.5

        def random(*shape):
            return torch.randn(shape, generator=generator, device=device) * deviation

        self.scales = None
        if mode == "mxfp4_bf16":
            self.values = torch.randint(0, 256, (experts, rows, cols // 2), device=device,
                                        dtype=torch.uint8, generator=generator)
            self.scales = torch.randint(118, 122, (experts, rows, cols // 32), device=device,
                                        dtype=torch.uint8, generator=generator)
            return
        dtype = BF16 if mode == "bf16" else FP8
        self.values = torch.empty((experts, rows, cols), device=device, dtype=dtype)
        for expert in range(experts):
            scale = 1 if mode == "bf16" else 100 / deviation
            self.values[expert] = (random(rows, cols) * scale).clamp(-448, 448).to(dtype)
        if mode != "bf16":
            blocks = (rows // 128, cols // 128) if mode == "fp8_block" else (rows,)
            jitter = 1 + torch.rand((experts, *blocks), generator=generator, device=device)
            self.scales = jitter * (deviation / 150)

    def expert(self, index: int) -> torch.Tensor:
        if self.mode == "mxfp4_bf16":
            grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=self.values.device)
            grid = torch.cat([grid, -grid])
            codes = self.values[index].long()
            pairs = torch.stack([grid[codes & 15], grid[codes >> 4]], dim=-1).flatten(-2)
            factor = torch.exp2(self.scales[index].float() - 127)
            return pairs * factor.repeat_interleave(32, dim=-1)
        values = self.values[index].float()
        if self.mode == "fp8_block":
            factor = self.scales[index].repeat_interleave(128, 0).repeat_interleave(128, 1)
            return values * factor
        return values * self.scales[index][:, None] if self.mode == "fp8_rows" else values

    @property
    def num_bytes(self) -> int:
        tensors = [self.values] + ([] if self.scales is None else [self.scales])
        return sum(t.numel() * t.itemsize for t in tensors)


class Routing:
    """Random experts of tokens, and slots sorted by expert in tiles of `tile` rows."""

    def __init__(self, shape: Shape, tokens: int, tile: int, seed: int, device: str):
        generator = torch.Generator(device=device).manual_seed(seed)
        scores = torch.rand((tokens, shape.experts), generator=generator, device=device)
        self.ids = scores.topk(shape.top_k, dim=1).indices
        self.weights = torch.softmax(scores.gather(1, self.ids), dim=1).contiguous()
        flat = self.ids.flatten()
        self.order = torch.argsort(flat, stable=True)
        counts = torch.bincount(flat, minlength=shape.experts)
        self.ends = counts.cumsum(0).to(torch.int32)
        tiles = (counts + tile - 1) // tile
        slots, experts, first = [], [], 0
        for expert, (count, num) in enumerate(zip(counts.tolist(), tiles.tolist())):
            padding = torch.full((num * tile - count,), flat.numel(), device=device)
            slots += [self.order[first:first + count], padding]
            experts += [expert] * num
            first += count
        self.slots = torch.cat(slots).to(torch.int32)
        self.experts = torch.tensor(experts, dtype=torch.int32, device=device)
        self.num_tiles = torch.tensor([len(experts)], dtype=torch.int32, device=device)


# Rows, columns and depth of a tile, warps, stages: the fastest of a size counts.
def configs(mode: str, slots_per_expert: float):
    if mode == "mxfp4_bf16":
        return [(16, 128, 128, 4, 4), (32, 128, 128, 4, 3)] if slots_per_expert <= 16 else [
            (64, 128, 128, 4, 3), (128, 128, 64, 8, 3)]
    depth = 128 if mode == "fp8_block" else 64
    if slots_per_expert <= 16:
        return [(16, 128, depth, 4, 4), (16, 128, depth, 8, 5)]
    if slots_per_expert <= 48:
        return [(32, 128, depth, 4, 4), (64, 128, depth, 4, 4)]
    return [(64, 128, depth, 4, 4), (128, 128, depth, 8, 3)]


class TritonLayer:
    peer = "triton"

    def __init__(self, shape: Shape, mode: str, w1: Weights, w2: Weights, tokens: int, config):
        self.shape, self.mode, self.w1, self.w2 = shape, mode, w1, w2
        self.tile, self.block_n, self.block_k, self.warps, self.stages = config
        device = w1.values.device
        self.is_fp8 = mode == "fp8_block"
        slots = tokens * shape.top_k
        code = FP8 if self.is_fp8 else BF16
        self.coded = torch.empty((tokens, shape.hidden), device=device, dtype=code)
        self.coded_scales = torch.empty((tokens, shape.hidden // 128), device=device)
        self.fc1 = torch.empty((slots, 2 * shape.inter), device=device, dtype=BF16)
        self.h = torch.empty((slots, shape.inter), device=device, dtype=code)
        self.h_scales = torch.empty((slots, shape.inter // 128), device=device)
        self.fc2 = torch.empty((slots, shape.hidden), device=device, dtype=BF16)
        self.out = torch.empty((tokens, shape.hidden), device=device, dtype=BF16)

    def multiply(self, a, a_scales, w: Weights, out, routing: Routing, slots_per_row: int):
        rows, cols = out.shape[1], a.shape[1]
        # As many programs as any routing of so many slots needs.
        most = min(self.shape.experts, out.shape[0]) + out.shape[0] // self.tile
        grid = (most * triton.cdiv(rows, self.block_n),)
        kernels.grouped_gemm_kernel[grid](
            a, a_scales, w.values, w.scales if w.scales is not None else a_scales, out,
            routing.slots, routing.experts, routing.num_tiles, out.shape[0], rows, cols,
            SLOTS_PER_ROW=slots_per_row, MODE=self.mode, BLOCK_M=self.tile, BLOCK_N=self.block_n,
            BLOCK_K=self.block_k, GROUP_M=8, num_warps=self.warps, num_stages=self.stages)

    def run(self, x, routing: Routing):
        shape, rows = self.shape, x
        if self.is_fp8:
            groups = x.numel() // 128
            kernels.quantize_rows_kernel[(triton.cdiv(groups, 8),)](
                x, self.coded, self.coded_scales, groups, GROUPS=8)
            rows = self.coded
        self.multiply(rows, self.coded_scales, self.w1, self.fc1, routing, shape.top_k)
        width = 128 if shape.inter % 128 == 0 else 64
        groups = self.h.numel() // width
        kernels.swiglu_kernel[(triton.cdiv(groups, 4),)](
            self.fc1, self.h, self.h_scales, groups, INTER=shape.inter, WIDTH=width, GROUPS=4,
            IS_FP8=self.is_fp8)
        self.multiply(self.h, self.h_scales, self.w2, self.fc2, routing, 1)
        kernels.combine_kernel[(x.shape[0], triton.cdiv(shape.hidden, 1024))](
            self.fc2, routing.weights, self.out, HIDDEN=shape.hidden, TOP_K=shape.top_k,
            BLOCK=1024)
        return self.out


class TorchLayer:
    """torch._grouped_mm on bf16, torch._scaled_grouped_mm on E4M3 with a scale a row."""
    peer = "torch"
    tile = 1

    def __init__(self, shape: Shape, mode: str, w1: Weights, w2: Weights):
        self.shape, self.mode, self.w1, self.w2 = shape, mode, w1, w2

    def multiply(self, a, w: Weights, ends):
        if self.mode == "bf16":
            return torch._grouped_mm(a, w.values.transpose(1, 2), offs=ends)
        scale = a.float().abs().amax(dim=1).clamp(min=1e-20) / 448
        codes = (a.float() / scale[:, None]).to(FP8)
        return torch._scaled_grouped_mm(codes, w.values.transpose(1, 2), scale, w.scales,
                                        offs=ends, out_dtype=BF16, use_fast_accum=True)

    def run(self, x, routing: Routing):
        rows = x[routing.order // self.shape.top_k]
        gate, up = self.multiply(rows, self.w1, routing.ends).chunk(2, dim=1)
        h = torch.nn.functional.silu(gate) * up
        y = self.multiply(h, self.w2, routing.ends)
        weighted = y.float() * routing.weights.flatten()[routing.order][:, None]
        out = torch.zeros(x.shape, device=x.device)
        return out.index_add_(0, routing.order // self.shape.top_k, weighted).to(BF16)


def reference(x, routing: Routing, w1: Weights, w2: Weights, tokens) -> torch.Tensor:
    out = torch.zeros((len(tokens), w2.values.shape[1]), device=x.device)
    for i, token in enumerate(tokens):
        for s, expert in enumerate(routing.ids[token].tolist()):
            gate, up = (w1.expert(expert) @ x[token].float()).chunk(2)
            h = torch.nn.functional.silu(gate) * up
            out[i] += routing.weights[token, s] * (w2.expert(expert) @ h)
    return out


def measure(layer, shape: Shape, tokens: int, device: str) -> tuple[dict, float]:
    """(time, relative error of a few tokens)."""
    x = torch.randn((tokens, shape.hidden), device=device).to(BF16)
    routings = [Routing(shape, tokens, layer.tile, seed, device) for seed in range(ROUTINGS)]
    picked = list(range(0, tokens, -(-tokens // CHECKED_TOKENS)))
    got = layer.run(x, routings[0])[picked].float()
    wanted = reference(x, routings[0], layer.w1, layer.w2, picked)
    error = ((got - wanted).norm() / wanted.norm()).item()
    time = harness.time_calls(lambda index: layer.run(x, routings[index % ROUTINGS]), ROUTINGS,
                              replays=5)
    return time, error


def best_triton(shape: Shape, mode: str, w1: Weights, w2: Weights, tokens: int, device: str):
    per_expert = tokens * shape.top_k / min(shape.experts, tokens * shape.top_k)
    results = []
    for config in configs(mode, per_expert):
        layer = TritonLayer(shape, mode, w1, w2, tokens, config)
        results.append((*measure(layer, shape, tokens, device), str(config)))
    return min(results, key=lambda result: result[0]["median_us"])


def case_of(peer: str, mode: str, tokens: int, result: tuple, weight_bytes: int) -> dict:
    time, error, note = result
    return {"peer": peer, "mode": mode, "tokens": tokens, "weight_bytes": weight_bytes,
            "plain": time, "error": error, "correct": error <= MAX_ERROR[mode], "note": note}


def cases_of(shape: Shape, tokens: list[int], device: str) -> list[dict]:
    cases = []
    for mode in (*shape.modes, *(["fp8_rows"] if "fp8_block" in shape.modes else [])):
        w1 = Weights(mode, shape.experts, 2 * shape.inter, shape.hidden, device)
        w2 = Weights(mode, shape.experts, shape.hidden, shape.inter, device)
        for count in tokens:
            if mode != "fp8_rows":
                result = best_triton(shape, mode, w1, w2, count, device)
                cases.append(case_of("triton", mode, count, result, w1.num_bytes + w2.num_bytes))
            if mode in ("bf16", "fp8_rows"):
                result = (*measure(TorchLayer(shape, mode, w1, w2), shape, count, device), "")
                cases.append(case_of("torch", mode, count, result, w1.num_bytes + w2.num_bytes))
            for case in cases[-2 if mode == "bf16" else -1:]:
                print(f"{case['peer']:7s} {mode:11s} T={count:<6d}"
                      f"{case['plain']['median_us']:10.1f} us   error {case['error']:.1e}"
                      f"{'' if case['correct'] else '  WRONG'}  {case['note']}", flush=True)
        del w1, w2
    return cases


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=SHAPES, action="append")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--commit", default="")
    arguments = parser.parse_args()
    torch.cuda.set_device(arguments.device)
    document = {"schema_version": 1, "command": "moe bench peers", "commit": arguments.commit,
                "machine": {"device": arguments.device,
                            "name": torch.cuda.get_device_properties(arguments.device).name},
                "torch": torch.__version__, "triton": triton.__version__, "layers": []}
    for name in arguments.shape or SHAPES:
        print(name)
        tokens = [int(text) for text in arguments.tokens.split(",")]
        document["layers"].append({"shape": name,
                                   "cases": cases_of(SHAPES[name], tokens, arguments.device)})
    arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    return 0 if all(case["correct"] for layer in document["layers"]
                    for case in layer["cases"]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
