"""Options of the quantizers: keywords, else FlashInfer's variables; their names in errors."""

from __future__ import annotations

import os
from typing import Any

from narrowfloat._options import FourOverSix, MathMode
from narrowfloat.compat.flashinfer._arrays import dtype_name, scale_of

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


def math_mode(math: MathMode | None) -> MathMode:
    """The mode: the argument, else what FlashInfer's variables say, else exact."""
    if math is not None:
        return math
    values = [os.environ[name] for name in _FAST_OFF if name in os.environ]
    return "fast" if values and "1" not in values else "exact"


def four_over_six_option(choice: Any) -> FourOverSix | None:
    """The argument (True, False or a FourOverSix), else what FlashInfer's variables ask for."""
    if choice is not None:
        return (FourOverSix() if choice else None) if isinstance(choice, bool) else choice
    get = os.environ.get
    if get("FLASHINFER_NVFP4_4OVER6") != "1":
        return None
    error: Any = get("FLASHINFER_NVFP4_4OVER6_ERR_MODE", "MAE").lower()
    if error not in ("mae", "mse"):
        raise ValueError(f"FLASHINFER_NVFP4_4OVER6_ERR_MODE: expected MAE or MSE, got {error!r}")
    return FourOverSix(
        error,
        "fast" if get("FLASHINFER_NVFP4_4OVER6_ERR_USE_FAST_MATH") == "1" else "strict",
        256 if get("FLASHINFER_NVFP4_4OVER6_E4M3_USE_256") == "1" else 448,
    )


def is_coded(input: Any) -> bool:
    """FP8, for which FlashInfer's variables do not count."""
    return dtype_name(input) in ("float8_e4m3fn", "uint8")


def nvfp4_mode(math: MathMode | None, input: Any) -> MathMode:
    """The mode of a quantizer to NVFP4."""
    return (math or "exact") if is_coded(input) else math_mode(math)


def nvfp4_options(
    math: MathMode | None, scale: Any, input: Any, choice: Any = None
) -> dict[str, Any]:
    """The options of a quantizer to NVFP4. choice: the argument four_over_six."""
    is_open = choice is None and is_coded(input)
    return {
        "math": nvfp4_mode(math, input),
        "encode_scale": scale_of("global_scale", scale, input),
        "four_over_six": None if is_open else four_over_six_option(choice),
    }


def refuse_four_over_six(choice: Any) -> None:
    """ValueError for a choice that is made with MXFP4."""
    if choice:
        raise ValueError("four_over_six: an option of NVFP4, not of MXFP4")


def norm_options(
    format: str, math: MathMode | None, global_scale: Any, input: Any, choice: Any
) -> dict[str, Any]:
    """Options of the fused norms, whose scale may be absent. choice: the argument four_over_six."""
    if format == "nvfp4":
        scale = 1.0 if global_scale is None else global_scale
        return nvfp4_options(math, scale, input, choice)
    refuse_four_over_six(choice)
    return {"math": math or "exact"}
