"""A matrix of packed weights with the rounding of its input rows: the arithmetic of a layer's mode.

Rows that a mode quantizes are quantized as a MoE layer does it (moe spec 2), so that a LinearLayer
of a mode is what one matrix of such a layer computes.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from narrowfloat import _core
from narrowfloat._arrays import Maker, TorchMaker, codes_to_core, maker_of, shape_of, to_core
from narrowfloat._moe_call import to_bfloat16
from narrowfloat._moe_weights import WEIGHT_FORMATS
from narrowfloat._operations import quantize
from narrowfloat._products import TileTable, multiply_rows
from narrowfloat._quantized import QuantizedTensor

STATIC_MODES = ("fp8_tensor", "nvfp4")  # Their activation scales are constants.
_ROWS = {"fp8_block": "fp8_1x128", "mxfp4_fp8": "fp8_1x128", "nvfp4_fp8_exact": "fp8_1x128",
         "nvfp4_fp8_rounded": "fp8_1x128", "mxfp8": "mxfp8", "mxfp4_mxfp8": "mxfp8",
         "nvfp4": "nvfp4", "nvfp4_per_token": "nvfp4_per_token",
         "mxfp4_fp8_token": "fp8_token", "nvfp4_fp8_token": "fp8_token"}  # fmt: skip
# The largest finite numbers of types of rows: multipliers of rows that are nearly zero.
_FLOAT_MAX = float(np.finfo(np.float32).max)
_LARGEST = {"bfloat16": 2.0**128 - 2.0**120, "float16": 65504.0}
# How the library's messages begin -> the caller's argument.
_NAMES = {r"weights\.values|w_scales|weights\.scales|w": "weight",
          r"a\.values|a\.scales|a\.row_scale|a": "input"}  # fmt: skip


def _check_mode(mode: str) -> None:
    if mode not in WEIGHT_FORMATS:
        raise ValueError(f"mode: expected one of {', '.join(WEIGHT_FORMATS)}; got {mode!r}")


def renamed(error: Exception) -> Exception:
    """An error of the library with the caller's name of the argument."""
    text = str(error)
    for ours, argument in _NAMES.items():
        text = re.sub(rf"^({ours}): ", f"{argument}: ", text)
    return type(error)(text)


@dataclass(frozen=True)
class LinearWeights:
    """Canonical weights of a matrix [n, k]: codes and scales as quantize() makes them.

    values, scales: of [n, k]; scales absent for bf16 and fp8_tensor. factor: what is left of the
    weights' scales, one number. multiplier: of rows with static scales; else 1. bias: [n].
    """

    mode: str
    shape: tuple[int, int]
    values: Any
    scales: Any
    layout: str
    factor: float
    multiplier: float
    bias: Any

    def __post_init__(self) -> None:
        """ValueError for what no weights have, as in the state of a module that was damaged."""
        _check_mode(self.mode)
        if not 0 < self.multiplier < float("inf"):
            raise ValueError(f"input_multiplier: expected a finite number above 0, got "
                             f"{self.multiplier}")  # fmt: skip
        if self.bias is not None and shape_of("bias", self.bias) != self.shape[:1]:
            raise ValueError(f"bias: expected [{self.shape[0]}], got "
                             f"{list(shape_of('bias', self.bias))}")  # fmt: skip

    @classmethod
    def of(
        cls, weight: Any, mode: str, *, bias: Any = None, input_multiplier: float | None = None,
        math: Literal["exact", "fast"] = "exact",
    ) -> LinearWeights:  # fmt: skip
        """Takes apart a QuantizedTensor, or quantizes plain numbers. ValueError with the reason."""
        _check_mode(mode)
        shape = weight.shape if isinstance(weight, QuantizedTensor) else shape_of("weight", weight)
        if len(shape) != 2:
            raise ValueError(f"weight: expected [out_features, in_features], got {list(shape)}")
        rows, cols = map(int, shape)
        is_static = mode in STATIC_MODES
        if is_static != (input_multiplier is not None):
            raise ValueError(
                "input_multiplier: " + (
                    f"mode {mode} has static activation scales; give the largest value of the "
                    "format (fp8_tensor: 448, nvfp4: 2688) over the largest magnitude of the input"
                    if is_static else f"mode {mode} has none; leave it out")
            )  # fmt: skip
        multiplier = 1.0 if input_multiplier is None else float(np.float32(input_multiplier))
        values, scales, layout, factor = _parts(weight, mode, math)
        return cls(mode, (rows, cols), values, scales, layout, factor, multiplier, bias)


def _parts(weight: Any, mode: str, math: Any) -> tuple[Any, Any, str, float]:
    """values, scales, layout and factor of a weight."""
    format = WEIGHT_FORMATS[mode]
    if not isinstance(weight, QuantizedTensor):
        if format is None:
            return to_bfloat16("weight", weight), None, "linear", 1.0
        weight = quantize(weight, format, layout="linear", math=math)
    elif weight.format != format:
        raise ValueError(f"weight: mode {mode} multiplies {format or 'bfloat16'} weights, got "
                         f"{weight.format}")  # fmt: skip
    if weight.layout.value_cols not in (weight.shape[-1], 0) and format == "mxfp8":
        raise ValueError(f"weight: expected {weight.shape[-1]} columns of codes, without padding, "
                         f"got {weight.layout.value_cols}")  # fmt: skip
    factor = weight.scales if format == "fp8_tensor" else weight.global_scale
    if factor is not None and factor.reshape(-1).shape[0] != 1:
        raise ValueError("weight: expected one global scale, got one for each row")
    scales = None if format == "fp8_tensor" else weight.scales
    number = 1.0 if factor is None else float(factor.reshape(-1)[0])
    return weight.values, scales, weight.scale_layout, number


class LinearLayer:
    """Packed weights of one matrix on one device; immutable."""

    def __init__(self, weights: LinearWeights) -> None:
        """Packs weights where they lie."""
        values = weights.values
        try:
            self._packed = _core.GroupedWeights.prepare(
                weights.mode, codes_to_core("weight", values.reshape(1, *values.shape)),
                None if weights.scales is None else codes_to_core("weight", weights.scales),
                weights.layout,
            )  # fmt: skip
        except (ValueError, NotImplementedError) as error:
            raise renamed(error) from None
        packed = self._packed.rows, self._packed.cols
        if packed != weights.shape:
            raise ValueError(f"weight: expected codes of {list(weights.shape)}, got those of "
                             f"{list(packed)}")  # fmt: skip
        self.mode, self.shape, self.bias = weights.mode, weights.shape, weights.bias
        self.multiplier = weights.multiplier
        self._maker: Maker = maker_of("weight", values)
        self._scale = float(np.float32(weights.factor) / np.float32(weights.multiplier))
        self._table = None
        if isinstance(self._maker, TorchMaker):
            self._table = TileTable.of(self._maker.device)

    @property
    def bytes(self) -> int:
        """Bytes of the packed weights."""
        return self._packed.bytes

    @property
    def device(self) -> Any:
        """Where it computes: torch's device, or "cpu"."""
        return self._maker.device if isinstance(self._maker, TorchMaker) else "cpu"

    def run(self, rows: Any, dtype: str) -> Any:
        """[T, n] of float32 or bfloat16, of plain rows [T, k]: float32, float16 or bfloat16."""
        if not rows.shape[0]:
            return self._maker.empty((0, self.shape[0]), dtype)
        try:
            values, scales, row_scale = self._quantized(rows)
            return multiply_rows(
                self._packed, values, scales, dtype, row_scale=row_scale, scale=self._scale,
                bias=self.bias, table=self._table,
            )  # fmt: skip
        except (ValueError, NotImplementedError) as error:
            raise renamed(error) from None

    def _quantized(self, rows: Any) -> tuple[Any, Any, Any]:
        """Codes, block scales and row scales of rows, in the mode's form."""
        format = _ROWS.get(self.mode)
        if self.mode == "fp8_tensor":
            wide = rows.float() if isinstance(self._maker, TorchMaker) else rows.astype(np.float32)
            made = quantize(wide * self.multiplier, "fp8_tensor", fp8_decode_scale=1.0)
            return made.values, None, None
        if format is None:
            return to_bfloat16("input", rows), None, None
        if format == "fp8_token":
            return self._token_rows(rows)
        how: Any = {"encode_scale": self.multiplier} if format == "nvfp4" else {}
        made = quantize(to_core("input", rows), format, layout="linear", **how)
        row_scale = made.global_scale if format == "nvfp4_per_token" else None
        return made.values, made.scales, row_scale

    def _token_rows(self, rows: Any) -> tuple[Any, None, Any]:
        """E4M3 codes, and row scales: the rule `reciprocal` with the row as the block."""
        wide = rows.float() if isinstance(self._maker, TorchMaker) else rows.astype(np.float32)
        lib: Any = sys.modules["torch"] if isinstance(self._maker, TorchMaker) else np
        numbers = lib.nan_to_num(abs(wide), nan=0.0, posinf=float("inf"))
        largest = lib.amax(numbers, axis=1)
        # A quotient of two tensors: torch makes a product of a number over a tensor.
        with np.errstate(divide="ignore", over="ignore"):
            multiplier = lib.full_like(largest, 448.0) / largest
        most = _LARGEST.get(str(rows.dtype).removeprefix("torch."), _FLOAT_MAX)
        has_scale = (largest > 0) & (largest < float("inf"))
        one = lib.ones_like(multiplier)
        multiplier = lib.where(has_scale, lib.clip(multiplier, 0.0, most), one)
        made = quantize(wide * multiplier[:, None], "fp8_tensor", fp8_decode_scale=1.0)
        return made.values, None, one / multiplier
