"""FlashInfer's RMSNorm + FP4 quantization."""

from __future__ import annotations

from math import prod
from typing import Any

import narrowfloat as nf
from narrowfloat._arrays import maker_of
from narrowfloat.compat.flashinfer._arrays import copy_into, output_bytes, scale_of


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


class _Outputs:
    """Outputs that a caller may have given: looked at before anything is written."""

    def __init__(self, y_fp4: Any, block_scale: Any) -> None:
        self._given = y_fp4, block_scale
        self._codes = None if y_fp4 is None else output_bytes("y_fp4", y_fp4)
        self._scales = None if block_scale is None else output_bytes("block_scale", block_scale)

    def filled(self, q: nf.QuantizedTensor, layout: str) -> tuple[Any, Any]:
        """Codes and scales, where they are wanted."""
        blocks = q.layout.scale_blocks
        scales = q.scales.reshape((*q.shape[:-1], blocks) if layout == "linear" else (-1,))
        found = [q.values, scales]
        if self._codes is not None:
            copy_into("y_fp4", self._codes, q.values)
            found[0] = self._given[0]
        if self._scales is not None:
            copy_into("block_scale", self._scales.reshape(scales.shape), scales)
            found[1] = self._given[1]
        return found[0], found[1]


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
) -> tuple[Any, Any]:
    """(codes, scales) of rmsnorm(input) * weight.

    input: float16 or bfloat16 [..., K], K at least 64. weight: the same type, [K].
    y_fp4: uint8 [..., K / 2]; block_scale: bytes of the scales. Written to where given.
    global_scale: float, or float32 [1]; an encode scale, default 1; NVFP4 only. eps: float.
    block_size, scale_format: 16 and "e4m3" (NVFP4), 32 and "ue8m0" (MXFP4); the format may be None.
    is_sf_swizzled_layout: scales as a flat 128x4 image, else linear [..., K / block_size].
    enable_pdl: changes nothing. NotImplementedError for e4m3 scales of 32.
    """
    format = _format_of(block_size, scale_format)
    outputs = _Outputs(y_fp4, block_scale)
    layout = "swizzled_128x4" if is_sf_swizzled_layout else "linear"
    options = {}
    if format == "nvfp4":
        options["encode_scale"] = scale_of(1.0 if global_scale is None else global_scale, input)
    q = nf.rmsnorm_quantize(input, weight, format, eps=eps, layout=layout, **options)
    return outputs.filled(q, layout)


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
) -> Any:
    """rmsnorm_fp4quant() of input + residual, which `residual` becomes: (codes, scales).

    residual: type and shape of the input. y_out: the same; the normalised tensor, written to.
    output_both_sf_layouts: scales swizzled, and a third result: linear, uint8 [..., K /
        block_size]. block_scale_unswizzled: where to write it.
    weight, y_fp4, block_scale, global_scale, eps, block_size, scale_format, is_sf_swizzled_layout,
    enable_pdl: as rmsnorm_fp4quant() has them.
    """
    format = _format_of(block_size, scale_format)
    outputs = _Outputs(y_fp4, block_scale)
    layout = "swizzled_128x4" if is_sf_swizzled_layout or output_both_sf_layouts else "linear"
    options: dict[str, Any] = {}
    if format == "nvfp4":
        options["encode_scale"] = scale_of(1.0 if global_scale is None else global_scale, input)
    if y_out is not None:
        options["norm_output"] = y_out
    linear = None
    if output_both_sf_layouts:
        shape = (*input.shape[:-1], input.shape[-1] // block_size)
        linear = block_scale_unswizzled
        if linear is None:
            linear = maker_of("input", input).empty(shape, "uint8")
        flat = output_bytes("block_scale_unswizzled", linear).reshape(prod(shape))
        options |= {"extra_layout": "linear", "extra_scales": flat}
    q = nf.add_rmsnorm_quantize(input, residual, weight, format, eps=eps, layout=layout, **options)
    parts = outputs.filled(q, layout)
    return parts if linear is None else (*parts, linear)
