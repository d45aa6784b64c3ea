"""Triton kernels for the quantizers that bench/run_gpu_benchmarks.sh compares with: what a careful
user would write, flat over the matrix where the format allows it, one pass over memory.

Arithmetic is that of `exact` mode (docs/numerics.md), for finite inputs of ordinary size: no
special cases for NaN, infinity, zero blocks or denormals.  So bytes are equal to the library's on
normal data, which run.py checks, but not on all data.
"""

import triton
import triton.language as tl

C6 = tl.constexpr(0.16666667163372039794921875)  # fl(1/6)


@triton.jit
def e2m1_codes(value):
    """Nearest, ties to even codes; saturates."""
    a = tl.abs(value)
    code = ((a > 0.25).to(tl.uint8) + (a >= 0.75).to(tl.uint8) + (a > 1.25).to(tl.uint8)
            + (a >= 1.75).to(tl.uint8) + (a > 2.5).to(tl.uint8) + (a >= 3.5).to(tl.uint8)
            + (a > 5.0).to(tl.uint8))
    sign = (value.to(tl.int32, bitcast=True) >> 28).to(tl.uint8) & 8
    return code | sign


@triton.jit
def nvfp4_kernel(x_ptr, codes_ptr, scales_ptr, encode, decode, num_blocks, BLOCKS: tl.constexpr):
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    mask = block < num_blocks
    offsets = block[:, None] * 16 + tl.arange(0, 16)[None, :]
    x = tl.load(x_ptr + offsets, mask=mask[:, None], other=0.0).to(tl.float32)
    amax = tl.max(tl.abs(x), axis=1)
    scale = (amax * (encode * C6)).to(tl.float8e4nv)
    inverse = tl.div_rn(1.0, scale.to(tl.float32) * decode)
    codes = e2m1_codes(x * inverse[:, None])
    low, high = tl.split(tl.reshape(codes, (BLOCKS, 8, 2)))
    out = block[:, None] * 8 + tl.arange(0, 8)[None, :]
    tl.store(codes_ptr + out, low | (high << 4), mask=mask[:, None])
    tl.store(scales_ptr + block, scale, mask=mask)


@triton.jit
def mxfp8_kernel(x_ptr, values_ptr, scales_ptr, num_blocks, BLOCKS: tl.constexpr):
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    mask = block < num_blocks
    offsets = block[:, None] * 32 + tl.arange(0, 32)[None, :]
    x = tl.load(x_ptr + offsets, mask=mask[:, None], other=0.0).to(tl.float32)
    amax = tl.max(tl.abs(x), axis=1)
    bits = tl.div_rn(amax, 448.0).to(tl.int32, bitcast=True)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    tl.store(values_ptr + offsets, (x * inverse[:, None]).to(tl.float8e4nv), mask=mask[:, None])
    tl.store(scales_ptr + block, exponent.to(tl.uint8), mask=mask)


@triton.jit
def fp8_1x128_kernel(x_ptr, values_ptr, scales_ptr, rows, padded_rows, BLOCKS: tl.constexpr,
                     COLS: tl.constexpr):
    """Blocks in row order; scales in a [blocks, padded rows] matrix."""
    per_row: tl.constexpr = COLS // 128
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    row = block // per_row
    mask = row < rows
    offsets = block[:, None] * 128 + tl.arange(0, 128)[None, :]
    x = tl.load(x_ptr + offsets, mask=mask[:, None], other=1.0).to(tl.float32)
    multiplier = tl.div_rn(448.0, tl.max(tl.abs(x), axis=1))
    tl.store(values_ptr + offsets, (x * multiplier[:, None]).to(tl.float8e4nv), mask=mask[:, None])
    scale_offset = (block % per_row) * padded_rows + row
    tl.store(scales_ptr + scale_offset, tl.div_rn(1.0, multiplier), mask=mask)


@triton.jit
def swiglu_fp8_kernel(x_ptr, x_scales_ptr, map_ptr, rows_ptr, values_ptr, scales_ptr,
                      INTER: tl.constexpr, GROUPS: tl.constexpr):
    """One program for GROUPS groups of 128 outputs of a slot; rows are up, then gate."""
    slot = tl.program_id(0)
    row = tl.load(map_ptr + slot).to(tl.int64)
    if row >= 0:
        rows = tl.load(rows_ptr).to(tl.int64)
        group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
        cols = group[:, None] * 128 + tl.arange(0, 128)[None, :]
        x = x_ptr + row * (2 * INTER)
        up_scale = tl.load(x_scales_ptr + row + rows * group)
        gate_scale = tl.load(x_scales_ptr + row + rows * (INTER // 128 + group))
        up = tl.load(x + cols).to(tl.float32) * up_scale[:, None]
        gate = tl.load(x + INTER + cols).to(tl.float32) * gate_scale[:, None]
        h = gate * tl.sigmoid(gate) * up
        amax = tl.max(tl.abs(h), axis=1)
        multiplier = tl.where(amax > 0, 448.0 / amax, 1.0)
        tl.store(values_ptr + row * INTER + cols, (h * multiplier[:, None]).to(tl.float8e4nv))
        tl.store(scales_ptr + row + rows * group, 1.0 / multiplier)


# (elements or groups a program, warps): run.py takes the fastest for each size.
CONFIGS = {
    "nvfp4": ((512, 1), (2048, 4), (4096, 4)),
    "mxfp8": ((512, 1), (2048, 4), (4096, 4)),
    "fp8_1x128": ((512, 1), (2048, 4), (4096, 4)),
    "activation": ((2, 1), (4, 2), (16, 4)),
}


def nvfp4(x, codes, scales, encode, decode, config):
    count, blocks = x.numel() // 16, config[0] // 16
    nvfp4_kernel[(triton.cdiv(count, blocks),)](x, codes, scales, encode, decode, count,
                                                BLOCKS=blocks, num_warps=config[1])


def mxfp8(x, values, scales, config):
    count, blocks = x.numel() // 32, config[0] // 32
    mxfp8_kernel[(triton.cdiv(count, blocks),)](x, values, scales, count, BLOCKS=blocks,
                                                num_warps=config[1])


def fp8_1x128(x, values, scales, config):
    rows, cols = x.shape
    blocks = config[0] // 128
    grid = (triton.cdiv(rows * cols // 128, blocks),)
    fp8_1x128_kernel[grid](x, values, scales, rows, scales.shape[1], BLOCKS=blocks, COLS=cols,
                           num_warps=config[1])


def swiglu_fp8(x, x_scales, slot_map, num_rows, values, scales, config):
    inter, groups = values.shape[1], config[0]
    grid = (slot_map.numel(), inter // 128 // groups)
    swiglu_fp8_kernel[grid](x, x_scales, slot_map, num_rows, values, scales, INTER=inter,
                            GROUPS=groups, num_warps=config[1])


KERNELS = {"nvfp4": nvfp4, "mxfp8": mxfp8, "fp8_1x128": fp8_1x128}
