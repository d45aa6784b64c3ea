"""FlashInfer's RMSNorm with static quantization to FP8, computed in float32 and rounded once."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from narrowfloat._arrays import is_torch
from narrowfloat.compat.flashinfer._arguments import accepts, check_axes
from narrowfloat.compat.flashinfer._arrays import cast, copy_into, dtype_name, scale_array
from narrowfloat.compat.flashinfer._errors import CheckError

_LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}


def _check(out: Any, input: Any, weight: Any, residual: Any) -> None:
    check_axes("input", input, "M", "K")
    if dtype_name(input) not in ("float16", "bfloat16"):
        raise CheckError(f"input: expected float16 or bfloat16, got {dtype_name(input)}")
    if dtype_name(out) not in _LARGEST:
        raise CheckError(f"out: expected float8_e4m3fn or float8_e5m2, got {dtype_name(out)}")
    for name, array, shape in (("out", out, tuple(input.shape)),
                               ("weight", weight, (input.shape[1],)),
                               ("residual", residual, tuple(input.shape))):  # fmt: skip
        if array is not None and tuple(array.shape) != shape:
            raise CheckError(f"{name}: expected shape {shape}, got {tuple(array.shape)}")


def _scale(scale: Any, like: Any) -> Any:
    value = scale_array("scale", scale, like)
    if value.shape[0] != 1:
        raise ValueError(f"scale: must be a scalar tensor or shape (1,), got {value.shape[0]} "
                         "values")  # fmt: skip
    return value


def _quantized(x: Any, weight: Any, scale: Any, eps: float, out: Any) -> None:
    """x: float32 [M, K]."""
    largest = _LARGEST[dtype_name(out)]
    if is_torch(x):
        factor = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
        y = x * factor * cast(weight, "float32") * (1 / scale)
        y = y.clamp(-largest, largest)
    else:
        factor = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(eps))
        y = np.clip(x * factor * cast(weight, "float32") * (1 / scale), -largest, largest)
    copy_into("out", out, y)


@accepts("out", "input", "weight")
def rmsnorm_quant(
    out: Any, input: Any, weight: Any, scale: Any, eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:  # fmt: skip
    """rmsnorm(input) * weight / scale, saturated, into `out`.

    out: float8_e4m3fn or float8_e5m2 [M, K]. input: float16 or bfloat16 [M, K]. weight: [K].
    scale: float, or float32 [1]. eps: float. enable_pdl: changes nothing.
    """
    _check(out, input, weight, None)
    _quantized(cast(input, "float32"), weight, _scale(scale, input), eps, out)


@accepts("out", "input", "residual", "weight")
def fused_add_rmsnorm_quant(
    out: Any, input: Any, residual: Any, weight: Any, scale: Any, eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:  # fmt: skip
    """rmsnorm_quant() of input + residual, which `residual` becomes, rounded to its type.

    residual: type and shape of the input. out, input, weight, scale, eps, enable_pdl: as there.
    """
    _check(out, input, weight, residual)
    total = cast(input, "float32") + cast(residual, "float32")
    factor = _scale(scale, input)
    copy_into("residual", residual, total)
    _quantized(total, weight, factor, eps, out)
