"""The weights of a Mixture-of-Experts layer as plain arrays: codes, scales, factors, biases.

The form that MoeLayer.prepare() gives to the extension, and that a module keeps and saves.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

from narrowfloat._arrays import Maker, codes_to_core, shape_of, to_core
from narrowfloat._quantized import QuantizedTensor

# Modes -> format of their weights; None: they stay bfloat16.
WEIGHT_FORMATS = {"bf16": None, "fp8_tensor": "fp8_tensor", "fp8_block": "fp8_128x128",
                  "mxfp8": "mxfp8", "mxfp4_mxfp8": "mxfp4", "mxfp4_bf16": "mxfp4",
                  "mxfp4_fp8": "mxfp4", "nvfp4": "nvfp4", "nvfp4_per_token": "nvfp4",
                  "nvfp4_bf16": "nvfp4", "nvfp4_fp8_exact": "nvfp4",
                  "nvfp4_fp8_rounded": "nvfp4", "mxfp4_fp8_token": "mxfp4",
                  "nvfp4_fp8_token": "nvfp4", "mxfp4_int8": "mxfp4",
                  "nvfp4_int8": "nvfp4"}  # fmt: skip
FACTORS = ("up_scale", "gate_scale", "down_scale", "inter_multiplier", "input_multiplier")


@dataclass(frozen=True)
class MoeParts:
    """Canonical weights. arrays: by the names of MoeLayer.prepare()'s arguments, and numbers.

    layouts: scale layouts of w1 and w2.
    """

    arrays: dict[str, Any]
    layouts: tuple[str, str]


def _parts(
    argument: str, weight: Any, scales: Any, layout: str, mode: str
) -> tuple[Any, Any, str]:
    """Values, scales and layout of a weight matrix in either of its forms."""
    format = WEIGHT_FORMATS.get(mode)  # An unknown mode is told by the configuration.
    if not isinstance(weight, QuantizedTensor):
        if scales is None and format not in (None, "fp8_tensor"):
            raise ValueError(f"{argument}: mode {mode} multiplies {format} weights; expected a "
                             f"QuantizedTensor of that format, or codes with {argument}_scales, "
                             f"got {type(weight).__name__}")  # fmt: skip
        codes = codes_to_core if scales is not None else to_core
        return codes(argument, weight), scales, layout
    if scales is not None:
        raise ValueError(f"{argument}_scales: {argument} is a QuantizedTensor, which has its own")
    if mode in WEIGHT_FORMATS and weight.format != format:
        raise ValueError(f"{argument}: mode {mode} multiplies {format or 'bfloat16'} weights, got "
                         f"{weight.format}; choose a mode of these weights")  # fmt: skip
    kept = None if weight.format == "fp8_tensor" else weight.scales
    return codes_to_core(argument, weight.values), kept, weight.scale_layout


def _global_scale(weight: Any) -> Any:
    """The factor of a quantized weight that is no part of its block scales; None for none."""
    if not isinstance(weight, QuantizedTensor):
        return None
    if weight.format == "fp8_tensor":
        return weight.scales.reshape(-1)
    return weight.global_scale


def _over(scale: Any, multiplier: Any, maker: Maker) -> Any:
    """scale / multiplier as float32: what undoes a static multiplier."""
    if multiplier is None:
        return scale
    if isinstance(multiplier, np.ndarray):
        multiplier = maker.from_numpy(multiplier)
    return scale / (np.float32(multiplier) if isinstance(multiplier, Real) else multiplier)


def _per_expert(scale: Any, experts: int) -> Any:
    """One value for all experts as a number, as the extension takes it, or the array."""
    if scale.shape[0] == 1 and experts != 1:
        return float(scale[0])
    return scale


def plain_parts(
    w1: Any, w2: Any, maker: Maker, *, mode: str, is_gated: bool, w1_scales: Any, w2_scales: Any,
    scale_layout: str, bias1: Any, bias2: Any, **factors: Any,
) -> MoeParts:  # fmt: skip
    """The arguments of MoeLayer.prepare() with QuantizedTensors taken apart; None is left out."""
    values1, scales1, layout1 = _parts("w1", w1, w1_scales, scale_layout, mode)
    values2, scales2, layout2 = _parts("w2", w2, w2_scales, scale_layout, mode)
    experts = shape_of("w1", values1)[0]
    first, second = _global_scale(w1), _global_scale(w2)
    if first is not None:
        first = _per_expert(_over(first, factors["input_multiplier"], maker), experts)
    if second is not None:
        second = _per_expert(_over(second, factors["inter_multiplier"], maker), experts)
    defaults = {"up_scale": first, "gate_scale": first if is_gated else None, "down_scale": second}
    arrays = {"w1": values1, "w2": values2, "w1_scales": scales1, "w2_scales": scales2,
              "bias1": bias1, "bias2": bias2}  # fmt: skip
    for name in FACTORS:
        arrays[name] = defaults.get(name) if factors[name] is None else factors[name]
    given = {name: value for name, value in arrays.items() if value is not None}
    return MoeParts(given, (layout1, layout2))
