"""Which implementation an operation would use, and why not the others."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from narrowfloat import _core
from narrowfloat._arrays import extents_of


def explain(
    op: str,
    shape: Sequence[int],
    format: str = "nvfp4",
    *,
    layout: str | None = None,
    dtype: str = "bfloat16",
    math: str = "exact",
    device: str = "cpu",
    batched: bool = False,
) -> _core.Explanation:
    """Which implementation a call would use. Nothing is computed.

    op: one of operations(). shape: of the tensor, [..., cols]. format: counts for quantize,
        dequantize, relayout and amax.
    dtype: of the high-precision side: bfloat16, float16, float32 or float8_e4m3fn.
    device: "cpu", "cuda" or "cuda:N". Layers have MoeLayer.explain().
    """
    shape = extents_of("shape", shape)
    if batched and len(shape) < 3:
        raise ValueError(f"batched: needs at least three axes, got shape {tuple(shape)}")
    batch = prod(shape[:-2]) if batched else 1
    rows = shape[-2] if batched else prod(shape[:-1])
    return _core.explain(op, (batch, rows, shape[-1]), format, layout, dtype, math, device)
