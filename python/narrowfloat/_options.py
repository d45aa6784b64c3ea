"""Options of the quantizers, from keywords to the extension's object."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from numbers import Real
from typing import Any, Literal, TypedDict

from narrowfloat import _core
from narrowfloat._arrays import Array, to_core

MathMode = Literal["exact", "fast"]


@dataclass(frozen=True)
class FourOverSix:
    """nvfp4 formats: each block keeps the better of the scales that map its maximum to 6 and to 4.

    error: the error that decides, absolute or squared. error_math: how it is computed. e4m3_max:
    448 or 256; the largest block scale aimed at.
    """

    error: Literal["mae", "mse"] = "mae"
    error_math: Literal["strict", "fast"] = "strict"
    e4m3_max: int = 448


class QuantizeOptions(TypedDict, total=False):
    """Keywords of all quantizers. Those that a format has no use for raise ValueError; None is as
    good as not given.

    math: "exact" equals the published formulas bit for bit, "fast" common GPU kernels.
    encode_scale: nvfp4 (and float8 input to mxfp4). Multiplies the tensor before quantization; a
        number, or float32 [1], [rows] or (with valid_rows) [batch]. Default: 448 * 6 / amax.
    four_over_six: nvfp4 formats.
    base_decode_scale: nvfp4_per_token. Row scale = row maximum * this; a number, or float32 [1].
        Default: 1 / (448 * 6).
    row_list: nvfp4_per_token. int32 [n], rows to work on; the other values are left alone.
    mx_scale: mxfp4, mxfp8. How a block maximum becomes a power of two.
    fp8_rule, fp8_eps: FP8 formats. How a block maximum becomes a scale, and its floor.
    fp8_decode_scale: fp8_tensor. A given scale instead of one from the maximum.
    valid_rows: formats with one-byte scales. int32 [batch], rows of each batch that count.
    row_offsets: fp8_1x128. int64 [groups + 1], where the groups of rows begin.
    """

    math: MathMode | None
    encode_scale: float | Array | None
    four_over_six: FourOverSix | None
    base_decode_scale: float | Array | None
    row_list: Array | None
    mx_scale: Literal["up", "floor", "even"] | None
    fp8_rule: Literal["reciprocal", "reciprocal_pow2", "amax_div", "pow2_ceil"] | None
    fp8_eps: float | None
    fp8_decode_scale: float | None
    valid_rows: Array | None
    row_offsets: Array | None


# Options that leave parts of a result as they were; the rest of a call's result is all written.
PARTIAL = ("row_list", "valid_rows", "row_offsets")


def _set_encode_scale(target: _core.QuantizeOptions, value: Any) -> None:
    if isinstance(value, Real):
        target.set_encode_scale(float(value))
    else:
        target.set_encode_scales(to_core("encode_scale", value))


def _set_base_decode_scale(target: _core.QuantizeOptions, value: Any) -> None:
    if isinstance(value, Real):
        target.set_base_decode_scale(float(value))
    else:
        target.set_base_decode_scales(to_core("base_decode_scale", value))


def _set_four_over_six(target: _core.QuantizeOptions, value: FourOverSix) -> None:
    target.set_four_over_six(value.error, value.error_math, value.e4m3_max)


def _vector(name: str) -> Callable[[_core.QuantizeOptions, Any], None]:
    return lambda target, value: getattr(target, f"set_{name}")(to_core(name, value))


_SETTERS: dict[str, Callable[[_core.QuantizeOptions, Any], None]] = {
    "math": lambda target, value: target.set_math(value),
    "encode_scale": _set_encode_scale,
    "four_over_six": _set_four_over_six,
    "base_decode_scale": _set_base_decode_scale,
    "row_list": _vector("row_list"),
    "mx_scale": lambda target, value: target.set_mx_scale(value),
    "fp8_rule": lambda target, value: target.set_fp8_rule(value),
    "fp8_eps": lambda target, value: target.set_fp8_eps(value),
    "fp8_decode_scale": lambda target, value: target.set_fp8_decode_scale(value),
    "valid_rows": _vector("valid_rows"),
    "row_offsets": _vector("row_offsets"),
}


def _make(options: Iterable[tuple[str, Any]]) -> _core.QuantizeOptions:
    target = _core.QuantizeOptions()
    for name, value in options:
        setter = _SETTERS.get(name)
        if setter is None:
            raise TypeError(f"unknown option {name!r}; there are {', '.join(_SETTERS)}")
        if value is None:
            continue
        try:
            setter(target, value)
        except (TypeError, AttributeError) as error:
            raise TypeError(f"{name}: not usable: {value!r}") from error
    return target


# The extension only reads options, so those without arrays serve any number of calls.
_remembered = lru_cache(maxsize=64)(_make)
_DEFAULTS = _core.QuantizeOptions()
_PLAIN = frozenset((str, float, int))


def to_core_options(options: QuantizeOptions) -> _core.QuantizeOptions:
    """The extension's object. None is as good as not given; an unknown keyword is a TypeError."""
    if not options:
        return _DEFAULTS
    for value in options.values():
        if type(value) not in _PLAIN:
            return _make(options.items())
    return _remembered(tuple(options.items()))


def global_scale_axis(format: str, options: Mapping[str, Any]) -> str:
    """The axis of the global scales of an output: that of the encode scales."""
    if format != "nvfp4":
        return "tensor"
    per_group = "batch" if options.get("valid_rows") is not None else "row"
    scale = options.get("encode_scale")
    if scale is None:
        return "batch" if per_group == "batch" else "tensor"
    if isinstance(scale, Real) or prod(getattr(scale, "shape", ())) == 1:
        return "tensor"
    return per_group
