"""Layers of Triton (moe_kernels.py) and of PyTorch's grouped matrix multiplications, for moe.py."""

from __future__ import annotations

import torch
import triton

import moe_kernels as kernels
from moe_problem import BF16, FP8, Routing, Shape, Weights, activate


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
    modes = ("bf16", "fp8_block", "mxfp4_bf16")

    def __init__(self, shape: Shape, mode: str, w1: Weights, w2: Weights, tokens: int, config):
        self.shape, self.mode, self.w1, self.w2 = shape, mode, w1, w2
        self.tile, self.block_n, self.block_k, self.warps, self.stages = config
        self.note = str(config)
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
        places = routing.sorted_by(self.tile)
        kernels.grouped_gemm_kernel[grid](
            a, a_scales, w.values, w.scales if w.scales is not None else a_scales,
            w.bias if w.bias is not None else a_scales, out, places.slots, places.experts,
            places.num_tiles, out.shape[0], rows, cols, SLOTS_PER_ROW=slots_per_row,
            MODE=self.mode, HAS_BIAS=w.bias is not None, BLOCK_M=self.tile, BLOCK_N=self.block_n,
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
            IS_FP8=self.is_fp8, IS_GPT_OSS=shape.is_gpt_oss)
        self.multiply(self.h, self.h_scales, self.w2, self.fc2, routing, 1)
        return kernels.combine(self.fc2, routing.weights, self.out)


class TorchLayer:
    """torch._grouped_mm on bf16, torch._scaled_grouped_mm on E4M3 with a scale a row."""
    modes = ("bf16", "fp8_rows")
    note = ""

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
        y = self.multiply(activate(self.shape, gate, up), self.w2, routing.ends)
        weighted = y.float() * routing.weights.flatten()[routing.order][:, None]
        out = torch.zeros(x.shape, device=x.device)
        return out.index_add_(0, routing.order // self.shape.top_k, weighted).to(BF16)
