"""The same quantizers as plain PyTorch functions: what run.py gives to torch.compile, and, run as
they are on the CPU, what results of all peers are checked against.  `exact` mode for finite inputs
of ordinary size, as in triton_kernels.py.
"""

import torch

FL_SIXTH = 0.16666667163372039794921875  # fl(1/6)
E2M1_BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def quotient(a, b):
    """Rounded once: PyTorch computes number / tensor as number * (1 / tensor)."""
    return torch.full_like(b, a) / b


def e2m1_codes(value):
    a = value.abs()
    code = torch.zeros_like(value, dtype=torch.uint8)
    for position, bound in enumerate(E2M1_BOUNDS):
        # Ties go to even codes: those above a bound at an odd position.
        code = code + (a > bound if position % 2 == 0 else a >= bound).to(torch.uint8)
    return code | (torch.signbit(value).to(torch.uint8) << 3)


def nvfp4(x, encode, decode):
    blocks = x.float().view(-1, 16)
    amax = blocks.abs().amax(dim=1)
    scale = (amax * (encode * FL_SIXTH)).to(torch.float8_e4m3fn)
    inverse = quotient(1.0, scale.float() * decode)
    pairs = e2m1_codes(blocks * inverse[:, None]).view(-1, 8, 2)
    codes = pairs[:, :, 0] | (pairs[:, :, 1] << 4)
    return codes, scale


def mxfp8(x):
    blocks = x.float().view(-1, 32)
    bits = (blocks.abs().amax(dim=1) / 448.0).view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(torch.int32)
    inverse = ((254 - exponent) << 23).view(torch.float32)
    return (blocks * inverse[:, None]).to(torch.float8_e4m3fn), exponent.to(torch.uint8)


def fp8_1x128(x):
    rows, cols = x.shape
    blocks = x.float().view(rows, cols // 128, 128)
    multiplier = quotient(448.0, blocks.abs().amax(dim=2))
    values = (blocks * multiplier[:, :, None]).to(torch.float8_e4m3fn)
    return values.view(rows, cols), quotient(1.0, multiplier).t().contiguous()


def swiglu_fp8(x, x_scales):
    """All rows in order: PyTorch has no way to skip rows at -1 without a copy."""
    rows, cols = x.shape
    inter = cols // 2
    values = x.float().view(rows, cols // 128, 128) * x_scales.t()[:, :, None]
    up, gate = values[:, :inter // 128], values[:, inter // 128:]
    h = gate * torch.sigmoid(gate) * up
    amax = h.abs().amax(dim=2)
    multiplier = torch.where(amax > 0, quotient(448.0, amax), 1.0)
    codes = (h * multiplier[:, :, None]).to(torch.float8_e4m3fn)
    return codes.view(rows, inter), quotient(1.0, multiplier).t().contiguous()
