"""vLLM's configurations of checkpoints, each with our method in place of its own for experts.

What is not an expert, such as attention, stays with vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config, Mxfp4Config
from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped

from narrowfloat._engine_formats import format_of_group, refused_group
from narrowfloat.vllm import _methods

if TYPE_CHECKING:
    import torch


class _ModelOpt(ModelOptNvFp4Config):
    """NVFP4 of ModelOpt."""

    FusedMoEMethodCls = _methods.NvFp4ModelOpt


class _Mxfp4(Mxfp4Config):
    """MXFP4 by its own name."""

    def _make_moe_method(self, moe: Any) -> Any:
        return _methods.Mxfp4(moe)


class _GptOss(GptOssMxfp4Config):
    """MXFP4 of gpt-oss."""

    def _make_moe_method(self, moe: Any) -> Any:
        return _methods.Mxfp4GptOss(moe)


class _Fp8(Fp8Config):
    """FP8 with blocks of 128 x 128; its experts may be in MXFP4 (DeepSeek-V4)."""

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """vLLM's, but for experts that are quantized."""
        if not isinstance(layer, RoutedExperts) or is_layer_skipped(
            prefix=prefix, ignored_layers=self.ignored_layers,
            fused_mapping=self.packed_modules_mapping, match_mode=self.ignored_layers_match_mode,
        ):  # fmt: skip
            return super().get_quant_method(layer, prefix)
        if self.store_dtype == "mxfp4":
            return _methods.Mxfp4(layer.moe_config)
        return _methods.Fp8Block(self, layer.moe_config)


class _CompressedTensors(CompressedTensorsConfig):
    """NVFP4, MXFP4 and FP8 of compressed-tensors."""

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """vLLM's, but for experts."""
        if not isinstance(layer, RoutedExperts):
            return super().get_quant_method(layer, prefix)
        scheme = self._scheme_of_experts(layer, prefix)
        if scheme is None:
            return UnquantizedFusedMoEMethod(layer.moe_config)
        weights: Any = scheme["weights"]
        form = format_of_group(dict(weights))
        if form == "mxfp4":
            return _methods.Mxfp4CompressedTensors(layer.moe_config)
        if form == "nvfp4":
            return _methods.NvFp4CompressedTensors(layer.moe_config)
        if form == "fp8_block":
            return _methods.Fp8BlockCompressedTensors(weights, layer.moe_config)
        raise refused_group(prefix, [dict(weights)])

    def _scheme_of_experts(self, layer: Any, prefix: str) -> dict[str, Any] | None:
        """Returns what the checkpoint declares for the matrices of an expert; None for nothing."""
        self._add_fused_moe_to_target_scheme_map()
        names = (layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name)
        first, *others = (self.get_scheme_dict(layer, f"{prefix}.0.{name}") for name in names
                          if name is not None)  # fmt: skip
        if any(other != first for other in others):
            raise NotImplementedError(f"{prefix}: expected one scheme for all matrices of an "
                                      "expert, got several")  # fmt: skip
        return first


CONFIGS: dict[str, Any] = {
    "modelopt_fp4": _ModelOpt, "compressed-tensors": _CompressedTensors, "mxfp4": _Mxfp4,
    "gpt_oss_mxfp4": _GptOss, "fp8": _Fp8,
}  # fmt: skip
