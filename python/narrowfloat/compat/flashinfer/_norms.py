"""FlashInfer's RMSNorm + FP4 quantization, with the additional keywords of the quantizers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from math import prod
from typing import Any

import narrowfloat as nf
from narrowfloat import _core
from narrowfloat._arrays import is_torch, maker_of
from narrowfloat._options import MathMode, global_scale_axis
from narrowfloat.compat.flashinfer._arguments import accepts, check_array
from narrowfloat.compat.flashinfer._arrays import (
    address_of,
    as_type,
    copy_into,
    dtype_name,
    is_on_gpu,
    move_scales,
    output_bytes,
)
from narrowfloat.compat.flashinfer._errors import AssertedError
from narrowfloat.compat.flashinfer._modes import names_of, norm_options
from narrowfloat.compat.flashinfer._wide_blocks import quantize_wide_blocks

# The library's names of the arguments of the functions here.
_NAMES = names_of("input", "global_scale") | {
    "norm.eps": "eps",
    "norm.norm_output": "y_out",
    "norm.extra_scales": "block_scale_unswizzled",
    "output.values": "y_fp4",
    "output.scales": "block_scale",
}


def _format_of(block_size: int, scale_format: str | None) -> str:
    """nvfp4, mxfp4, or "wide": E4M3 scales of 32."""
    known = {(16, None): "nvfp4", (16, "e4m3"): "nvfp4", (32, None): "mxfp4",
             (32, "ue8m0"): "mxfp4", (32, "e4m3"): "wide"}  # fmt: skip
    format = known.get((block_size, scale_format))
    if format is None:
        raise AssertedError(
            f"block_size: block_size must be 16 or 32, and scales e4m3, or ue8m0 with 32; got "
            f"{block_size} and {scale_format}"
        )
    return format


def _check_columns(input: Any, block_size: int) -> None:
    """AssertedError for rows that are no whole blocks, or too short."""
    cols = input.shape[-1]
    if cols % block_size or cols < 64:
        raise AssertedError(
            f"input: columns: hidden_size must be divisible by block_size {block_size} and be >= "
            f"64, got {cols}"
        )


def _check_y_out(y_out: Any, input: Any) -> None:
    """AssertedError unless it is an array like the input, at an address of 16 bytes on a GPU."""
    check_array("y_out", y_out)
    if tuple(y_out.shape) != tuple(input.shape) or dtype_name(y_out) != dtype_name(input):
        raise AssertedError(
            f"y_out: expected {dtype_name(input)} {tuple(input.shape)}, which must match the "
            f"input, got {dtype_name(y_out)} {tuple(y_out.shape)}"
        )
    if is_on_gpu(y_out) and address_of(y_out) % 16:
        raise AssertedError(
            "y_out: must be 16-byte aligned (16B-aligned), got the address "
            f"{address_of(y_out):#x}"
        )


class _Output:
    """An array that the caller gets, and may have given, and the one that the library writes."""

    def __init__(self, argument: str, given: Any, shape: tuple[int, ...], like: Any,
                 dtype: str, any_shape: bool = True) -> None:  # fmt: skip
        self._argument, self._given, self._bytes = argument, given, None
        self._dtype = dtype
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
            return as_type(self.memory, self._dtype)
        if self.memory is not self._bytes:
            copy_into(self._argument, self._bytes.reshape(self.memory.shape), self.memory)
        return self._given


def _codes_type(input: Any) -> str:
    """The type of new codes: torch's for two of them a byte; NumPy has none."""
    has_type = is_torch(input) and hasattr(sys.modules["torch"], "float4_e2m1fn_x2")
    return "float4_e2m1fn_x2" if has_type else "uint8"


def _scales_type(format: str) -> str:
    return "uint8" if format == "mxfp4" else "float8_e4m3fn"


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
    codes = _Output("y_fp4", y_fp4, (*lead, cols // 2), input, _codes_type(input), any_shape=False)
    scales = _Output("block_scale", block_scale, shape, input, _scales_type(format))
    factors = None
    if sizes.global_scales:
        factors = maker_of("input", input).empty((sizes.global_scales,), "float32")
    target = nf.QuantizedTensor(codes.memory, scales.memory, factors, sizes, input.shape)
    return target, (codes, scales)


def _wide(norm: Callable[..., Any], input: Any, swizzled: bool, both: bool, given: tuple[Any, ...],
          options: dict[str, Any]) -> tuple[Any, ...]:  # fmt: skip
    """The results for E4M3 scales of 32 elements, in steps: the norm, then the quantizer.

    norm: gets an array for the normalised tensor. given: codes, scales and linear scales, or None.
    """
    *lead, cols = input.shape
    rows, blocks = prod(lead), cols // 32
    sizes = _core.quantized_layout("mxfp4", rows, cols, scale_layout="swizzled_128x4")
    image, plain = (sizes.scale_count,), (*lead, blocks)
    parts = [_Output("y_fp4", given[0], (*lead, cols // 2), input, _codes_type(input), False),
             _Output("block_scale", given[1], image if swizzled or both else plain, input,
                     "float8_e4m3fn")]  # fmt: skip
    if both:
        parts.append(_Output("block_scale_unswizzled", given[2], plain, input, "float8_e4m3fn"))
    y = maker_of("input", input).empty(tuple(input.shape), dtype_name(input))
    norm(y)
    codes, scales = quantize_wide_blocks(y.reshape(rows, cols), options)
    found = [codes, scales, scales]
    if swizzled or both:
        found[1] = move_scales(scales, rows, blocks, 1, "linear", "swizzled_128x4")
    for part, value in zip(parts, found, strict=False):
        part.memory.reshape(-1)[...] = value.reshape(-1)
    return tuple(part.result() for part in parts)


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

    New codes are float4_e2m1fn_x2 (of NumPy: uint8) [..., K / 2], new scales float8_e4m3fn (of
    MXFP4: uint8).

    input: float16 or bfloat16 [..., K], K at least 64. weight: the same type, [K].
    y_fp4: uint8 [..., K / 2]; block_scale: bytes of the scales. Written to where given.
    global_scale: float, or float32 [1]; an encode scale, default 1; NVFP4 only. eps: float.
    block_size, scale_format: 16 and "e4m3" (NVFP4), 32 and "ue8m0" (MXFP4), whose format may be
        None; or 32 and "e4m3", in several steps.
    is_sf_swizzled_layout: flat scales in layout 128x4, else linear [..., K / block_size].
    enable_pdl: changes nothing. math, four_over_six: as fp4_quantize() has them.
    """
    format = _format_of(block_size, scale_format)
    _check_columns(input, block_size)
    layout = "swizzled_128x4" if is_sf_swizzled_layout else "linear"
    options = norm_options(format, math, global_scale, input, four_over_six)
    if format == "wide":
        def norm(y: Any) -> None:
            nf.rmsnorm_quantize(input, weight, "nvfp4", eps=eps, norm_output=y, **options)

        found = _wide(norm, input, is_sf_swizzled_layout, False, (y_fp4, block_scale), options)
        return found[0], found[1]
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
    output_both_sf_layouts: scales swizzled, and a third result: linear [..., K /
        block_size]. block_scale_unswizzled: where to write it; ValueError without.
    weight, y_fp4, block_scale, global_scale, eps, block_size, scale_format, is_sf_swizzled_layout,
    enable_pdl, math, four_over_six: as rmsnorm_fp4quant() has them.
    """
    format = _format_of(block_size, scale_format)
    if block_scale_unswizzled is not None and not output_both_sf_layouts:
        raise ValueError("block_scale_unswizzled: needs output_both_sf_layouts=True")
    layout = "swizzled_128x4" if is_sf_swizzled_layout or output_both_sf_layouts else "linear"
    _check_columns(input, block_size)
    options = norm_options(format, math, global_scale, input, four_over_six)
    if y_out is not None:
        _check_y_out(y_out, input)
    if format == "wide":
        def norm(y: Any) -> None:
            nf.add_rmsnorm_quantize(input, residual, weight, "nvfp4", eps=eps, norm_output=y,
                                    **options)  # fmt: skip
            if y_out is not None:
                copy_into("y_out", y_out, y)

        return _wide(norm, input, is_sf_swizzled_layout, output_both_sf_layouts,
                     (y_fp4, block_scale, block_scale_unswizzled), options)  # fmt: skip
    target, both = _outputs(input, format, layout, options, y_fp4, block_scale)
    parts = list(both)
    if y_out is not None:
        options["norm_output"] = y_out
    if output_both_sf_layouts:
        shape = (*input.shape[:-1], input.shape[-1] // block_size)
        parts.append(_Output("block_scale_unswizzled", block_scale_unswizzled, shape, input,
                             _scales_type(format)))  # fmt: skip
        options |= {"extra_layout": "linear", "extra_scales": parts[2].memory.reshape(-1)}
    nf.add_rmsnorm_quantize(input, residual, weight, format, eps=eps, out=target, **options)
    return tuple(part.result() for part in parts)
