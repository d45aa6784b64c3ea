"""FlashInfer's gated activations of whole tensors, computed in float32 and rounded once."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np

from narrowfloat._arrays import is_torch
from narrowfloat.compat.flashinfer._arguments import accepts, check_array
from narrowfloat.compat.flashinfer._arrays import cast, copy_into, dtype_name
from narrowfloat.compat.flashinfer._errors import AssertedError

_ERF = np.frompyfunc(math.erf, 1, 1)


def silu(x: Any) -> Any:
    """x * sigmoid(x) of float32."""
    if is_torch(x):
        return sys.modules["torch"].nn.functional.silu(x)
    with np.errstate(over="ignore"):
        return x / (1 + np.exp(-x))


def gelu(x: Any) -> Any:
    """x * Phi(x) of float32, by the error function."""
    if is_torch(x):
        return sys.modules["torch"].nn.functional.gelu(x)
    return x * (np.float32(0.5) * (1 + _ERF(x / math.sqrt(2)).astype(np.float32)))


def gelu_tanh(x: Any) -> Any:
    """gelu() by its approximation with tanh."""
    if is_torch(x):
        return sys.modules["torch"].nn.functional.gelu(x, approximate="tanh")
    inner = np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x * x * x)
    return np.float32(0.5) * x * (1 + np.tanh(inner))


def _gated(function: Any, input: Any, out: Any) -> Any:
    *lead, cols = input.shape
    if cols % 2:
        raise ValueError(f"input: The last dimension must be even (2 * hidden_size), got {cols}")
    shape, dtype = (*lead, cols // 2), dtype_name(input)
    if dtype not in ("float16", "bfloat16", "float32"):
        raise ValueError(f"input: expected float16, bfloat16 or float32, got {dtype}")
    if out is not None:
        check_array("out", out)
        if tuple(out.shape) != shape:
            raise AssertedError(f"out: expected shape {shape}, got {tuple(out.shape)}")
    gate, up = input[..., : cols // 2], input[..., cols // 2 :]
    result = cast(function(cast(gate, "float32")) * cast(up, "float32"), dtype)
    return result if out is None else copy_into("out", out, result)


@accepts("input")
def silu_and_mul(input: Any, out: Any = None, enable_pdl: bool | None = None) -> Any:
    """silu(first half) * second half: [..., K] of the input's type.

    input: float32, float16 or bfloat16 [..., 2 * K]. out: [..., K], written to.
    enable_pdl: changes nothing.
    """
    return _gated(silu, input, out)


@accepts("input")
def gelu_and_mul(input: Any, out: Any = None, enable_pdl: bool | None = None) -> Any:
    """gelu(first half) * second half, with the error function; arguments as silu_and_mul()."""
    return _gated(gelu, input, out)


@accepts("input")
def gelu_tanh_and_mul(input: Any, out: Any = None, enable_pdl: bool | None = None) -> Any:
    """gelu(first half) * second half, approximated with tanh; arguments as silu_and_mul()."""
    return _gated(gelu_tanh, input, out)
