"""FlashInfer's RMSNorm + FP4 quantization, with the additional keywords of the quantizers."""

from __future__ import annotations

from math import prod
from typing import Any

import narrowfloat as nf
from narrowfloat import _core
from narrowfloat._arrays import maker_of
from narrowfloat._options import MathMode, global_scale_axis
from narrowfloat.compat.flashinfer._arguments import accepts, check_array
from narrowfloat.compat.flashinfer._arrays import address_of, copy_into, output_bytes
from narrowfloat.compat.flashinfer._modes import names_of, norm_options

# The library's names of the arguments of the functions here.
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


class _Output:
    """An array that the caller gets, and may have given, and the one that the library writes."""

    def __init__(self, argument: str, given: Any, shape: tuple[int, ...], like: Any,
                 any_shape: bool = True) -> None:  # fmt: skip
        self._argument, self._given, self._bytes = argument, given, None
        if given is not None:
            check_array(argument, given)
            self._bytes = output_bytes(argument, given, shape, like, any_shape)
        if self._bytes is not None and address_of(self._bytes) % 16 == 0:
            self.memory = self._bytes
        else:  # Kernels store 16 bytes at a time, to multiples of 16.
            self.memory = maker_of("input", like).empty(shape, "uint8")

    def result(self) -> Any:
        """The array, once the library has written."""
        if self._bytes is None:
            return self.memory
        if self.memory is not self._bytes:
            copy_into(self._argument, self._bytes.reshape(self.memory.shape), self.memory)
        return self._given


def _outputs(
    input: Any, format: str, layout: str, options: dict[str, Any], y_fp4: Any, block_scale: Any
) -> tuple[nf.QuantizedTensor, tuple[_Output, _Output]]:
    """The arrays that the library writes to, and the codes and scales that the caller gets.

    Arrays that the caller gave are judged here, before anything is written.
    """
    *lead, cols = input.shape
    sizes = _core.quantized_layout(
        format, prod(lead), cols, scale_layout=layout,
        global_scale_axis=global_scale_axis(format, options),
    )  # fmt: skip
    shape = (*lead, sizes.scale_blocks) if layout == "linear" else (sizes.scale_count,)
    codes = _Output("y_fp4", y_fp4, (*lead, cols // 2), input, any_shape=False)
    scales = _Output("block_scale", block_scale, shape, input)
    factors = None
    if sizes.global_scales:
        factors = maker_of("input", input).empty((sizes.global_scales,), "float32")
    target = nf.QuantizedTensor(codes.memory, scales.memory, factors, sizes, input.shape)
    return target, (codes, scales)


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
    is_sf_swizzled_layout: flat scales in layout 128x4, else linear [..., K / block_size].
    enable_pdl: changes nothing. math, four_over_six: as fp4_quantize() has them.
    NotImplementedError for e4m3 scales of 32.
    """
    format = _format_of(block_size, scale_format)
    layout = "swizzled_128x4" if is_sf_swizzled_layout else "linear"
    options = norm_options(format, math, global_scale, input, four_over_six)
    target, parts = _outputs(input, format, layout, options, y_fp4, block_scale)
    nf.rmsnorm_quantize(input, weight, format, eps=eps, out=target, **options)
    return parts[0].result(), parts[1].result()


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
    target, both = _outputs(input, format, layout, options, y_fp4, block_scale)
    parts = list(both)
    if y_out is not None:
        check_array("y_out", y_out)
        options["norm_output"] = y_out
    if output_both_sf_layouts:
        shape = (*input.shape[:-1], input.shape[-1] // block_size)
        parts.append(_Output("block_scale_unswizzled", block_scale_unswizzled, shape, input))
        options |= {"extra_layout": "linear", "extra_scales": parts[2].memory.reshape(-1)}
    nf.add_rmsnorm_quantize(input, residual, weight, format, eps=eps, out=target, **options)
    return tuple(part.result() for part in parts)
