"""The quantization method "narrowfloat" of vLLM: claims checkpoints, makes their configurations.

This file imports little of vLLM, since vLLM loads plug-ins in each of its processes before it knows
the model. The classes that need the rest are in _configs.py, imported for the first checkpoint.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers import quantization
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from narrowfloat._engine_formats import NAME, claims, method_of

READ = ("modelopt_fp4", "compressed-tensors", "mxfp4", "gpt_oss_mxfp4", "fp8")


class NarrowfloatConfig(QuantizationConfig):
    """vLLM finds this class by the name; from_config() gives the configuration of a checkpoint."""

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
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """The name for checkpoints that this class takes, None for those it leaves to vLLM."""
        return claims(hf_quant_cfg, user_quant, "NARROWFLOAT_VLLM", READ)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> QuantizationConfig:
        """vLLM's own configuration of the format, with our methods for experts."""
        from narrowfloat.vllm._configs import CONFIGS

        return CONFIGS[method_of(config, READ)].from_config(config)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """Never called: from_config() makes other classes."""
        raise NotImplementedError("NarrowfloatConfig: use from_config()")


def register() -> None:
    """Adds the quantization method "narrowfloat" to vLLM; idempotent."""
    quantization.register_quantization_config(NAME)(NarrowfloatConfig)
