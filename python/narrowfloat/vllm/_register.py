"""The quantization method "narrowfloat" of vLLM: claims checkpoints, makes their configurations.

This file imports little of vLLM, since vLLM loads plug-ins in each of its processes before it knows
the model. The classes that need the rest are in _configs.py, imported for the first checkpoint.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from vllm.model_executor.layers import quantization
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

NAME = "narrowfloat"
VARIABLE = "NARROWFLOAT_VLLM"
READ = ("modelopt_fp4", "compressed-tensors", "mxfp4", "gpt_oss_mxfp4", "fp8")


def _algorithm(declared: dict[str, Any]) -> str:
    """ModelOpt's name of the format, of either form of its declaration."""
    return str((declared.get("quantization") or declared).get("quant_algo") or "").upper()


def method_of(declared: dict[str, Any]) -> str:
    """Which of READ a checkpoint's declaration is. NotImplementedError for others."""
    method = str(declared.get("quant_method") or "")
    if _algorithm(declared) in ("NVFP4", "W4A16_NVFP4"):
        return "modelopt_fp4"
    blocks = declared.get("weight_block_size")
    if method == "fp8" and blocks != [128, 128] and declared.get("store_dtype") != "mxfp4":
        raise NotImplementedError(f"weight_block_size: expected [128, 128], got {blocks}; "
                                  "narrowfloat does not run this form of FP8")  # fmt: skip
    if method == "compressed-tensors":
        _check_groups(declared)
    if method in READ and method != "modelopt_fp4":
        return method
    found = _algorithm(declared) or method or "none"
    raise NotImplementedError(f"quantization_config: expected NVFP4 of ModelOpt, or one of "
                              f"{', '.join(READ[1:])}, got {found}; leave --quantization "
                              "narrowfloat away for this checkpoint")  # fmt: skip


def _check_groups(declared: dict[str, Any]) -> None:
    """NotImplementedError where compressed-tensors declares no format that experts run in.

    Which group is that of experts is known from a model alone, whose layers are looked at again.
    """
    groups = declared.get("config_groups") or {}
    weights = [group["weights"] for group in groups.values()
               if isinstance(group, dict) and group.get("weights")]  # fmt: skip
    for given in weights:
        floats = given.get("type") == "float"
        blocks = given.get("strategy") == "block" and given.get("block_structure") == [128, 128]
        if floats and (given.get("num_bits") == 4 or (given.get("num_bits") == 8 and blocks)):
            return
    found = ", ".join(f"{given.get('type')} of {given.get('num_bits')} bits by "
                      f"{given.get('strategy')}" for given in weights)  # fmt: skip
    raise NotImplementedError(f"config_groups: expected floats of 4 bits, or of 8 bits in blocks of "
                              f"128 x 128, got {found or 'none'}; leave --quantization narrowfloat "
                              "away for this checkpoint")  # fmt: skip


def _is_on() -> bool:
    value = os.environ.get(VARIABLE, "0")
    if value not in ("0", "1"):
        raise ValueError(f"{VARIABLE}: expected 0 or 1, got {value!r}")
    return value == "1"


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
        """Hopper."""
        return 90

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Files beside config.json that declare a format."""
        return ["hf_quant_config.json"]

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """The name for checkpoints that this class takes, None for those it leaves to vLLM.

        Asked for by name it takes all: from_config() then says what it does not read.
        """
        if user_quant == NAME:
            return NAME
        if user_quant is not None or not _is_on():
            return None
        try:
            method_of(hf_quant_cfg)
        except NotImplementedError:
            return None
        return NAME

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> QuantizationConfig:
        """vLLM's own configuration of the format, with our methods for experts."""
        from narrowfloat.vllm._configs import CONFIGS

        return CONFIGS[method_of(config)].from_config(config)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """Never called: from_config() makes other classes."""
        raise NotImplementedError("NarrowfloatConfig: use from_config()")


def register() -> None:
    """Adds the quantization method "narrowfloat" to vLLM; idempotent."""
    quantization.register_quantization_config(NAME)(NarrowfloatConfig)
