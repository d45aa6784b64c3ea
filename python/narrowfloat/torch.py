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

import weakref
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

import narrowfloat as nf
from narrowfloat import (
    _core,
    _torch_layouts,  # noqa: F401: it defines operators.
)
from narrowfloat._shapes import FORMATS, buffer_shapes, product
from narrowfloat._streams import allocating_on
from narrowfloat._torch_library import library as _library
from narrowfloat._torch_library import register as _register

if TYPE_CHECKING:
    from collections.abc import Sequence

Quantized = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

_FLOATS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

# Schemas. A quantized tensor goes in and out as values, scales, global_scale.
_HOW = 'str format, str layout="", *, Tensor? encode_scale=None, str math="exact", ' \
    'str mx_scale="up", bool batched=False, int alignment=32'  # fmt: skip
_OUT = "Tensor(a!) values, Tensor(b!) scales, Tensor(c!) global_scale"
_SHAPE = "str format, SymInt[] shape, str layout, bool batched, int alignment"
_TENSORS = "(Tensor values, Tensor scales, Tensor global_scale)"


def _quantized_schemas(name: str, inputs: str) -> tuple[str, str]:
    return (f"{name}({inputs}, {_HOW}) -> {_TENSORS}",
            f"{name}_out({inputs}, {_HOW}, {_OUT}) -> ()")  # fmt: skip


for _schema in (
    *_quantized_schemas("quantize", "Tensor input"),
    *_quantized_schemas("silu_mul_quantize", "Tensor gate_up"),
    *_quantized_schemas("smooth_quantize", "Tensor input, Tensor smooth"),
    *_quantized_schemas("rmsnorm_quantize", "Tensor input, Tensor weight, float eps"),
    *_quantized_schemas("add_rmsnorm_quantize",
                        "Tensor input, Tensor(r!) residual, Tensor weight, float eps"),
    f"dequantize(Tensor values, Tensor scales, Tensor global_scale, {_SHAPE}, ScalarType dtype)"
    " -> Tensor",
    f"dequantize_out(Tensor values, Tensor scales, Tensor global_scale, {_SHAPE}, Tensor(a!) out)"
    " -> ()",
    f"relayout(Tensor scales, {_SHAPE}, str to) -> Tensor",
    f"relayout_out(Tensor scales, {_SHAPE}, str to, Tensor(a!) out) -> ()",
    "amax(Tensor input, bool per_row) -> Tensor",
    "amax_out(Tensor input, bool per_row, Tensor(a!) out) -> ()",
    "route(Tensor logits, Tensor? bias, int top_k, str method, int n_group, int topk_group,"
    " float routed_scale) -> (Tensor ids, Tensor weights)",
    "route_out(Tensor logits, Tensor? bias, int top_k, str method, int n_group, int topk_group,"
    " float routed_scale, Tensor(a!) ids, Tensor(b!) weights) -> ()",
    "moe(Tensor hidden, Tensor logits, Tensor? bias, int layer) -> Tensor",
    "moe_out(Tensor hidden, Tensor logits, Tensor? bias, int layer, Tensor(a!) out,"
    " Tensor(b!) workspace) -> ()",
):  # fmt: skip
    _library.define(_schema)


def _is_per_row(format: str, encode_scale: torch.Tensor | None) -> bool:
    return format == "nvfp4" and encode_scale is not None and encode_scale.numel() != 1


def _scale_type(format: str) -> torch.dtype:
    return torch.float32 if format.startswith("fp8") else torch.uint8


def _new_buffers(
    input: torch.Tensor, shape: Sequence[Any], format: str, layout: str, how: dict[str, Any]
) -> Quantized:
    if format not in FORMATS:
        raise ValueError(f"format: expected one of {', '.join(FORMATS)}; got {format!r}")
    values, scales, global_scale = buffer_shapes(
        format, shape, layout, how["batched"], how["alignment"],
        _is_per_row(format, how["encode_scale"])
    )  # fmt: skip
    return (
        input.new_empty(values, dtype=torch.uint8),
        input.new_empty(scales, dtype=_scale_type(format)),
        input.new_empty(global_scale, dtype=torch.float32),
    )


def quantized_layout(
    format: str, shape: Sequence[int], layout: str, batched: bool, alignment: int,
    axis: str = "tensor",
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
    )


@lru_cache(maxsize=256)
def _sizes(
    format: str, shape: tuple[int, ...], layout: str, batched: bool, alignment: int, count: int
) -> _core.QuantizedLayout:
    """Sizes of a tensor with `count` global scales."""
    batch = product(shape[:-2]) if batched else 1
    rows = shape[-2] if batched else product(shape[:-1])
    per_row = format == "nvfp4" and count == rows != 1
    per_batch = format == "nvfp4" and not per_row and count == batch != 1
    axis = "row" if per_row else "batch" if per_batch else "tensor"
    return quantized_layout(format, shape, layout, batched, alignment, axis)


def _wrap(
    parts: Quantized, format: str, shape: Sequence[int], layout: str, batched: bool, alignment: int
) -> nf.QuantizedTensor:
    """The three tensors as the package takes them."""
    values, scales, global_scale = parts
    count, extents = global_scale.numel(), tuple(map(int, shape))
    sizes = _sizes(format, extents, layout, batched, alignment, count)
    return nf.QuantizedTensor(values, scales, global_scale if count else None, sizes, extents)


def _options(format: str, how: dict[str, Any]) -> dict[str, Any]:
    """Keywords of the package: those that are not at their defaults."""
    options = {}
    if how["encode_scale"] is not None:
        options["encode_scale"] = how["encode_scale"]
    if how["math"] != "exact":
        options["math"] = how["math"]
    if how["mx_scale"] != "up":
        options["mx_scale"] = how["mx_scale"]
    return options


def _complete(how: dict[str, Any]) -> dict[str, Any]:
    defaults = {"encode_scale": None, "math": "exact", "mx_scale": "up", "batched": False,
                "alignment": 32}  # fmt: skip
    return {**defaults, **how}


def _register_quantizer(name: str, num_inputs: int, halves: bool) -> None:
    """An operator with new results, and one that writes given ones.

    num_inputs: arguments before `format`. halves: the result has half of the columns.
    """
    function = getattr(nf, name)

    def fill(inputs: Sequence[Any], parts: Quantized, format: str, layout: str, how: Any) -> None:
        shape = list(inputs[0].shape)
        if halves:
            shape[-1] //= 2
        target = _wrap(parts, format, shape, layout, how["batched"], how["alignment"])
        tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
        extra = {"eps": value for value in inputs if isinstance(value, float)}
        function(*tensors, out=target, **extra, **_options(format, how))

    def buffers(*args: Any, **how: Any) -> Quantized:
        format = args[num_inputs]
        layout = args[num_inputs + 1] if len(args) > num_inputs + 1 else ""
        shape = list(args[0].shape)
        if halves:
            shape[-1] = shape[-1] // 2
        return _new_buffers(args[0], shape, format, layout, _complete(how))

    def real(*args: Any, **how: Any) -> Quantized:
        with allocating_on(args[0].device):
            parts = buffers(*args, **how)
        layout = args[num_inputs + 1] if len(args) > num_inputs + 1 else ""
        fill(args[:num_inputs], parts, args[num_inputs], layout, _complete(how))
        return parts

    def real_out(*args: Any, **how: Any) -> None:
        parts = tuple(how.pop(part) for part in ("values", "scales", "global_scale"))
        layout = args[num_inputs + 1] if len(args) > num_inputs + 1 else ""
        fill(args[:num_inputs], parts, args[num_inputs], layout, _complete(how))

    _register(name, real, buffers)
    _register(f"{name}_out", real_out, lambda *args, **how: None)


_register_quantizer("quantize", 1, False)
_register_quantizer("silu_mul_quantize", 1, True)
_register_quantizer("smooth_quantize", 2, False)
_register_quantizer("rmsnorm_quantize", 3, False)
_register_quantizer("add_rmsnorm_quantize", 4, False)


def _dequantize_out(*args: Any) -> None:
    format, shape, layout, batched, alignment, out = args[3:]
    nf.dequantize(_wrap(args[:3], format, shape, layout, batched, alignment), out=out)


def _dequantize(*args: Any) -> torch.Tensor:
    with allocating_on(args[0].device):
        out = args[0].new_empty(args[4], dtype=args[8])
    _dequantize_out(*args[:8], out)
    return out


_register("dequantize", _dequantize, lambda *args: args[0].new_empty(args[4], dtype=args[8]))
_register("dequantize_out", _dequantize_out, lambda *args: None)


def _relayout_shape(*args: Any) -> list[Any]:
    format, shape, batched, alignment, to = args
    return buffer_shapes(format, shape, to, batched, alignment, False)[1]


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


def _route(*args: Any, out: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
    logits, bias, top_k, method, n_group, topk_group, routed_scale = args
    return nf.route(logits, bias=bias, top_k=top_k, method=method, n_group=n_group,
                    topk_group=topk_group, routed_scale=routed_scale, out=out)  # fmt: skip


def _route_out(*args: Any) -> None:
    _route(*args[:7], out=args[7:])


_register("route_out", _route_out, lambda *args: None)
_register(
    "route",
    _route,
    lambda logits, bias, top_k, *_: (
        logits.new_empty((logits.shape[0], top_k), dtype=torch.int32),
        logits.new_empty((logits.shape[0], top_k), dtype=torch.float32),
    ),
)

# Layers as operators know them: by a number that stays theirs.
_layers: weakref.WeakValueDictionary[int, _Handle] = weakref.WeakValueDictionary()
_next_number = iter(range(1, 1 << 62))


class _Handle:
    """A layer with a number; lives as long as the caller keeps it."""

    __slots__ = ("__weakref__", "layer", "number")

    def __init__(self, layer: nf.MoeLayer) -> None:
        self.layer, self.number = layer, next(_next_number)
        _layers[self.number] = self


def _layer(number: int) -> nf.MoeLayer:
    handle = _layers.get(number)
    if handle is None:
        raise ValueError(f"layer: number {number} is of no layer that still exists")
    return handle.layer


def _moe_fake(hidden, logits, bias, layer):  # type: ignore[no-untyped-def]
    config = _layer(layer).config
    return hidden.new_empty((hidden.shape[0], config.hidden), dtype=_FLOATS[config.out_dtype])


_register(
    "moe",
    lambda hidden, logits, bias, layer: _layer(layer).run(hidden, logits, bias=bias),
    _moe_fake,
)


def _moe_out(hidden, logits, bias, layer, out, workspace):  # type: ignore[no-untyped-def]
    aligned = workspace[-workspace.data_ptr() % 256 :]
    _layer(layer).run(hidden, logits, bias=bias, out=out, workspace=aligned)


_register("moe_out", _moe_out, lambda *args: None)


def _call(name: str, inputs: Sequence[Any], format: str, layout: str | None,
          out: Quantized | None, options: dict[str, Any]) -> Quantized:  # fmt: skip
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
    **options: Any,
) -> Quantized:  # fmt: skip
    """(values, scales, global_scale) of a tensor. As narrowfloat.quantize().

    options: encode_scale, a tensor; math, mx_scale, batched, alignment.
    """
    return _call("quantize", (input,), format, layout, out, options)


def silu_mul_quantize(
    gate_up: torch.Tensor, format: str, layout: str | None = None, *, out: Quantized | None = None,
    **options: Any,
) -> Quantized:  # fmt: skip
    """As narrowfloat.silu_mul_quantize(); options: quantize()."""
    return _call("silu_mul_quantize", (gate_up,), format, layout, out, options)


def smooth_quantize(
    input: torch.Tensor, smooth: torch.Tensor, format: str, layout: str | None = None, *,
    out: Quantized | None = None, **options: Any,
) -> Quantized:  # fmt: skip
    """As narrowfloat.smooth_quantize(); options: quantize()."""
    return _call("smooth_quantize", (input, smooth), format, layout, out, options)


def rmsnorm_quantize(
    input: torch.Tensor, weight: torch.Tensor, format: str, layout: str | None = None, *,
    eps: float = 1e-6, out: Quantized | None = None, **options: Any,
) -> Quantized:  # fmt: skip
    """As narrowfloat.rmsnorm_quantize(); options: quantize()."""
    return _call("rmsnorm_quantize", (input, weight, eps), format, layout, out, options)


def add_rmsnorm_quantize(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, format: str,
    layout: str | None = None, *, eps: float = 1e-6, out: Quantized | None = None, **options: Any,
) -> Quantized:  # fmt: skip
    """As narrowfloat.add_rmsnorm_quantize(): `residual` becomes the sum. options: quantize()."""
    return _call("add_rmsnorm_quantize", (input, residual, weight, eps), format, layout, out,
                 options)  # fmt: skip


def dequantize(
    values: torch.Tensor, scales: torch.Tensor, global_scale: torch.Tensor, format: str,
    shape: Sequence[int], layout: str | None = None, *, batched: bool = False, alignment: int = 32,
    dtype: torch.dtype = torch.float32, out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The numbers of a quantized tensor of a logical shape. As narrowfloat.dequantize()."""
    parts = (values, scales, global_scale, format, shape, layout or "", batched, alignment)
    if out is None:
        return torch.ops.narrowfloat.dequantize(*parts, dtype)
    torch.ops.narrowfloat.dequantize_out(*parts, out)
    return out


def relayout(
    scales: torch.Tensor, format: str, shape: Sequence[int], layout: str, to: str, *,
    batched: bool = False, alignment: int = 32, out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Scales of a quantized tensor of a logical shape in another layout."""
    parts = (scales, format, shape, layout, batched, alignment, to)
    if out is None:
        return torch.ops.narrowfloat.relayout(*parts)
    torch.ops.narrowfloat.relayout_out(*parts, out)
    return out


def amax(
    input: torch.Tensor, *, per_row: bool = False, out: torch.Tensor | None = None
) -> torch.Tensor:
    """As narrowfloat.amax()."""
    if out is None:
        return torch.ops.narrowfloat.amax(input, per_row)
    torch.ops.narrowfloat.amax_out(input, per_row, out)
    return out


def route(
    logits: torch.Tensor, top_k: int, method: str = "renormalize", *,
    bias: torch.Tensor | None = None, n_group: int = 1, topk_group: int = 1,
    routed_scale: float = 1.0, out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """As narrowfloat.route() from logits, without its rarer options."""
    given = (logits, bias, top_k, method, n_group, topk_group, routed_scale)
    if out is None:
        return torch.ops.narrowfloat.route(*given)
    torch.ops.narrowfloat.route_out(*given, *out)
    return out


class Moe(torch.nn.Module):
    """A narrowfloat.MoeLayer as a module: forward(hidden, logits, bias=None) -> [T, H].

    The layer is no parameter: its weights are fixed, and stay where they were prepared.
    """

    def __init__(self, layer: nf.MoeLayer) -> None:
        super().__init__()
        self._handle = _Handle(layer)
        self._number = self._handle.number

    @property
    def layer(self) -> nf.MoeLayer:
        """The layer."""
        return self._handle.layer

    def forward(
        self, hidden: torch.Tensor, logits: torch.Tensor, bias: torch.Tensor | None = None, *,
        out: torch.Tensor | None = None, workspace: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """As MoeLayer.run() from logits. out and workspace: give both, or none.

        workspace: layer.new_workspace(T), or any uint8 tensor with 256 bytes more than that.
        """
        if out is None and workspace is None:
            return torch.ops.narrowfloat.moe(hidden, logits, bias, self._number)
        if out is None or workspace is None:
            raise ValueError("workspace: give both it and out, or none of them")
        torch.ops.narrowfloat.moe_out(hidden, logits, bias, self._number, out, workspace)
        return out
