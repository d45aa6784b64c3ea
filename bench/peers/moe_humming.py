"""Layers of Humming (the wheel `humming-kernels`), for moe.py: its GEMMs on slots that are sorted
beforehand, its kernel of activation and quantization, and moe_kernels.py's combine.

    indexed:  quantize | GEMM that gathers token rows | activation (and quantize) | GEMM | combine
    grouped:  scatter (and quantize) | GEMM | activation (and quantize) | GEMM | combine

From 32 rows an expert on both are timed and the faster one counts. Its kernels are compiled at run
time for each size: those of a layer's all numbers of tokens at the same time, on all processors,
into HUMMING_CACHE_DIR.
"""

from __future__ import annotations

import functools
import json
from concurrent.futures import ThreadPoolExecutor

import torch
from humming.forward import may_process_input
from humming.kernel.humming import HummingKernel
from humming.layer import HummingLayer
from humming.tune import get_heuristics_config

import moe_kernels as kernels
from moe_problem import BF16, GPT_OSS_ALPHA, GPT_OSS_LIMIT, Routing, Shape, Weights, format_of

INDEXED, GROUPED = "indexed", "grouped_contiguous"
MIN_GROUPED_ROWS = 32
WEIGHTS = {
    "mxfp4": {"quant_method": "mxfp4"},
    "nvfp4": {"quant_method": "humming", "dtype": "float4e2m1", "scale_dtype": "float8e4m3",
              "group_size": 16, "scale_2_type": "tensor"},
    "fp8_block": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
FP8_INPUT = {"quant_method": "humming", "dtype": "float8e4m3"}
# mxfp4_fp8 has 1x128 scales as narrowfloat's mode has; what Humming itself is made for is
# mxfp4_fp8_token, with a scale a row.
INPUTS = {
    "mxfp4_bf16": None,
    "nvfp4_bf16": None,
    "mxfp4_fp8": FP8_INPUT | {"quant_mode": "dynamic_group", "group_size": 128},
    "mxfp4_fp8_token": FP8_INPUT | {"quant_mode": "dynamic_token"},
    "fp8_block": FP8_INPUT | {"quant_mode": "dynamic_group", "group_size": 128},
}
SWIGLU = "a / (1.0f + __expf(-a)) * b"
GATE, UP = f"fminf(a, {GPT_OSS_LIMIT}f)", f"fminf(fmaxf(b, -{GPT_OSS_LIMIT}f), {GPT_OSS_LIMIT}f)"
GPT_OSS_SWIGLU = f"{GATE} / (1.0f + __expf(-{GPT_OSS_ALPHA}f * {GATE})) * ({UP} + 1.0f)"


def tensors_of(w: Weights) -> dict[str, torch.Tensor]:
    """The tensors, named and typed as WEIGHTS' conventions have them."""
    if w.format == "mxfp4":
        tensors = {"weight": w.values, "weight_scale": w.scales}
    elif w.format == "nvfp4":
        tensors = {"weight": w.values.view(torch.int32), "weight_scale": w.scales,
                   "weight_scale_2": w.factors}
    else:
        tensors = {"weight": w.values, "weight_scale_inv": w.scales}
    return tensors if w.bias is None else tensors | {"bias": w.bias}


def pads_of(shape: Shape) -> tuple[int, ...]:
    """Multiples to pad rows and columns of weights to. Humming's tiles are powers of two that
    divide both, so widths such as gpt-oss's 2880 are padded; which multiple is faster depends on
    the number of tokens."""
    return (1,) if shape.hidden % 256 == 0 and shape.inter % 256 == 0 else (128, 256)


def prepared(mode: str, w: Weights, cols: int, pad: int) -> HummingLayer:
    """The weights in Humming's own layout."""
    with w.values.device:
        layer = HummingLayer(shape_n=w.values.shape[1], shape_k=cols,
                             weight_config=dict(WEIGHTS[format_of(mode)]),
                             input_config=INPUTS[mode] and dict(INPUTS[mode]),
                             pad_n_to_multiple=pad, pad_k_to_multiple=pad,
                             num_experts=w.values.shape[0], has_bias=w.bias is not None,
                             torch_dtype=BF16)
    layer.load_from_tensors(tensors_of(w))
    layer.transform()
    return layer


class HummingWeights:
    """Both layers of weights, and their kernels."""

    def __init__(self, shape: Shape, mode: str, w1: Weights, w2: Weights, pad: int):
        self.shape, self.pad, self.device = shape, pad, w1.values.device
        self.fc1 = prepared(mode, w1, shape.hidden, pad)
        self.fc2 = prepared(mode, w2, shape.inter, pad)

    def compile(self, tokens: list[int]) -> None:
        """Compiles all kernels for these numbers of tokens at the same time; others are compiled
        when they are first used. Raises what the first one that fails does, after all have
        ended."""
        shape = self.shape
        sizes = [(kind, count * shape.top_k) for count in tokens for kind in self.kinds(count)]
        with ThreadPoolExecutor(4) as pool:
            jobs = [pool.submit(self.compile_gemms, layer, kind,
                                [slots for one, slots in sizes if one == kind])
                    for layer in (self.fc1, self.fc2) for kind in {kind for kind, _ in sizes}]
            for layer, cols, has_activation in ((self.fc1, shape.hidden, False),
                                                (self.fc2, 2 * shape.inter, True)):
                rows = torch.zeros((1, cols), device=self.device, dtype=BF16)
                jobs.append(pool.submit(self.process, layer, rows, has_activation))
        for job in jobs:
            job.result()

    def kinds(self, tokens: int) -> list[str]:
        per_expert = tokens * self.shape.top_k / self.shape.experts
        return [INDEXED, GROUPED] if per_expert >= MIN_GROUPED_ROWS else [INDEXED]

    @functools.cache  # noqa: B019  Weights live as long as their cases.
    def tuning(self, layer: HummingLayer, kind: str, slots: int) -> dict:
        """Returns the tiles that Humming chooses for so many rows."""
        return get_heuristics_config(layer.humming_config, shape_m=slots, gemm_type=kind)

    def compile_gemms(self, layer: HummingLayer, kind: str, slots: list[int]) -> None:
        HummingKernel.prepare_kernels(
            layer.humming_config.to_str(), json.dumps({"gemm_type": kind}),
            [(0, 1 << 30, self.tuning(layer, kind, count)) for count in slots])

    def process(self, layer: HummingLayer, rows, has_activation: bool, places=None):
        """(rows, scales) as the layer's GEMM takes them: after the activation if asked for, and
        scattered to the given places [tokens, top_k]."""
        options = {}
        if has_activation:
            options = {"activation_type": "binary_split",
                       "activation_impl": GPT_OSS_SWIGLU if self.shape.is_gpt_oss else SWIGLU}
        if places is not None:
            options = {"layout": "scatter", "scatter_idx": places}
        rows, group_scales, token_scales = may_process_input(layer.humming_config, inputs=rows,
                                                             **options)
        return rows, token_scales if group_scales is None else group_scales


class HummingMoe:
    modes = tuple(INPUTS)

    def __init__(self, weights: HummingWeights, kind: str, tokens: int):
        self.weights, self.kind, shape = weights, kind, weights.shape
        device, slots = weights.device, tokens * shape.top_k
        self.tuning = [weights.tuning(layer, kind, slots) for layer in (weights.fc1, weights.fc2)]
        tiles = " ".join("x".join(map(str, one["block_shape"])) for one in self.tuning)
        padded = f", padded to {weights.pad}" if weights.pad > 1 else ""
        self.note = f"{kind.split('_')[0]} {tiles}{padded}"
        self.first = torch.empty((slots, 2 * shape.inter), device=device, dtype=BF16)
        self.second = torch.empty((slots, shape.hidden), device=device, dtype=BF16)
        self.out = torch.empty((tokens, shape.hidden), device=device, dtype=BF16)

    def multiply(self, layer, rows, scales, out, routing: Routing, tuning: dict, top_k: int):
        if self.kind == INDEXED:
            places = routing.sorted_by(tuning["block_shape"][0])
            where = {"sorted_ids": places.slots, "expert_ids": places.experts,
                     "num_tokens_padded": places.num_rows, "top_k": top_k}
        else:
            where = {"expert_layout": routing.offsets}
        layer(rows, input_scale=scales, outputs=out, compute_config={"gemm_type": self.kind},
              tuning_config=tuning, **where)

    def run(self, x, routing: Routing):
        weights = self.weights
        places = None if self.kind == INDEXED else routing.rows
        rows, scales = weights.process(weights.fc1, x, False, places)
        self.multiply(weights.fc1, rows, scales, self.first, routing, self.tuning[0],
                      weights.shape.top_k)
        rows, scales = weights.process(weights.fc2, self.first, True)
        self.multiply(weights.fc2, rows, scales, self.second, routing, self.tuning[1], 1)
        return kernels.combine(self.second, routing.weights, self.out, places)
