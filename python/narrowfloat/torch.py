"""Operators of torch: `torch.ops.narrowfloat.*`, with schemas and shape functions.

    import narrowfloat.torch as nft

    values, scales, global_scale = nft.quantize(x, "nvfp4")
    y = nft.dequantize(values, scales, global_scale, "nvfp4", x.shape)

They trace under torch.compile without graph breaks and can be captured into CUDA graphs. The
functions of this module are the operators with defaults and `out=`; tensors of formats without a
global scale have one of no elements. The operators of 8-bit groups, KV caches, shuffles, bits,
permute and combine are `torch.ops.narrowfloat.*` alone. No operator has a derivative. Results are
those of the functions of `narrowfloat` of the same name, to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal, TypedDict, Unpack

import torch

import narrowfloat as nf
from narrowfloat import (
    _core,
    _torch_layouts,  # noqa: F401: it defines operators.
)
from narrowfloat._options import PARTIAL
from narrowfloat._options import global_scale_axis as _axis
from narrowfloat._quantized import _rebuilt
from narrowfloat._shapes import FORMATS, buffer_shapes, grouped_scales, product
from narrowfloat._streams import allocating_on
from narrowfloat._torch_allreduce import AllReduce, AllReduceTensors
from narrowfloat._torch_expert_parallel import ExpertParallel
from narrowfloat._torch_library import library as _library
from narrowfloat._torch_library import register as _register
from narrowfloat._torch_linear import Linear
from narrowfloat._torch_moe import Moe, route

__all__ = ["AllReduce", "AllReduceTensors", "ExpertParallel", "Linear", "Moe", "Options",
           "Quantized", "add_rmsnorm_quantize", "amax", "dequantize", "quantize", "relayout",
           "rmsnorm_quantize", "route", "silu_mul_quantize", "smooth_quantize"]  # fmt: skip

Quantized = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

# torch.load() makes these without weights_only=False.
torch.serialization.add_safe_globals([nf.QuantizedTensor, _rebuilt])


class Options(TypedDict, total=False):
    """Keywords of all quantizers: those of narrowfloat.QuantizeOptions, and of the layout.

    encode_scale: float32 [1], [rows] or (with valid_rows) [batch], a tensor. base_decode_scale: a
        number, or float32 [1].
    row_list, valid_rows: int32 tensors; row_offsets: int64. What a call leaves alone is 0 in new
        results.
    batched: the axes before the last two are batches. alignment: mxfp8.
    """

    encode_scale: torch.Tensor
    math: Literal["exact", "fast"]
    mx_scale: Literal["up", "floor", "even"]
    four_over_six: nf.FourOverSix
    base_decode_scale: float | torch.Tensor
    row_list: torch.Tensor
    fp8_rule: Literal["reciprocal", "reciprocal_pow2", "amax_div", "pow2_ceil"]
    fp8_eps: float
    fp8_decode_scale: float
    valid_rows: torch.Tensor
    row_offsets: torch.Tensor
    batched: bool
    alignment: int


# Schemas. A quantized tensor goes in and out as values, scales, global_scale.
# four_over_six: its three fields with blanks between them. "" and None: not given.
_HOW = 'str format, str layout="", *, Tensor? encode_scale=None, str math="exact", ' \
    'str mx_scale="up", bool batched=False, int alignment=32, str four_over_six="", ' \
    'float? base_decode_scale=None, Tensor? base_decode_scales=None, Tensor? row_list=None, ' \
    'str fp8_rule="", float? fp8_eps=None, float? fp8_decode_scale=None, ' \
    'Tensor? valid_rows=None, Tensor? row_offsets=None'  # fmt: skip
_NORM = ', Tensor(n!)? norm_output=None, str extra_layout="", Tensor(e!)? extra_scales=None'
_OUT = "Tensor(a!) values, Tensor(b!) scales, Tensor(c!) global_scale"
_SHAPE = "str format, SymInt[] shape, str layout, bool batched, int alignment"
_BACK = '*, Tensor? row_offsets=None, bool global_scale_divides=False, str global_scale_axis=""'
_TENSORS = "(Tensor values, Tensor scales, Tensor global_scale)"


def _quantized_schemas(name: str, inputs: str, more: str = "") -> tuple[str, str]:
    return (f"{name}({inputs}, {_HOW}{more}) -> {_TENSORS}",
            f"{name}_out({inputs}, {_HOW}{more}, {_OUT}) -> ()")  # fmt: skip


for _schema in (
    *_quantized_schemas("quantize", "Tensor input"),
    *_quantized_schemas("silu_mul_quantize", "Tensor gate_up"),
    *_quantized_schemas("smooth_quantize", "Tensor input, Tensor smooth"),
    *_quantized_schemas("rmsnorm_quantize", "Tensor input, Tensor weight, float eps", _NORM),
    *_quantized_schemas("add_rmsnorm_quantize",
                        "Tensor input, Tensor(r!) residual, Tensor weight, float eps", _NORM),
    f"dequantize(Tensor values, Tensor scales, Tensor global_scale, {_SHAPE}, ScalarType dtype,"
    f" {_BACK}) -> Tensor",
    f"dequantize_out(Tensor values, Tensor scales, Tensor global_scale, {_SHAPE}, Tensor(a!) out,"
    f" {_BACK}) -> ()",
    f"relayout(Tensor scales, {_SHAPE}, str to) -> Tensor",
    f"relayout_out(Tensor scales, {_SHAPE}, str to, Tensor(a!) out) -> ()",
    "amax(Tensor input, bool per_row) -> Tensor",
    "amax_out(Tensor input, bool per_row, Tensor(a!) out) -> ()",
):  # fmt: skip
    _library.define(_schema)


def _scale_type(format: str) -> torch.dtype:
    return torch.float32 if format.startswith("fp8") else torch.uint8


def _new_buffers(
    input: torch.Tensor, shape: Sequence[Any], format: str, layout: str, how: dict[str, Any]
) -> Quantized:
    if format not in FORMATS:
        raise ValueError(f"format: expected one of {', '.join(FORMATS)}; got {format!r}")
    values, scales, global_scale = buffer_shapes(
        format, shape, layout, how.get("batched", False), how.get("alignment", 32),
        _axis(format, how),
    )
    if how.get("row_offsets") is not None:
        groups = how["row_offsets"].shape[0] - 1
        scales = grouped_scales(format, shape, groups)
    # Rows that a list leaves out are 0, as everywhere.
    is_partial = any(how.get(name) is not None for name in PARTIAL)
    make = input.new_zeros if is_partial else input.new_empty
    return (
        make(values, dtype=torch.uint8),
        make(scales, dtype=_scale_type(format)),
        make(global_scale, dtype=torch.float32),
    )


def quantized_layout(
    format: str, shape: Sequence[int], layout: str, batched: bool, alignment: int,
    axis: str = "tensor", groups: int = 0,
) -> _core.QuantizedLayout:  # fmt: skip
    """Sizes of a tensor of a logical shape."""
    return _core.quantized_layout(
        format,
        int(shape[-2]) if batched else int(product(shape[:-1])),
        shape[-1],
        scale_layout=layout or None,
        batch=int(product(shape[:-2])) if batched else 1,
        alignment=alignment,
        global_scale_axis=axis,
        groups=groups,
    )


_sizes = lru_cache(maxsize=256)(quantized_layout)


def _axis_of(format: str, shape: Sequence[int], batched: bool, count: int) -> str:
    """The axis of `count` global scales. Where rows and batches are as many: rows."""
    batch = product(shape[:-2]) if batched else 1
    rows = shape[-2] if batched else product(shape[:-1])
    if format != "nvfp4" or count == 1:
        return "tensor"
    return "row" if count == rows else "batch" if count == batch else "tensor"


def _wrap(
    parts: Quantized, format: str, shape: Sequence[int], layout: str, how: dict[str, Any]
) -> nf.QuantizedTensor:
    """The three tensors as the package takes them.

    how: global_scale_axis or "", and batched, alignment, row_offsets where they are given.
    """
    values, scales, global_scale = parts
    count, extents, offsets = global_scale.numel(), tuple(map(int, shape)), how.get("row_offsets")
    batched = how.get("batched", False)
    axis = how["global_scale_axis"] or _axis_of(format, extents, batched, count)
    groups = 0 if offsets is None else offsets.shape[0] - 1
    sizes = _sizes(format, extents, layout, batched, how.get("alignment", 32), axis, groups)
    given = global_scale if count else None
    return nf.QuantizedTensor(values, scales, given, sizes, extents, offsets)


# Arguments of operators that are no options of the package's functions.
_OF_LAYOUT = frozenset(("batched", "alignment", "global_scale_axis"))


def _four_over_six(text: str) -> nf.FourOverSix:
    parts = text.split()
    if len(parts) != 3 or not parts[2].isdecimal():
        raise ValueError(f"four_over_six: expected error, error_math and e4m3_max, got {text!r}")
    return nf.FourOverSix(parts[0], parts[1], int(parts[2]))  # type: ignore[arg-type]


def _options(how: dict[str, Any]) -> dict[str, Any]:
    """Keywords of the package: those that are given, which None and "" are not."""
    options = {name: value for name, value in how.items()
               if not (value is None or name in _OF_LAYOUT or isinstance(value, str) and not value)}
    if "four_over_six" in options:
        options["four_over_six"] = _four_over_six(options["four_over_six"])
    if "base_decode_scales" in options:
        options["base_decode_scale"] = options.pop("base_decode_scales")
    return options


def _register_quantizer(name: str, num_inputs: int, halves: bool) -> None:
    """An operator with new results, and one that writes given ones.

    num_inputs: arguments before `format`. halves: the result has half of the columns.
    """
    function = getattr(nf, name)

    def fill(inputs: Sequence[Any], parts: Quantized, format: str, layout: str, how: Any) -> None:
        shape = list(inputs[0].shape)
        if halves:
            shape[-1] //= 2
        axis = _axis(format, how)
        target = _wrap(parts, format, shape, layout, {**how, "global_scale_axis": axis})
        tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
        extra = {"eps": value for value in inputs if isinstance(value, float)}
        function(*tensors, out=target, **extra, **_options(how))

    def buffers(*args: Any, **how: Any) -> Quantized:
        format = args[num_inputs]
        layout = args[num_inputs + 1] if len(args) > num_inputs + 1 else ""
        shape = list(args[0].shape)
        if halves:
            shape[-1] = shape[-1] // 2
        return _new_buffers(args[0], shape, format, layout, how)

    def real(*args: Any, **how: Any) -> Quantized:
        with allocating_on(args[0].device):
            parts = buffers(*args, **how)
        layout = args[num_inputs + 1] if len(args) > num_inputs + 1 else ""
        fill(args[:num_inputs], parts, args[num_inputs], layout, how)
        return parts

    def real_out(*args: Any, **how: Any) -> None:
        parts = tuple(how.pop(part) for part in ("values", "scales", "global_scale"))
        layout = args[num_inputs + 1] if len(args) > num_inputs + 1 else ""
        fill(args[:num_inputs], parts, args[num_inputs], layout, how)

    _register(name, real, buffers)
    _register(f"{name}_out", real_out, lambda *args, **how: None)


_register_quantizer("quantize", 1, False)
_register_quantizer("silu_mul_quantize", 1, True)
_register_quantizer("smooth_quantize", 2, False)
_register_quantizer("rmsnorm_quantize", 3, False)
_register_quantizer("add_rmsnorm_quantize", 4, False)


def _dequantize_out(*args: Any, **how: Any) -> None:
    format, shape, layout, batched, alignment, out = args[3:]
    given = {"row_offsets": None, "global_scale_axis": "", **how}
    given.update(batched=batched, alignment=alignment)
    divides = given.get("global_scale_divides", False)
    source = _wrap(args[:3], format, shape, layout, given)
    nf.dequantize(source, out=out, global_scale_divides=divides)


def _dequantize(*args: Any, **how: Any) -> torch.Tensor:
    with allocating_on(args[0].device):
        out = args[0].new_empty(args[4], dtype=args[8])
    _dequantize_out(*args[:8], out, **how)
    return out


_register("dequantize", _dequantize, lambda *args, **how: args[0].new_empty(args[4], dtype=args[8]))
_register("dequantize_out", _dequantize_out, lambda *args, **how: None)


def _relayout_shape(*args: Any) -> list[Any]:
    format, shape, batched, alignment, to = args
    return buffer_shapes(format, shape, to, batched, alignment, "tensor")[1]


def _relayout(*args: Any) -> torch.Tensor:
    scales, format, shape, _, batched, alignment, to = args
    with allocating_on(scales.device):
        out = scales.new_empty(_relayout_shape(format, shape, batched, alignment, to))
    _relayout_out(*args, out)
    return out


def _relayout_out(*args: Any) -> None:
    scales, format, shape, layout, batched, alignment, to, out = args
    source, target = (
        quantized_layout(format, shape, wanted, batched, alignment) for wanted in (layout, to)
    )
    _core.relayout_scales(source, scales, target, out)


_register(
    "relayout",
    _relayout,
    lambda scales, format, shape, layout, batched, alignment, to: scales.new_empty(
        _relayout_shape(format, shape, batched, alignment, to)
    ),
)


def _amax_out(input: torch.Tensor, per_row: bool, out: torch.Tensor) -> None:
    nf.amax(input, per_row=per_row, out=out)


_register("relayout_out", _relayout_out, lambda *args: None)
_register(
    "amax_out",
    _amax_out,
    lambda *args: None,
)
_register(
    "amax",
    lambda input, per_row: nf.amax(input, per_row=per_row),
    lambda input, per_row: input.new_empty(
        input.shape[:-1] if per_row else (1,), dtype=torch.float32
    ),
)


def _call(name: str, inputs: Sequence[Any], format: str, layout: str | None,
          out: Quantized | None, options: Any) -> Quantized:  # fmt: skip
    if options.get("four_over_six") is not None:
        chosen = options["four_over_six"]
        text = f"{chosen.error} {chosen.error_math} {chosen.e4m3_max}"
        options = {**options, "four_over_six": text}
    if isinstance(options.get("base_decode_scale"), torch.Tensor):
        options = dict(options)
        options["base_decode_scales"] = options.pop("base_decode_scale")
    options = {name: value for name, value in options.items() if value is not None}
    if out is None:
        return getattr(torch.ops.narrowfloat, name)(*inputs, format, layout or "", **options)
    values, scales, global_scale = out
    getattr(torch.ops.narrowfloat, f"{name}_out")(
        *inputs, format, layout or "", **options, values=values, scales=scales,
        global_scale=global_scale
    )  # fmt: skip
    return out


def quantize(
    input: torch.Tensor, format: str, layout: str | None = None, *, out: Quantized | None = None,
    **options: Unpack[Options],
) -> Quantized:  # fmt: skip
    """(values, scales, global_scale) of a tensor. As narrowfloat.quantize().

    input: float32, float16, bfloat16 (FP4 formats also float8_e4m3fn) [..., cols].
    out: uint8 values, scales of the format's type, float32 global scale; written to.
    """
    return _call("quantize", (input,), format, layout, out, options)


def silu_mul_quantize(
    gate_up: torch.Tensor, format: str, layout: str | None = None, *, out: Quantized | None = None,
    **options: Unpack[Options],
) -> Quantized:  # fmt: skip
    """As narrowfloat.silu_mul_quantize(), of float16 or bfloat16 [..., 2 * cols].

    out: quantize().
    """
    return _call("silu_mul_quantize", (gate_up,), format, layout, out, options)


def smooth_quantize(
    input: torch.Tensor, smooth: torch.Tensor, format: str, layout: str | None = None, *,
    out: Quantized | None = None, **options: Unpack[Options],
) -> Quantized:  # fmt: skip
    """As narrowfloat.smooth_quantize(), of bfloat16 [..., cols] and [cols]. out: quantize()."""
    return _call("smooth_quantize", (input, smooth), format, layout, out, options)


def rmsnorm_quantize(
    input: torch.Tensor, weight: torch.Tensor, format: str, layout: str | None = None, *,
    eps: float = 1e-6, norm_output: torch.Tensor | None = None, extra_layout: str | None = None,
    extra_scales: torch.Tensor | None = None, out: Quantized | None = None,
    **options: Unpack[Options],
) -> Quantized:  # fmt: skip
    """As narrowfloat.rmsnorm_quantize(), of float16 or bfloat16 input [..., cols], weight [cols].

    norm_output: of the input's type and shape. extra_scales: scales in extra_layout. Written to.
    """
    more = {"norm_output": norm_output, "extra_layout": extra_layout, "extra_scales": extra_scales}
    return _call("rmsnorm_quantize", (input, weight, eps), format, layout, out,
                 {**options, **more})  # fmt: skip


def add_rmsnorm_quantize(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, format: str,
    layout: str | None = None, *, eps: float = 1e-6, norm_output: torch.Tensor | None = None,
    extra_layout: str | None = None, extra_scales: torch.Tensor | None = None,
    out: Quantized | None = None, **options: Unpack[Options],
) -> Quantized:  # fmt: skip
    """As narrowfloat.add_rmsnorm_quantize(): `residual` becomes the sum.

    input, residual: float16 or bfloat16 [..., cols]. Other arguments: rmsnorm_quantize().
    """
    more = {"norm_output": norm_output, "extra_layout": extra_layout, "extra_scales": extra_scales}
    return _call("add_rmsnorm_quantize", (input, residual, weight, eps), format, layout, out,
                 {**options, **more})  # fmt: skip


def dequantize(
    values: torch.Tensor, scales: torch.Tensor, global_scale: torch.Tensor, format: str,
    shape: Sequence[int], layout: str | None = None, *, batched: bool = False, alignment: int = 32,
    dtype: torch.dtype = torch.float32, row_offsets: torch.Tensor | None = None,
    global_scale_divides: bool = False, global_scale_axis: str | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The numbers of a quantized tensor of a logical shape. As narrowfloat.dequantize().

    values, scales, global_scale: of quantize(). shape: [..., cols]. dtype: float32, float16 or
    bfloat16; out: [..., cols] of any of these, written to.
    row_offsets: as quantize() had it. global_scale_axis: tensor, row or batch; default: by their
    number, which says too little only where a tensor has as many batches as rows.
    """
    parts = (values, scales, global_scale, format, shape, layout or "", batched, alignment)
    how = {"row_offsets": row_offsets, "global_scale_divides": global_scale_divides,
           "global_scale_axis": global_scale_axis or ""}  # fmt: skip
    if out is None:
        return torch.ops.narrowfloat.dequantize(*parts, dtype, **how)
    torch.ops.narrowfloat.dequantize_out(*parts, out, **how)
    return out


def relayout(
    scales: torch.Tensor, format: str, shape: Sequence[int], layout: str, to: str, *,
    batched: bool = False, alignment: int = 32, out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Scales of a quantized tensor of a logical shape in another layout.

    scales: uint8, or float32 of FP8 formats, in `layout`. shape: [..., cols]. out: of as many
    elements as the layout `to` has; written to.
    """
    parts = (scales, format, shape, layout, batched, alignment, to)
    if out is None:
        return torch.ops.narrowfloat.relayout(*parts)
    torch.ops.narrowfloat.relayout_out(*parts, out)
    return out


def amax(
    input: torch.Tensor, *, per_row: bool = False, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Largest magnitudes of float32, float16 or bfloat16 [..., cols], as narrowfloat.amax().

    out: float32 [1], or with per_row [...]; written to.
    """
    if out is None:
        return torch.ops.narrowfloat.amax(input, per_row)
    torch.ops.narrowfloat.amax_out(input, per_row, out)
    return out
