"""Options of the quantizers: keywords, else FlashInfer's variables; their names in errors."""

from __future__ import annotations

import os
from typing import Any

from narrowfloat._options import FourOverSix, MathMode
from narrowfloat.compat.flashinfer._arrays import dtype_name, scale_of, without_denormals
from narrowfloat.compat.flashinfer._recipe import (
    UNSET,
    NVFP44Over6Config,
    NVFP44Over6ErrMode,
    resolve_nvfp4_4over6,
)

_FAST_OFF = ("FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH", "TRTLLM_DISABLE_FP4_QUANT_FAST_MATH")


def names_of(input: str, scale: str = "") -> dict[str, str]:
    """A table of beginnings of the library's errors -> those of a function here.

    input, scale: the arguments of the function that these are there.
    """
    names = {"math mode": "math", "input": input, "cols": f"{input}: columns"}
    if scale:
        for name in ("global_scale", "encode_scale", "encode_scales", "decode_scales",
                     "base_decode_scale"):  # fmt: skip
            names[name] = scale
    return names


def names_of_gated(input: str, scale: str) -> dict[str, str]:
    """As names_of(), of a function whose input has twice as many columns."""
    return names_of(input, scale) | {
        "gate_up": input, "cols": f"{input}: half of the columns"
    }  # fmt: skip


def math_mode(math: MathMode | None, backend: str = "cuda") -> MathMode:
    """The mode: the argument, else what FlashInfer's variables say, else fast: its bits.

    backend: upstream's kernels of "cute-dsl" read the first variable alone.
    """
    if math is not None:
        return math
    names = _FAST_OFF[:1] if backend == "cute-dsl" else _FAST_OFF
    return "exact" if any(os.environ.get(name) == "1" for name in names) else "fast"


def as_read(input: Any, math: MathMode | None, backend: str = "cuda") -> Any:
    """The input as upstream's kernels read it where its variables ask for the mode exact.

    Those that nvcc compiles are built with -use_fast_math, so that denormals are zeros to them even
    then. Those of "cute-dsl" keep denormals, as the mode exact of the argument does.
    """
    if math is not None or backend == "cute-dsl" or is_coded(input):
        return input
    return without_denormals(input) if math_mode(None) == "exact" else input


def four_over_six_option(choice: Any, recipe: Any = UNSET) -> FourOverSix | None:
    """The library's option. choice: the argument four_over_six: True, False, a FourOverSix or None.

    recipe: the argument nvfp4_4over6, else what FlashInfer's variables ask for.
    """
    if choice is not None and recipe is not UNSET:
        raise ValueError("four_over_six: nvfp4_4over6 says it already; give one of them")
    if choice is not None:
        return (FourOverSix() if choice else None) if isinstance(choice, bool) else choice
    config = resolve_nvfp4_4over6(recipe)
    if config is None:
        return None
    return FourOverSix(
        "mae" if config.err_mode == NVFP44Over6ErrMode.MAE else "mse",
        "fast" if config.err_use_fast_math else "strict",
        256 if config.e4m3_max == 256 else 448,
    )


def is_coded(input: Any) -> bool:
    """FP8, for which FlashInfer's variables do not count."""
    return dtype_name(input) in ("float8_e4m3fn", "uint8")


def nvfp4_mode(math: MathMode | None, input: Any, backend: str = "cuda") -> MathMode:
    """The mode of a quantizer to NVFP4. Upstream's variables count for FP8 in "cute-dsl" alone."""
    if is_coded(input) and backend != "cute-dsl":
        return math or "fast"
    return math_mode(math, backend)


def nvfp4_options(
    math: MathMode | None, scale: Any, input: Any, choice: Any = None, recipe: Any = UNSET,
    backend: str = "cuda",
) -> dict[str, Any]:  # fmt: skip
    """The options of a quantizer to NVFP4. choice, recipe: four_over_six and nvfp4_4over6."""
    is_open = choice is None and is_coded(input)
    if is_open and isinstance(recipe, NVFP44Over6Config):
        raise ValueError(
            f"nvfp4_4over6: requires fp16 or bf16 input, got {dtype_name(input)}; expected None"
        )
    return {
        "math": nvfp4_mode(math, input, backend),
        "encode_scale": scale_of("global_scale", scale, input),
        "four_over_six": None if is_open else four_over_six_option(choice, recipe),
    }


def refuse_four_over_six(choice: Any, recipe: Any = UNSET) -> None:
    """ValueError for a choice that is made with MXFP4."""
    if choice:
        raise ValueError("four_over_six: an option of NVFP4, not of MXFP4")
    if isinstance(recipe, NVFP44Over6Config):
        raise ValueError("nvfp4_4over6: an option of NVFP4, not of MXFP4")


def norm_options(
    format: str, math: MathMode | None, global_scale: Any, input: Any, choice: Any
) -> dict[str, Any]:
    """Options of the fused norms, whose scale may be absent. choice: the argument four_over_six.

    Upstream's norms read none of its variables.
    """
    if format == "wide" and (choice or isinstance(choice, FourOverSix)):
        raise ValueError("four_over_six: an option of scales of 16 elements; expected None")
    if format != "mxfp4":
        scale = 1.0 if global_scale is None else global_scale
        return nvfp4_options(math or "fast", scale, input, choice or False)
    refuse_four_over_six(choice)
    return {"math": math or "fast"}
