"""SGLang's configurations of checkpoints, each with our method in place of its own for experts.

What is not an expert, such as attention, stays with SGLang, and so do experts that a checkpoint
leaves plain.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)
from sglang.srt.layers.quantization.fp8 import Fp8Config
from sglang.srt.layers.quantization.modelopt_quant import ModelOptFp4Config
from sglang.srt.layers.quantization.mxfp4 import Mxfp4Config
from sglang.srt.layers.quantization.utils import is_layer_skipped

from narrowfloat._engine_formats import format_of_group, refused_group
from narrowfloat.sglang import _methods

if TYPE_CHECKING:
    import torch


class _ModelOpt(ModelOptFp4Config):
    """NVFP4 of ModelOpt."""

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """SGLang's, but for experts that are quantized."""
        if not isinstance(layer, FusedMoE) or self.is_layer_excluded(prefix):
            return super().get_quant_method(layer, prefix)
        return _methods.NvFp4ModelOpt(self)


class _Mxfp4(Mxfp4Config):
    """MXFP4 by its own name."""

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """SGLang's, but for experts."""
        if not isinstance(layer, FusedMoE):
            return super().get_quant_method(layer, prefix)
        return _methods.Mxfp4(prefix)


class _Fp8(Fp8Config):
    """FP8 with blocks of 128 x 128; its experts may be in MXFP4 (DeepSeek-V4)."""

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """SGLang's, but for experts that are quantized."""
        if not isinstance(layer, FusedMoE) or is_layer_skipped(
            prefix, self.ignored_layers, fused_mapping=self.packed_modules_mapping
        ):
            return super().get_quant_method(layer, prefix)
        return _methods.Fp8Block(self)


class _CompressedTensors(CompressedTensorsConfig):
    """NVFP4, MXFP4 and FP8 of compressed-tensors."""

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """SGLang's, but for experts; None for those that are not quantized."""
        if not isinstance(layer, FusedMoE):
            return super().get_quant_method(layer, prefix)
        scheme = self._scheme_of_experts(layer, prefix)
        if scheme is None:
            return None
        weights = scheme["weights"]
        form = format_of_group(dict(weights))
        if form == "mxfp4":
            return _methods.Mxfp4(prefix)
        if form == "nvfp4":
            return _methods.NvFp4CompressedTensors(scheme["input_activations"] is not None)
        if form == "fp8_block":
            return _methods.Fp8BlockCompressedTensors(weights)
        raise refused_group(prefix, [dict(weights)])

    def _scheme_of_experts(self, layer: torch.nn.Module, prefix: str) -> Any:
        """Returns what the checkpoint declares for the matrices of an expert; None for nothing."""
        self._add_fused_moe_to_target_scheme_map()
        first, *others = (self.get_scheme_dict(layer, f"{prefix}.0.{name}")
                          for name in ("gate_proj", "up_proj", "down_proj"))  # fmt: skip
        if any(other != first for other in others):
            raise NotImplementedError(f"{prefix}: expected one scheme for all matrices of an "
                                      "expert, got several")  # fmt: skip
        return first


CONFIGS: dict[str, Any] = {
    "modelopt_fp4": _ModelOpt, "compressed-tensors": _CompressedTensors, "mxfp4": _Mxfp4,
    "fp8": _Fp8,
}  # fmt: skip
