"""Quantizers, dequantization, layouts of scales, maxima."""

from __future__ import annotations

from typing import Any, Unpack

import numpy as np

from narrowfloat import _core
from narrowfloat._arrays import Array, is_torch, maker_of, shape_of, to_core
from narrowfloat._options import PARTIAL, QuantizeOptions, global_scale_axis, to_core_options
from narrowfloat._quantized import QuantizedTensor, alignment_of, new_tensor, scales_shape


def prepare_output(
    shape: tuple[int, ...],
    format: str | None,
    layout: str | None,
    batched: bool,
    alignment: int | None,
    out: QuantizedTensor | None,
    options: QuantizeOptions,
    like: tuple[str, Any],
) -> QuantizedTensor:
    """`out`, if it is what the other arguments ask for, or a new tensor of the kind of `like`.

    like: name and value of the argument that decides where the result lies.
    """
    if out is None:
        offsets = options.get("row_offsets")
        if format is None:
            raise ValueError("format: give it, or give out")
        return new_tensor(
            shape,
            format,
            layout=layout,
            batched=batched,
            alignment=32 if alignment is None else alignment,
            groups=0 if offsets is None else shape_of("row_offsets", offsets)[0] - 1,
            global_scale_axis=global_scale_axis(format, options),
            like=maker_of(*like),
            is_zeroed=any(options.get(name) is not None for name in PARTIAL),
        )
    _require_quantized("out", out)
    for argument, asked, given in (("format", format, out.format),
                                   ("layout", layout, out.scale_layout)):  # fmt: skip
        if asked is not None and asked != given:
            raise ValueError(f"out: its {argument} is {given}, but {asked} is asked for")
    if batched and out.layout.batch != int(np.prod(shape[:-2])):
        raise ValueError(f"out: has {out.layout.batch} batches, the input {shape[:-2]}")
    if alignment is not None:
        raise ValueError("alignment: out has its own; leave it unset")
    if shape[-1] != out.layout.cols:
        raise ValueError(f"out: expected {shape[-1]} columns, got {out.layout.cols}")
    return out


def _require_quantized(argument: str, tensor: Any) -> None:
    if not isinstance(tensor, QuantizedTensor):
        raise TypeError(f"{argument}: expected a QuantizedTensor, got {type(tensor).__name__}")


def finish_output(target: QuantizedTensor, options: QuantizeOptions) -> QuantizedTensor:
    """The facts of a call that the tensor it filled must keep."""
    target._row_offsets = options.get("row_offsets")
    return target


def _is_contiguous(array: Any) -> bool:
    if isinstance(array, np.ndarray):
        return array.flags.c_contiguous
    return is_torch(array) and array.is_contiguous()


def quantize(
    input: Any,
    format: str | None = None,
    *,
    layout: str | None = None,
    batched: bool = False,
    alignment: int | None = None,
    out: QuantizedTensor | None = None,
    **options: Unpack[QuantizeOptions],
) -> QuantizedTensor:
    """Quantizes a tensor.

    input: float32, float16, bfloat16 (FP4 formats also float8_e4m3fn) [..., cols]; any row stride.
    format: one of formats(); may be left out where `out` says it.
    layout: one of layouts() that the format allows; default: the format's.
    batched: the axes before the last two are batches with scales of their own.
    alignment: mxfp8; value columns are padded to a multiple of it. Default 32.
    out: written to instead of new arrays (QuantizedTensor.empty()).
    options: QuantizeOptions.
    """
    shape = shape_of("input", input)
    like = ("input", input)
    target = prepare_output(shape, format, layout, batched, alignment, out, options, like)
    _core.quantize(to_core("input", input), target._buffers, to_core_options(options))
    return finish_output(target, options)


def silu_mul_quantize(
    gate_up: Any,
    format: str | None = None,
    *,
    layout: str | None = None,
    batched: bool = False,
    alignment: int | None = None,
    out: QuantizedTensor | None = None,
    **options: Unpack[QuantizeOptions],
) -> QuantizedTensor:
    """Quantizes silu(gate) * up, rounded to the input's type.

    gate_up: float16 or bfloat16 [..., 2 * cols]; the first half of a row is the gate. Other
    arguments: quantize().
    """
    shape = shape_of("gate_up", gate_up)
    if shape[-1] % 2:
        raise ValueError(f"gate_up: expected an even number of columns, got {shape[-1]}")
    shape = (*shape[:-1], shape[-1] // 2)
    like = ("gate_up", gate_up)
    target = prepare_output(shape, format, layout, batched, alignment, out, options, like)
    core_options = to_core_options(options)
    _core.silu_mul_quantize(to_core("gate_up", gate_up), target._buffers, core_options)
    return finish_output(target, options)


def smooth_quantize(
    input: Any,
    smooth: Any,
    format: str | None = None,
    *,
    layout: str | None = None,
    batched: bool = False,
    alignment: int | None = None,
    out: QuantizedTensor | None = None,
    **options: Unpack[QuantizeOptions],
) -> QuantizedTensor:
    """Quantizes input * smooth, rounded to bfloat16.

    input: bfloat16 [..., cols]. smooth: bfloat16 [cols]. Other arguments: quantize().
    """
    shape = shape_of("input", input)
    like = ("input", input)
    target = prepare_output(shape, format, layout, batched, alignment, out, options, like)
    core_options = to_core_options(options)
    factors = to_core("smooth", smooth)
    _core.smooth_quantize(to_core("input", input), factors, target._buffers, core_options)
    return finish_output(target, options)


def dequantize(
    input: QuantizedTensor,
    dtype: Any = "float32",
    *,
    out: Array | None = None,
    global_scale_divides: bool = False,
) -> Array:
    """The numbers of a quantized tensor, [..., cols].

    dtype: float32, float16 or bfloat16, of the new array. out: written to instead, of any row
    stride; its type counts, not `dtype`.
    global_scale_divides: the global scale is a divisor, as compressed-tensors files store it.
    """
    _require_quantized("input", input)
    if out is None:
        out = maker_of("input", input.values).empty(input.shape, dtype)
    target = to_core("out", out)
    _core.dequantize(input._buffers, target, global_scale_divides, input.row_offsets)
    return out


def relayout(
    input: QuantizedTensor, layout: str, *, out: Array | None = None
) -> QuantizedTensor:
    """The same tensor with its scales in another layout that the format allows.

    The result shares values and global scale with the input. out: array for the scales, of as many
    elements as quantized_layout(...).scale_count says.
    """
    _require_quantized("input", input)
    if input.row_offsets is not None:
        raise ValueError("input: has groups of rows, which are stored in layout mn_major only")
    old = input.layout
    alignment = alignment_of(old.format, old.cols, old.value_cols)
    sizes = _core.quantized_layout(
        old.format,
        old.rows,
        old.cols,
        scale_layout=layout,
        batch=old.batch,
        alignment=alignment,
        global_scale_axis=old.global_scale_axis,
    )
    if out is None:
        lead = input.shape[:-2] if old.batch != 1 else ()
        dtype = "float32" if sizes.scale_type == "F32" else "uint8"
        out = maker_of("input", input.scales).empty(scales_shape(sizes, lead), dtype)
    _core.relayout(input._buffers, sizes, to_core("out", out))
    return QuantizedTensor(input.values, out, input.global_scale, sizes, input.shape)


def amax(
    input: Any, *, per_row: bool = False, out: Array | None = None
) -> Array:
    """Largest magnitude that is a number; 0 if there is none.

    input: float32, float16 or bfloat16 [..., cols]. Gives float32 [1], or with per_row one for each
    row, [...].
    """
    shape = shape_of("input", input)
    if out is None:
        out = maker_of("input", input).empty(shape[:-1] if per_row else (1,), "float32")
    flat = out
    if len(out.shape) != 1 and _is_contiguous(out):
        flat = out.reshape(-1)
    _core.amax(to_core("input", input), flat, per_row)
    return out
