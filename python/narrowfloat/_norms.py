"""RMSNorm and add + RMSNorm, fused with quantization."""

from __future__ import annotations

from typing import Any, Unpack

from narrowfloat import _core
from narrowfloat._arrays import Array, codes_to_core, shape_of, to_core
from narrowfloat._operations import finish_output, prepare_output
from narrowfloat._options import QuantizeOptions, to_core_options
from narrowfloat._quantized import QuantizedTensor, alignment_of


def _norm_options(
    target: QuantizedTensor,
    eps: float,
    norm_output: Any,
    extra_layout: str | None,
    extra_scales: Any,
) -> _core.RmsNormOptions:
    norm = _core.RmsNormOptions(eps)
    if norm_output is not None:
        norm.set_norm_output(to_core("norm_output", norm_output))
    if (extra_layout is None) != (extra_scales is None):
        raise ValueError("extra_scales: give both it and extra_layout, or none of them")
    if extra_scales is not None:
        sizes = target.layout
        extra = _core.quantized_layout(
            sizes.format,
            sizes.rows,
            sizes.cols,
            scale_layout=extra_layout,
            batch=sizes.batch,
            alignment=alignment_of(sizes.format, sizes.cols, sizes.value_cols),
        )
        norm.set_extra_scales(extra, codes_to_core("extra_scales", extra_scales))
    return norm


def rmsnorm_quantize(
    input: Any,
    weight: Any,
    format: str | None = None,
    *,
    eps: float = 1e-6,
    norm_output: Array | None = None,
    extra_layout: str | None = None,
    extra_scales: Array | None = None,
    layout: str | None = None,
    batched: bool = False,
    out: QuantizedTensor | None = None,
    **options: Unpack[QuantizeOptions],
) -> QuantizedTensor:
    """Quantizes rmsnorm(input) * weight, rounded to the input's type.

    input: float16 or bfloat16 [..., cols], cols >= 64. weight: of the same type, [cols].
    norm_output: array of the input's type [..., cols] that the normalised tensor is written to.
    extra_layout, extra_scales: the same scales in a second layout are written to the array, which
        has as many elements as quantized_layout(...).scale_count says.
    Other arguments: quantize().
    """
    shape = shape_of("input", input)
    target = prepare_output(shape, format, layout, batched, None, out, options, ("input", input))
    norm = _norm_options(target, eps, norm_output, extra_layout, extra_scales)
    factors = to_core("weight", weight)
    core_options = to_core_options(options)
    _core.rmsnorm_quantize(to_core("input", input), factors, target._buffers, norm, core_options)
    return finish_output(target, options)


def add_rmsnorm_quantize(
    input: Any,
    residual: Any,
    weight: Any,
    format: str | None = None,
    *,
    eps: float = 1e-6,
    norm_output: Array | None = None,
    extra_layout: str | None = None,
    extra_scales: Array | None = None,
    layout: str | None = None,
    batched: bool = False,
    out: QuantizedTensor | None = None,
    **options: Unpack[QuantizeOptions],
) -> QuantizedTensor:
    """As rmsnorm_quantize() of input + residual, rounded; the sum is stored to `residual`."""
    shape = shape_of("input", input)
    target = prepare_output(shape, format, layout, batched, None, out, options, ("input", input))
    norm = _norm_options(target, eps, norm_output, extra_layout, extra_scales)
    _core.add_rmsnorm_quantize(
        to_core("input", input),
        to_core("residual", residual),
        to_core("weight", weight),
        target._buffers,
        norm,
        to_core_options(options),
    )
    return finish_output(target, options)
