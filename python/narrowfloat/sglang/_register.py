"""The quantization method and the runner "narrowfloat" of SGLang.

The classes for checkpoints are in _configs.py, imported for the first one.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.arg_groups import choices
from sglang.srt.layers import quantization
from sglang.srt.layers.moe import moe_runner
from sglang.srt.layers.quantization.base_config import QuantizationConfig

from narrowfloat._engine_formats import NAME, claims, method_of
from narrowfloat.sglang._runner import ExpertsRunner

READ = ("modelopt_fp4", "compressed-tensors", "mxfp4", "fp8")


class NarrowfloatConfig(QuantizationConfig):
    """SGLang finds this class by the name; from_config() makes that of a checkpoint."""

    def get_name(self) -> str:
        """The name."""
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Types of a model's activations."""
        return [torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        """Hopper or later."""
        return 90

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Files beside config.json that declare a format."""
        return ["hf_quant_config.json"]

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any] | None, user_quant: str | None
    ) -> str | None:
        """The name for checkpoints that this class takes, None for those it leaves to SGLang."""
        return claims(hf_quant_cfg or {}, user_quant, "NARROWFLOAT_SGLANG", READ)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> QuantizationConfig:
        """SGLang's own configuration of the format, with our methods for experts."""
        from narrowfloat.sglang._configs import CONFIGS

        return CONFIGS[method_of(config, READ)].from_config(config)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """Never called: from_config() makes other classes."""
        raise NotImplementedError("NarrowfloatConfig: use from_config()")

    def get_scaled_act_names(self) -> list[str]:
        """None."""
        return []


def register() -> None:
    """Adds the quantization method and the runner "narrowfloat" to SGLang; idempotent."""
    methods = quantization.QUANTIZATION_METHODS
    if NAME in methods:
        return
    choices.add_quantization_method_choices([NAME])
    choices.add_moe_runner_backend_choices([NAME])
    moe_runner.register_moe_runner_core(NAME, ExpertsRunner)
    # SGLang asks its methods in their order and takes the first that claims a checkpoint. Some claim
    # one although the user asked for another method.
    others = dict(methods)
    methods.clear()
    methods.update({NAME: NarrowfloatConfig, **others})
