"""FlashInfer's RMSNorm + FP4 quantization, with the additional keywords of the quantizers."""

from __future__ import annotations

from math import prod
from typing import Any

import narrowfloat as nf
from narrowfloat import _core
from narrowfloat._arrays import maker_of
from narrowfloat._options import MathMode, global_scale_axis
from narrowfloat.compat.flashinfer._arguments import accepts, check_array
from narrowfloat.compat.flashinfer._arrays import output_bytes
from narrowfloat.compat.flashinfer._modes import names_of, norm_options

# What the library calls the arguments of the functions here.
_NAMES = names_of("input", "global_scale") | {
    "norm.eps": "eps",
    "norm.norm_output": "y_out",
    "norm.extra_scales": "block_scale_unswizzled",
    "output.values": "y_fp4",
    "output.scales": "block_scale",
}


def _format_of(block_size: int, scale_format: str | None) -> str:
    known = {(16, None): "nvfp4", (16, "e4m3"): "nvfp4",
             (32, None): "mxfp4", (32, "ue8m0"): "mxfp4"}  # fmt: skip
    format = known.get((block_size, scale_format))
    if format is None:
        if (block_size, scale_format) == (32, "e4m3"):
            raise NotImplementedError(
                "scale_format: e4m3 with block_size 32 is not offered; ue8m0 is"
            )
        raise ValueError(f"block_size: no format has {block_size} with scales {scale_format}")
    return format


def _given_bytes(argument: str, array: Any, shape: tuple[int, ...], like: Any,
                 any_shape: bool = True) -> Any:  # fmt: skip
    """output_bytes() of what a caller gave, or new memory where that is None."""
    if array is None:
        return maker_of("input", like).empty(shape, "uint8")
    check_array(argument, array)
    return output_bytes(argument, array, shape, like, any_shape)


def _outputs(
    input: Any, format: str, layout: str, options: dict[str, Any], y_fp4: Any, block_scale: Any
) -> tuple[nf.QuantizedTensor, tuple[Any, Any]]:
    """What the library writes to, and the codes and scales that the caller gets.

    Arrays that the caller gave are judged here, before anything is written.
    """
    *lead, cols = input.shape
    sizes = _core.quantized_layout(
        format, prod(lead), cols, scale_layout=layout,
        global_scale_axis=global_scale_axis(format, options),
    )  # fmt: skip
    shape = (*lead, sizes.scale_blocks) if layout == "linear" else (sizes.scale_count,)
    codes = _given_bytes("y_fp4", y_fp4, (*lead, cols // 2), input, any_shape=False)
    scales = _given_bytes("block_scale", block_scale, shape, input)
    factors = None
    if sizes.global_scales:
        factors = maker_of("input", input).empty((sizes.global_scales,), "float32")
    parts = codes if y_fp4 is None else y_fp4, scales if block_scale is None else block_scale
    return nf.QuantizedTensor(codes, scales, factors, sizes, input.shape), parts


@accepts("input", "weight", names=_NAMES)
def rmsnorm_fp4quant(
    input: Any,
    weight: Any,
    y_fp4: Any = None,
    block_scale: Any = None,
    global_scale: Any = None,
    eps: float = 1e-6,
    block_size: int = 16,
    scale_format: str | None = None,
    is_sf_swizzled_layout: bool = False,
    enable_pdl: bool | None = None,
    *,
    math: MathMode | None = None,
    four_over_six: Any = None,
) -> tuple[Any, Any]:
    """(codes, scales) of rmsnorm(input) * weight.

    input: float16 or bfloat16 [..., K], K at least 64. weight: the same type, [K].
    y_fp4: uint8 [..., K / 2]; block_scale: bytes of the scales. Written to where given.
    global_scale: float, or float32 [1]; an encode scale, default 1; NVFP4 only. eps: float.
    block_size, scale_format: 16 and "e4m3" (NVFP4), 32 and "ue8m0" (MXFP4); the format may be None.
    is_sf_swizzled_layout: scales as a flat 128x4 image, else linear [..., K / block_size].
    enable_pdl: changes nothing. math, four_over_six: as fp4_quantize() has them.
    NotImplementedError for e4m3 scales of 32.
    """
    format = _format_of(block_size, scale_format)
    layout = "swizzled_128x4" if is_sf_swizzled_layout else "linear"
    options = norm_options(format, math, global_scale, input, four_over_six)
    target, parts = _outputs(input, format, layout, options, y_fp4, block_scale)
    nf.rmsnorm_quantize(input, weight, format, eps=eps, out=target, **options)
    return parts


@accepts("input", "residual", "weight", names=_NAMES)
def add_rmsnorm_fp4quant(
    input: Any,
    residual: Any,
    weight: Any,
    y_fp4: Any = None,
    block_scale: Any = None,
    global_scale: Any = None,
    eps: float = 1e-6,
    block_size: int = 16,
    scale_format: str | None = None,
    is_sf_swizzled_layout: bool = False,
    output_both_sf_layouts: bool = False,
    block_scale_unswizzled: Any = None,
    enable_pdl: bool | None = None,
    y_out: Any = None,
    *,
    math: MathMode | None = None,
    four_over_six: Any = None,
) -> Any:
    """rmsnorm_fp4quant() of input + residual, which `residual` becomes: (codes, scales).

    residual: type and shape of the input. y_out: the same; the normalised tensor, written to.
    output_both_sf_layouts: scales swizzled, and a third result: linear, uint8 [..., K /
        block_size]. block_scale_unswizzled: where to write it; ValueError without.
    weight, y_fp4, block_scale, global_scale, eps, block_size, scale_format, is_sf_swizzled_layout,
    enable_pdl, math, four_over_six: as rmsnorm_fp4quant() has them.
    """
    format = _format_of(block_size, scale_format)
    if block_scale_unswizzled is not None and not output_both_sf_layouts:
        raise ValueError("block_scale_unswizzled: needs output_both_sf_layouts=True")
    layout = "swizzled_128x4" if is_sf_swizzled_layout or output_both_sf_layouts else "linear"
    options = norm_options(format, math, global_scale, input, four_over_six)
    target, parts = _outputs(input, format, layout, options, y_fp4, block_scale)
    if y_out is not None:
        check_array("y_out", y_out)
        options["norm_output"] = y_out
    if output_both_sf_layouts:
        shape = (*input.shape[:-1], input.shape[-1] // block_size)
        linear = _given_bytes("block_scale_unswizzled", block_scale_unswizzled, shape, input)
        options |= {"extra_layout": "linear", "extra_scales": linear.reshape(-1)}
        unswizzled = linear if block_scale_unswizzled is None else block_scale_unswizzled
    nf.add_rmsnorm_quantize(input, residual, weight, format, eps=eps, out=target, **options)
    return (*parts, unswizzled) if output_both_sf_layouts else parts
