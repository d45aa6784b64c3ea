"""One call of an all-reduce: its settings, its arrays by name, errors in the caller's words."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal, TypedDict

from narrowfloat import _core
from narrowfloat._arrays import Array, codes_to_core, to_core

Algorithm = Literal["auto", "oneshot", "twoshot", "nccl_exact", "nccl", "reference"]


class AllReduceOptions(TypedDict, total=False):
    """Keywords of all calls of an AllReduce. None is as good as not given.

    eps, weight_bias: of the norm; a weight_bias of 1 scales by 1 + gamma (Gemma). Default: 1e-6, 0.
    scale_layout: of nvfp4, mxfp4 and mxfp8 scales. Default: swizzled_128x4.
    group_size: columns of an fp8_group. Default: 128.
    accumulate: how the sum over ranks rounds; "float32" (default) once at the end, "element" after
        every addition to the type of the elements, as FlashInfer does by default.
    exactness: "fast" also allows NCCL's own all-reduce, whose bits are not defined.
    algorithm: default: the fastest one that takes the call.
    programmatic_launch: use_stream(). trigger: when later programmatic launches may start;
        "after_push" asserts that every later kernel that could reach the workspace or read the
        results waits for this one.
    """

    eps: float | None
    weight_bias: float | None
    scale_layout: str | None
    group_size: int | None
    accumulate: Literal["float32", "element"] | None
    exactness: Literal["exact", "fast"] | None
    algorithm: Algorithm | None
    programmatic_launch: bool | None
    trigger: Literal["at_end", "after_push"] | None


_WORDS = frozenset(("scale_layout", "accumulate", "exactness", "algorithm", "trigger"))
_VALUES = frozenset(("eps", "weight_bias", "group_size", "routed_scaling", "programmatic_launch"))
_DEFAULT_GROUP = 128


@lru_cache(maxsize=256)
def _make_settings(
    pattern: str, quantization: str, options: tuple[tuple[str, Any], ...]
) -> _core.AllReduceSettings:
    settings = _core.AllReduceSettings()
    settings.set("pattern", pattern)
    settings.set("quantization", quantization)
    if settings.quantization == "fp8_group":
        settings.group_size = _DEFAULT_GROUP
    for name, value in options:
        if name not in _WORDS and name not in _VALUES:
            known = ", ".join(AllReduceOptions.__annotations__)
            raise TypeError(f"unknown option {name!r}; there are {known}")
        if value is None:
            continue
        try:
            if name in _WORDS:
                settings.set(name, value)
            else:
                setattr(settings, name, value)
        except TypeError as error:
            raise TypeError(f"{name}: not usable: {value!r}") from error
    return settings


def settings_of(
    pattern: str, options: Mapping[str, Any], quantization: str = "none"
) -> _core.AllReduceSettings:
    """The extension's object, of AllReduceOptions and `routed_scaling`."""
    try:
        return _make_settings(pattern, quantization, tuple(options.items()))
    except TypeError as error:
        if not isinstance(pattern, str):
            raise TypeError(f"pattern: expected a word, got {pattern!r}") from error
        raise


# Names in messages of the library -> names of the package.
PACKAGE_NAMES = {
    "residual_in": "residual",
    "ar_out": "out.ar_out",
    "residual_out": "out.residual_out",
    "norm_out": "out.norm_out",
    "quant_out": "out.quantized.values",
    "scale_out": "out.quantized.scales",
    "row_scale_out": "out.quantized.global_scale",
    "problem.group": "group_size",
    "problem.accumulation": "accumulate",
    "problem.moe_quantization": "quantization",
}
# The argument whose shape and type are those of the call.
_SOURCES = {"moe_reduction": "token_input", "moe_finalize": "permuted_rows"}
_NAME = re.compile(r"(?<![\w.])(?:(?:problem|moe)\.)?\w+(?=[:,]| and )")


def in_words_of(message: str, names: Mapping[str, str], pattern: str) -> str:
    """A message of the library with its arguments renamed."""
    source = _SOURCES.get(pattern, names.get("input", "input"))
    source = names.get(source, source)
    extents = {"problem.hidden": f"{source}.shape[-1]", "problem.tokens": f"{source}.shape[0]",
               "problem.element": f"{source}.dtype", "element": f"{source}.dtype"}  # fmt: skip

    def renamed(match: re.Match[str]) -> str:
        name = match[0]
        plain = name.removeprefix("moe.")
        found = names.get(name) or names.get(plain) or extents.get(name)
        return found or plain.removeprefix("problem.")

    return _NAME.sub(renamed, message)


def call(
    core: _core.AllReduceWorkspace,
    pattern: str,
    settings: _core.AllReduceSettings,
    arrays: tuple[Mapping[str, Array], Mapping[str, Array], Mapping[str, Array]],
    names: Mapping[str, str] = PACKAGE_NAMES,
) -> str:
    """Runs it; returns the algorithm.

    arrays: inputs, inputs of the MoE patterns and outputs, as the library names them; None: absent.
    names: names of the library -> names of the caller.
    """
    inputs, moe_inputs, outputs = arrays
    try:
        return core.run(
            settings,
            {name: to_core(names.get(name, name), array)
             for name, array in inputs.items() if array is not None},
            {name: to_core(names.get(name, name), array)
             for name, array in moe_inputs.items() if array is not None},
            {name: codes_to_core(names.get(name, name), array)
             for name, array in outputs.items() if array is not None},
        )  # fmt: skip
    except (NotImplementedError, TypeError, ValueError) as error:
        text = in_words_of(str(error), names, pattern)
        if type(error) not in (NotImplementedError, TypeError, ValueError) or text == str(error):
            raise
        raise type(error)(text) from error
