"""This module has the problem that moe.py's layers compute: shapes, quantized weights, routings, and
the result in fp32."""

from __future__ import annotations

import dataclasses
import functools
import json
import struct
import types
from pathlib import Path

import numpy
import torch

FP8 = torch.float8_e4m3fn
BF16 = torch.bfloat16
ID_SEED = 42
# As many ranges of tokens as `narrowfloat-bench moe bench` alternates between.
MIN_IDS = 256
MAX_RANGES = 32
# bf16 rounds rows three times on the way, E4M3 activations have 3 mantissa bits.
MAX_ERROR = {"bf16": 1e-2, "mxfp4_bf16": 1e-2, "nvfp4_bf16": 1e-2, "fp8_block": 6e-2,
             "mxfp4_fp8": 6e-2, "mxfp4_fp8_token": 8e-2, "fp8_rows": 8e-2}
E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
GPT_OSS_ALPHA, GPT_OSS_LIMIT = 1.702, 7.0


@dataclasses.dataclass(frozen=True)
class Shape:
    hidden: int
    inter: int
    experts: int
    top_k: int
    modes: tuple[str, ...]
    is_gpt_oss: bool = False  # Experts have biases, and the activation is gpt-oss's SwiGLU.


SHAPES = {
    "deepseek-v3": Shape(7168, 2048, 256, 8,
                         ("fp8_block", "nvfp4_bf16", "mxfp4_fp8", "mxfp4_fp8_token")),
    "gpt-oss-120b": Shape(2880, 2880, 128, 4, ("mxfp4_bf16", "mxfp4_fp8", "mxfp4_fp8_token"),
                          is_gpt_oss=True),
    "qwen3-30b-a3b": Shape(2048, 768, 128, 8, ("bf16", "fp8_block")),
}


def format_of(mode: str) -> str:
    """The format of a mode's weights."""
    first = mode.split("_")[0]
    return mode if first == "fp8" else first


class Weights:
    """[experts, rows, cols] in a format, with biases [experts, rows] if asked for, and expert by
    expert in fp32."""

    def __init__(self, name: str, experts: int, rows: int, cols: int, device: str,
                 has_bias: bool = False):
        self.format = name
        generator = torch.Generator(device=device).manual_seed(rows * 31 + cols)
        deviation = cols**-0.5

        def random(*shape):
            return torch.randn(shape, generator=generator, device=device) * deviation

        def random_bytes(*shape, low=0, high=256):
            return torch.randint(low, high, shape, device=device, dtype=torch.uint8,
                                 generator=generator)

        self.scales = self.factors = None
        self.bias = random(experts, rows).to(BF16) if has_bias else None
        if name in ("mxfp4", "nvfp4"):
            self.values = random_bytes(experts, rows, cols // 2)
            if name == "mxfp4":
                self.scales = random_bytes(experts, rows, cols // 32, low=118, high=122)
                return
            # Scales of 1 to 3.75, which one factor an expert brings down.
            self.scales = random_bytes(experts, rows, cols // 16, low=0x38, high=0x47).view(FP8)
            self.factors = deviation / 7 * (1 + torch.rand(experts, generator=generator,
                                                            device=device))
            return
        dtype = BF16 if name == "bf16" else FP8
        self.values = torch.empty((experts, rows, cols), device=device, dtype=dtype)
        for expert in range(experts):
            scale = 1 if name == "bf16" else 100 / deviation
            self.values[expert] = (random(rows, cols) * scale).clamp(-448, 448).to(dtype)
        if name != "bf16":
            blocks = (rows // 128, cols // 128) if name == "fp8_block" else (rows,)
            jitter = 1 + torch.rand((experts, *blocks), generator=generator, device=device)
            self.scales = jitter * (deviation / 150)

    def expert(self, index: int) -> torch.Tensor:
        if self.format in ("mxfp4", "nvfp4"):
            grid = torch.tensor(E2M1, device=self.values.device)
            grid = torch.cat([grid, -grid])
            codes = self.values[index].long()
            pairs = torch.stack([grid[codes & 15], grid[codes >> 4]], dim=-1).flatten(-2)
            if self.format == "mxfp4":
                factor = torch.exp2(self.scales[index].float() - 127)
                return pairs * factor.repeat_interleave(32, dim=-1)
            factor = self.scales[index].float() * self.factors[index]
            return pairs * factor.repeat_interleave(16, dim=-1)
        values = self.values[index].float()
        if self.format == "fp8_block":
            factor = self.scales[index].repeat_interleave(128, 0).repeat_interleave(128, 1)
            return values * factor
        return values * self.scales[index][:, None] if self.format == "fp8_rows" else values

    @property
    def num_bytes(self) -> int:
        tensors = (self.values, self.scales, self.factors, self.bias)
        return sum(t.numel() * t.itemsize for t in tensors if t is not None)


def random_ids(shape: Shape, tokens: int) -> torch.Tensor:
    """[rows, top_k] distinct experts of uniformly random tokens; rows are enough for a run on as
    many tokens, and at least MIN_IDS."""
    generator = torch.Generator().manual_seed(ID_SEED)
    scores = torch.rand((max(tokens, MIN_IDS), shape.experts), generator=generator)
    return scores.topk(shape.top_k, dim=1).indices.int()


def write_ids(ids: torch.Tensor, path: Path) -> None:
    """A safetensors file for `narrowfloat-bench moe bench --routing`."""
    data = ids.contiguous().numpy().tobytes()
    header = json.dumps({"topk_ids": {"dtype": "I32", "shape": list(ids.shape),
                                      "data_offsets": [0, len(data)]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


class Routing:
    """The experts of some tokens, with weights."""

    def __init__(self, shape: Shape, ids: torch.Tensor, device: str):
        self.shape, self.device = shape, device
        self.ids = ids
        self.flat = ids.flatten().numpy()
        generator = torch.Generator().manual_seed(len(self.flat))
        scores = torch.rand(ids.shape, generator=generator)
        self.weights = torch.softmax(scores, dim=1).to(device)
        counts = numpy.bincount(self.flat, minlength=shape.experts)
        order = numpy.argsort(self.flat, kind="stable")
        self.order = torch.from_numpy(order).to(device)
        self.ends = torch.from_numpy(counts.cumsum()).to(device, torch.int32)
        self.offsets = torch.nn.functional.pad(self.ends, (1, 0)).long()  # One more than experts.
        # [tokens, top_k]: the row of a slot where slots are sorted by expert.
        rows = numpy.argsort(order).astype(numpy.int32).reshape(ids.shape)
        self.rows = torch.from_numpy(rows).to(device)

    @functools.cache  # noqa: B019  A routing lives as long as its case.
    def sorted_by(self, tile: int) -> types.SimpleNamespace:
        """Slots sorted by expert in tiles of `tile` rows of one expert; a row without a slot has
        the number of slots."""
        counts = numpy.bincount(self.flat, minlength=self.shape.experts)
        tiles = -(-counts // tile)
        first_row = (tiles.cumsum() - tiles) * tile
        order = numpy.argsort(self.flat, kind="stable")
        place = numpy.arange(order.size) - (counts.cumsum() - counts)[self.flat[order]]
        slots = numpy.full(tiles.sum() * tile, order.size, dtype=numpy.int32)
        slots[first_row[self.flat[order]] + place] = order

        def on_device(values) -> torch.Tensor:
            return torch.from_numpy(numpy.asarray(values, dtype=numpy.int32)).to(self.device)

        experts = numpy.repeat(numpy.arange(self.shape.experts), tiles)
        return types.SimpleNamespace(slots=on_device(slots), experts=on_device(experts),
                                     num_tiles=on_device([tiles.sum()]),
                                     num_rows=on_device([slots.size]))


def routings_of(shape: Shape, ids: torch.Tensor, tokens: int, device: str) -> list[Routing]:
    """One range of tokens after the other, as `narrowfloat-bench moe bench` takes them."""
    count = min(len(ids) // tokens, MAX_RANGES)
    return [Routing(shape, ids[i * tokens:(i + 1) * tokens], device) for i in range(count)]


def activate(shape: Shape, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    if not shape.is_gpt_oss:
        return torch.nn.functional.silu(gate) * up
    gate = gate.clamp(max=GPT_OSS_LIMIT)
    up = up.clamp(-GPT_OSS_LIMIT, GPT_OSS_LIMIT)
    return gate * torch.sigmoid(GPT_OSS_ALPHA * gate) * (up + 1)


def reference(shape: Shape, x, routing: Routing, w1: Weights, w2: Weights, tokens) -> torch.Tensor:
    """Rows of the layer's result for some of the tokens, in fp32 from the quantized weights."""
    def multiply(w: Weights, expert: int, row: torch.Tensor) -> torch.Tensor:
        product = w.expert(expert) @ row
        return product if w.bias is None else product + w.bias[expert].float()

    out = torch.zeros((len(tokens), shape.hidden), device=x.device)
    for i, token in enumerate(tokens):
        for s, expert in enumerate(routing.ids[token].tolist()):
            gate, up = multiply(w1, expert, x[token].float()).chunk(2)
            h = activate(shape, gate, up)
            out[i] += routing.weights[token, s] * multiply(w2, expert, h)
    return out
