"""NarrowfloatConfig: how a model's experts are quantized, as transformers takes and saves it."""

from __future__ import annotations

import os
from typing import Any, Literal

from transformers.utils.quantization_config import QuantizationConfigMixin

from narrowfloat import _core
from narrowfloat._linear import STATIC_MODES

METHOD = "narrowfloat"


class NarrowfloatConfig(QuantizationConfigMixin):
    """For `from_pretrained(..., quantization_config=...)`: how the experts are computed.

    mode: one of narrowfloat.moe_modes(); those with static activation scales, fp8_tensor and
        nvfp4, need statistics and plain weights. Default:
        nvfp4_bf16 for plain weights, which are quantized as they load; for quantized ones the mode
        with bfloat16 rows of their format (fp8_block and mxfp8: their own). Of a checkpoint of
        several formats it is the mode of those experts and Linear layers that have its format.
    math: "exact" or "fast", of the quantizer of plain weights.
    modules_to_not_convert: names of modules, or the ends of their names after a dot, whose plain
        experts stay as they are.
    keep_weights: also keep the quantized experts as they are stored, in host memory, as many bytes
        again: save_pretrained() and to(device) need them.
    top_k: experts per token, where the model's configuration calls them by a name that is not
        known here.
    statistics: file of calibrate().
    fast_sums: on a CPU the experts' GEMMs sum as fast as it can, within a GPU's tolerances, and not
        with the same bytes on every CPU.
    checkpoint: what a quantized checkpoint's config.json declares; register() fills it in.
    """

    def __init__(
        self,
        mode: str | None = None,
        *,
        math: Literal["exact", "fast"] = "exact",
        modules_to_not_convert: list[str] | None = None,
        keep_weights: bool = False,
        top_k: int | None = None,
        statistics: str | os.PathLike[str] | None = None,
        fast_sums: bool = False,
        checkpoint: dict[str, Any] | None = None,
        quant_method: str = METHOD,
    ) -> None:
        modes = _core.moe_modes()
        if mode is not None and mode not in modes:
            raise ValueError(f"mode: expected one of {', '.join(modes)}; got {mode!r}")
        if mode in STATIC_MODES and statistics is None:
            raise ValueError(
                f"statistics: mode {mode} has static activation scales and needs the file of "
                "calibrate(); or take a mode whose scales are dynamic, such as nvfp4_per_token"
            )
        if math not in ("exact", "fast"):
            raise ValueError(f"math: expected exact or fast, got {math!r}")
        if quant_method != METHOD:
            raise ValueError(f"quant_method: expected {METHOD}, got {quant_method!r}")
        self.quant_method = quant_method
        self.mode, self.math, self.top_k = mode, math, top_k
        self.modules_to_not_convert = list(modules_to_not_convert or [])
        self.keep_weights, self.checkpoint = keep_weights, checkpoint
        self.statistics = None if statistics is None else os.fspath(statistics)
        self.fast_sums = fast_sums

    def converts(self, name: str) -> bool:
        """Whether the experts of a module are to be quantized."""
        return not any(name == one or name.endswith(f".{one}") or name.startswith(f"{one}.")
                       for one in self.modules_to_not_convert)  # fmt: skip

    def get_loading_attributes(self) -> dict[str, Any]:
        """The fields that the caller decides for a checkpoint that has a configuration."""
        chosen = {"keep_weights": self.keep_weights, "fast_sums": self.fast_sums}
        return chosen if self.mode is None else {**chosen, "mode": self.mode}

    def to_dict(self) -> dict[str, Any]:
        """The entry of a saved model's config.json: its experts are saved in our own form."""
        return {name: value for name, value in super().to_dict().items()
                if name not in ("checkpoint", "fast_sums")}  # fmt: skip
