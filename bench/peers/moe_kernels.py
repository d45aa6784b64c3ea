"""Triton kernels of a fused Mixture-of-Experts layer, for moe.py: what a careful user would write.
Rows are slots sorted by expert, each expert's padded to whole tiles; a map gives the slot of a row,
or the number of slots where there is none.

    quantize | grouped GEMM that gathers token rows | SwiGLU (and quantize) | grouped GEMM | combine
"""

import triton
import triton.language as tl


@triton.jit
def quantize_rows_kernel(x_ptr, values_ptr, scales_ptr, num_groups, GROUPS: tl.constexpr):
    """[rows, cols] to E4M3 with a scale every 128 columns, [rows, cols / 128]."""
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    mask = group < num_groups
    offsets = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    x = tl.load(x_ptr + offsets, mask=mask[:, None], other=1.0).to(tl.float32)
    multiplier = 448.0 / tl.maximum(tl.max(tl.abs(x), axis=1), 1e-20)
    tl.store(values_ptr + offsets, (x * multiplier[:, None]).to(tl.float8e4nv), mask=mask[:, None])
    tl.store(scales_ptr + group, 1.0 / multiplier, mask=mask)


@triton.jit
def grouped_gemm_kernel(a_ptr, a_scales_ptr, w_ptr, w_scales_ptr, bias_ptr, out_ptr, slots_ptr,
                        experts_ptr, tiles_ptr, num_slots, N, K, SLOTS_PER_ROW: tl.constexpr,
                        MODE: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr,
                        BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr):
    """out[slot] = w[expert] @ a[slot // SLOTS_PER_ROW].  MODE: bf16, fp8_block (E4M3 with scales of
    1x128 and 128x128, BLOCK_K is 128), or mxfp4_bf16 (E2M1 pairs with UE8M0 every 32 columns)."""
    num_tiles = tl.load(tiles_ptr)
    blocks_n = tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0)
    per_group = GROUP_M * blocks_n
    first_m = pid // per_group * GROUP_M
    if first_m >= num_tiles:
        return
    group_m = min(num_tiles - first_m, GROUP_M)
    tile = first_m + pid % per_group % group_m
    block_n = pid % per_group // group_m
    expert = tl.load(experts_ptr + tile).to(tl.int64)
    slot = tl.load(slots_ptr + tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    has_row = slot < num_slots
    row = slot // SLOTS_PER_ROW
    col = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    has_col = col < N
    k = tl.arange(0, BLOCK_K)
    a = a_ptr + row[:, None] * K + k[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    if MODE == "mxfp4_bf16":
        half = tl.arange(0, BLOCK_K // 2)
        block = tl.arange(0, BLOCK_K // 32)
        w = w_ptr + (expert * N + col)[None, :] * (K // 2) + half[:, None]
        w_scales = w_scales_ptr + (expert * N + col)[:, None] * (K // 32) + block[None, :]
        for start in range(0, K, BLOCK_K):
            x = tl.load(a + start, mask=has_row[:, None] & (start + k[None, :] < K), other=0.0)
            codes = tl.load(w + start // 2,
                            mask=has_col[None, :] & (start // 2 + half[:, None] < K // 2), other=0)
            scales = tl.load(w_scales + start // 32,
                             mask=has_col[:, None] & (start // 32 + block[None, :] < K // 32),
                             other=0)
            acc = tl.dot_scaled(x, None, "bf16", codes, scales, "e2m1", acc)
    else:
        w = w_ptr + (expert * N + col)[None, :] * K + k[:, None]
        for start in range(0, K, BLOCK_K):
            x = tl.load(a + start, mask=has_row[:, None], other=0.0)
            y = tl.load(w + start, mask=has_col[None, :], other=0.0)
            if MODE == "fp8_block":
                x_scale = tl.load(a_scales_ptr + row * (K // 128) + start // 128, mask=has_row,
                                  other=0.0)
                y_scale = tl.load(w_scales_ptr + (expert * (N // 128) + block_n * BLOCK_N // 128)
                                  * (K // 128) + start // 128)
                acc += tl.dot(x, y) * (x_scale * y_scale)[:, None]
            else:
                acc += tl.dot(x, y)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + expert * N + col, mask=has_col, other=0.0).to(tl.float32)[None, :]
    tl.store(out_ptr + slot[:, None] * N + col[None, :], acc.to(tl.bfloat16),
             mask=has_row[:, None] & has_col[None, :])


@triton.jit
def swiglu_kernel(x_ptr, values_ptr, scales_ptr, num_groups, INTER: tl.constexpr,
                  WIDTH: tl.constexpr, GROUPS: tl.constexpr, IS_FP8: tl.constexpr,
                  IS_GPT_OSS: tl.constexpr):
    """Gate, then up, of a slot; WIDTH divides INTER and is 128 for E4M3 results."""
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    mask = (group < num_groups)[:, None]
    slot = group // (INTER // WIDTH)
    cols = (group % (INTER // WIDTH))[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    x = x_ptr + slot[:, None] * (2 * INTER) + cols
    gate = tl.load(x, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + INTER, mask=mask, other=0.0).to(tl.float32)
    if IS_GPT_OSS:
        gate = tl.minimum(gate, 7.0)
        h = gate * tl.sigmoid(1.702 * gate) * (tl.clamp(up, -7.0, 7.0) + 1.0)
    else:
        h = gate * tl.sigmoid(gate) * up
    out = slot[:, None] * INTER + cols
    if IS_FP8:
        multiplier = 448.0 / tl.maximum(tl.max(tl.abs(h), axis=1), 1e-20)
        tl.store(values_ptr + out, (h * multiplier[:, None]).to(tl.float8e4nv), mask=mask)
        tl.store(scales_ptr + group, 1.0 / multiplier, mask=group < num_groups)
    else:
        tl.store(values_ptr + out, h.to(tl.bfloat16), mask=mask)


@triton.jit
def combine_kernel(y_ptr, weights_ptr, rows_ptr, out_ptr, HIDDEN: tl.constexpr,
                   TOP_K: tl.constexpr, BLOCK: tl.constexpr, HAS_ROWS: tl.constexpr):
    """The row of a slot is rows_ptr's, or the slot itself."""
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = col < HIDDEN
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for s in tl.static_range(TOP_K):
        slot = token * TOP_K + s
        weight = tl.load(weights_ptr + slot)
        row = tl.load(rows_ptr + slot).to(tl.int64) if HAS_ROWS else slot
        total += weight * tl.load(y_ptr + row * HIDDEN + col, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * HIDDEN + col, total.to(tl.bfloat16), mask=mask)


def combine(y, weights, out, rows=None):
    """out[token] = the weighted sum of its slots' rows of y."""
    tokens, hidden = out.shape
    combine_kernel[(tokens, triton.cdiv(hidden, 1024))](
        y, weights, weights if rows is None else rows, out, HIDDEN=hidden, TOP_K=weights.shape[1],
        BLOCK=1024, HAS_ROWS=rows is not None)
    return out
