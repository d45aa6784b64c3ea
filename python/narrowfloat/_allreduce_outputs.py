"""Results of an all-reduce: what each pattern writes, and new arrays for it."""

from __future__ import annotations

import sys
from math import prod
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

from narrowfloat._arrays import Array, Maker, is_torch
from narrowfloat._quantized import QuantizedTensor, new_tensor
from narrowfloat._streams import allocating_on

# Quantization of a pattern -> the format of its QuantizedTensor.
QUANTIZED_FORMATS = {"fp8_tensor": "fp8_tensor", "fp8_block": "fp8_1x128", "nvfp4": "nvfp4",
                     "nvfp4_per_token": "nvfp4_per_token", "mxfp8": "mxfp8",
                     "mxfp4": "mxfp4"}  # fmt: skip
_ROWS = ("ar_out", "residual_out", "norm_out")


class Fp8Rows(NamedTuple):
    """Codes of the patterns fp8_token and fp8_group, which no QuantizedTensor describes.

    values: uint8 [..., H] of float8_e4m3fn.
    scales: fp8_token: decode scales, float32 [..., 1]. fp8_group: the biased exponents of groups
        4c to 4c + 3 of row t, in the bytes of an int32 at [t, c]; rows are adjacent in memory, and
        columns begin at multiples of 4 rows.
    """

    values: Array
    scales: Array


class AllReduceResult(NamedTuple):
    """The results of a call; None stands for what its pattern does not have.

    ar_out: the sum over ranks, [..., H] of the input's type: float16, bfloat16 or float32.
    residual_out: it plus the residual. norm_out: the norm of that. quantized: that norm in a narrow
    format. algorithm: the one that ran.
    """

    ar_out: Array | None = None
    residual_out: Array | None = None
    norm_out: Array | None = None
    quantized: QuantizedTensor | Fp8Rows | None = None
    algorithm: str = ""


def rows_of_pattern(pattern: str) -> tuple[str, ...]:
    """The outputs that a pattern always writes, but for the quantized one."""
    if pattern == "allreduce":
        return ("ar_out",)
    if pattern == "residual_rmsnorm" or pattern.startswith("norm_"):
        return ("residual_out", "norm_out")
    return ("residual_out",)


def _dtype_of(argument: str, array: Any) -> Any:
    """The type of an array, as a Maker takes it."""
    dtype = getattr(array, "dtype", None)
    if dtype is None:
        raise TypeError(f"{argument}: expected an array with a dtype, got {type(array).__name__}")
    if isinstance(dtype, np.dtype) or is_torch(array):
        return dtype
    return str(dtype).rpartition(".")[2]


def _new_group_scales(maker: Maker, rows: int, groups: int) -> Any:
    columns, step = -(-groups // 4), -(-rows // 4) * 4
    words = maker.empty((columns, step), "int32")
    return words.T[:rows]


def new_quantized(
    maker: Maker, shape: tuple[int, ...], quantization: str, scale_layout: str | None, group: int
) -> QuantizedTensor | Fp8Rows:
    """New arrays, of any contents, for a norm of a shape."""
    if quantization not in QUANTIZED_FORMATS:
        values = maker.empty(shape, "uint8")
        if quantization == "fp8_token":
            return Fp8Rows(values, maker.empty((*shape[:-1], 1), "float32"))
        return Fp8Rows(values, _new_group_scales(maker, prod(shape[:-1]), shape[-1] // group))
    layout = "linear" if quantization.startswith("fp8") else scale_layout
    return new_tensor(shape, QUANTIZED_FORMATS[quantization], layout=layout, batched=False,
                      alignment=32, groups=0, global_scale_axis="tensor", like=maker,
                      is_zeroed=False)  # fmt: skip


def complete(
    given: AllReduceResult | None,
    wanted: tuple[str, ...],
    like: tuple[str, Any],
    maker: Maker | None,
    shape: tuple[int, ...],
) -> dict[str, Array]:
    """The given outputs of rows, and new ones for those that are wanted and missing.

    like: an argument and its array, whose type new outputs have.
    """
    outputs: dict[str, Array] = {}
    for name in _ROWS:
        array = None if given is None else getattr(given, name)
        if array is None and name in wanted:
            assert maker is not None
            array = maker.empty(shape, _dtype_of(*like))
        if array is not None:
            outputs[name] = array
    return outputs


def quantized_outputs(quantized: QuantizedTensor | Fp8Rows | None) -> dict[str, Array]:
    """Its arrays as the library names them."""
    if quantized is None:
        return {}
    outputs = {"quant_out": quantized.values}
    if not isinstance(quantized, QuantizedTensor):
        return {**outputs, "scale_out": quantized.scales}
    if quantized.format != "fp8_tensor":
        outputs["scale_out"] = quantized.scales
    if quantized.format == "nvfp4_per_token":
        outputs["row_scale_out"] = quantized.global_scale
    return outputs


def scale_to_array(value: Any, maker: Maker) -> Any:
    """A number as float32 [1] where new arrays are made; an array as it is."""
    return maker.full((1,), float(value), "float32") if isinstance(value, Real) else value


def store_global_scale(quantized: QuantizedTensor | Fp8Rows | None, scale: Any) -> None:
    """Writes the decode scale that follows from the scale of a call."""
    if scale is None or not isinstance(quantized, QuantizedTensor):
        return
    divides = quantized.format == "nvfp4"
    target: Any = quantized.global_scale if divides else quantized.scales
    if is_torch(target) and is_torch(scale):
        torch = sys.modules["torch"]
        with allocating_on(target.device):
            flat = scale.reshape(1)
            target.view(1).copy_(torch.reciprocal(flat) if divides else flat)
        return
    number = np.asarray(scale, np.float32).reshape(1)
    with np.errstate(divide="ignore"):
        np.asarray(target).reshape(1)[...] = np.reciprocal(number) if divides else number
