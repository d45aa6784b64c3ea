"""Methods for experts: vLLM's own classes create and load the weights, ours run them.

A method of ours inherits create_weights() of the class that vLLM would use, so that the names,
shapes and loaders of its parameters are those that vLLM's models fill. __init__() of that class is
passed over, since it chooses one of vLLM's own kernels. RoutedExperts.weight_loader() looks for
"ModelOpt" and "compressed" in the names of classes, so ours have these words, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w4a4_mxfp4,
    compressed_tensors_moe_w4a4_nvfp4,
    compressed_tensors_moe_w8a8_fp8,
)
from vllm.model_executor.layers.quantization.fp8 import Fp8MoEMethod
from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4FusedMoE
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4MoEMethod, Mxfp4MoEMethod

from narrowfloat._engine_experts import EngineExperts, StoredExperts, activation_of

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig


def _refuse(moe: FusedMoEConfig) -> None:
    """Raises NotImplementedError for what a layer of experts asks for and does not get."""
    parallel = moe.moe_parallel_config
    reasons = {
        "LoRA adapters of experts": moe.is_lora_enabled,
        "moving experts between ranks (--enable-eplb)": parallel.enable_eplb,
        "an intermediate size that is padded for tensor parallelism": moe.tp_shard_with_padding,
        "data parallelism with experts on several ranks": parallel.use_all2all_kernels,
    }
    for what, is_asked in reasons.items():
        if is_asked:
            raise NotImplementedError(f"narrowfloat's experts in vLLM do not have {what}; leave it "
                                      "or narrowfloat away")  # fmt: skip


class _Experts(FusedMoEMethodBase):
    """The part of all our methods that comes after the weights are loaded."""

    experts: EngineExperts
    supports_pre_processed_weights = False  # Packed weights are no parameters.

    def __init__(self, moe: FusedMoEConfig) -> None:
        FusedMoEMethodBase.__init__(self, moe)
        _refuse(moe)

    @property
    def supports_eplb(self) -> bool:
        """No: the weights of experts are packed."""
        return False

    @property
    def is_monolithic(self) -> bool:
        """No: vLLM routes."""
        return False

    @property
    def skip_forward_padding(self) -> bool:
        """No."""
        return False

    @property
    def has_unpadded_output(self) -> bool:
        """No: no size is rounded up."""
        return False

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, *_: Any, **__: Any
    ) -> tuple[int, int]:
        """Both sizes as they are."""
        return hidden_size, intermediate_size_per_partition

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """None: it is for vLLM's kernels."""

    def dequantize_weight(self, layer: Any) -> Any:
        """Refused: the stored weights are gone."""
        raise NotImplementedError("experts of narrowfloat cannot be quantized again")

    def stored(self, layer: Any) -> StoredExperts:
        """The loaded weights; each class has its own."""
        raise NotImplementedError

    def process_weights_after_loading(self, layer: Any) -> None:
        """Packs the weights of the layer and frees the loaded ones."""
        moe = self.moe
        numbers = []
        for name in ("swiglu_alpha", "swiglu_beta", "swiglu_limit"):
            given = getattr(layer, name)
            numbers.append(getattr(moe, name) if given is None else given)
        self.experts = EngineExperts(
            self.stored(layer), activation_of(moe.activation.value, *numbers),
            is_gated=moe.is_act_and_mul, top_k=moe.experts_per_token,
            total_experts=moe.num_experts, out_dtype=moe.in_dtype,
            weight_on_input=layer.apply_router_weight_on_input,
            add_bias2=moe.moe_parallel_config.tp_rank == 0,
        )  # fmt: skip
        for name in [name for name, _ in layer.named_parameters(recurse=False)]:
            delattr(layer, name)

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any,
        shared_experts_input: torch.Tensor | None,
    ) -> torch.Tensor:
        """The experts of this rank. vLLM runs shared experts itself, beside this."""
        return self.experts(x, topk_ids, topk_weights, layer.expert_map)

    @property
    def _gate_order(self) -> str:
        return "interleaved" if self.moe.activation.value == "swigluoai" else "gate_up"

    def _biases(self, layer: Any) -> dict[str, torch.Tensor]:
        if not self.moe.has_bias:
            return {}
        return {"bias1": layer.w13_bias.data, "bias2": layer.w2_bias.data}


def _bytes(scales: torch.Tensor) -> torch.Tensor:
    return scales.data.view(torch.uint8)


class NvFp4ModelOpt(_Experts, ModelOptNvFp4FusedMoE):
    """NVFP4 as ModelOpt writes it: global scales multiply."""

    use_global_sf = False

    def __init__(self, quant_config: Any, moe_config: FusedMoEConfig) -> None:
        _Experts.__init__(self, moe_config)
        if quant_config.moe_activation_override is not None:
            raise NotImplementedError("quantization_config.moe.activation: narrowfloat multiplies "
                                      "NVFP4 weights with bfloat16 rows; leave it away")  # fmt: skip
        self.quant_config = quant_config

    def stored(self, layer: Any) -> StoredExperts:
        """Gate and up with a global scale of their own each."""
        first = layer.w13_weight_scale_2.data
        return StoredExperts(
            "nvfp4_bf16", self._gate_order, layer.w13_weight.data, _bytes(layer.w13_weight_scale),
            layer.w2_weight.data, _bytes(layer.w2_weight_scale), gate_scale=first[:, 0],
            up_scale=first[:, -1], down_scale=layer.w2_weight_scale_2.data,
        )  # fmt: skip


class NvFp4CompressedTensors(
    _Experts, compressed_tensors_moe_w4a4_nvfp4.CompressedTensorsW4A4Nvfp4MoEMethod
):
    """NVFP4 as compressed-tensors writes it: global scales divide."""

    group_size = 16

    def stored(self, layer: Any) -> StoredExperts:
        """Gate and up with a global scale of their own each."""
        first = 1.0 / layer.w13_weight_global_scale.data
        return StoredExperts(
            "nvfp4_bf16", self._gate_order, layer.w13_weight_packed.data,
            _bytes(layer.w13_weight_scale), layer.w2_weight_packed.data,
            _bytes(layer.w2_weight_scale), gate_scale=first[:, 0], up_scale=first[:, -1],
            down_scale=1.0 / layer.w2_weight_global_scale.data,
        )  # fmt: skip


class Mxfp4CompressedTensors(
    _Experts, compressed_tensors_moe_w4a4_mxfp4.CompressedTensorsW4A4Mxfp4MoEMethod
):
    """MXFP4 as compressed-tensors writes it."""

    group_size = 32

    def stored(self, layer: Any) -> StoredExperts:
        """Without global scales."""
        return StoredExperts(
            "mxfp4_bf16", self._gate_order, layer.w13_weight_packed.data,
            _bytes(layer.w13_weight_scale), layer.w2_weight_packed.data,
            _bytes(layer.w2_weight_scale),
        )  # fmt: skip


class _Mxfp4(_Experts):
    """MXFP4 under the names of MXFP4 models."""

    def stored(self, layer: Any) -> StoredExperts:
        """Without global scales."""
        return StoredExperts(
            "mxfp4_bf16", self._gate_order, layer.w13_weight.data, _bytes(layer.w13_weight_scale),
            layer.w2_weight.data, _bytes(layer.w2_weight_scale), **self._biases(layer),
        )  # fmt: skip


class Mxfp4(_Mxfp4, Mxfp4MoEMethod):
    """MXFP4, one expert after the other (DeepSeek-V4, Kimi-K3)."""


class Mxfp4GptOss(_Mxfp4, GptOssMxfp4MoEMethod):
    """MXFP4, all experts of a layer in one tensor, with biases (gpt-oss)."""


class Fp8Block(_Experts, Fp8MoEMethod):
    """FP8 with blocks of 128 x 128, as DeepSeek writes it."""

    block_quant = True
    weight_scale_name = "weight_scale_inv"
    weight_scale_refine = None

    def __init__(self, quant_config: Any, moe: FusedMoEConfig) -> None:
        _Experts.__init__(self, moe)
        self.quant_config = quant_config
        self.weight_block_size = self.moe_block_shape = quant_config.weight_block_size

    def stored(self, layer: Any) -> StoredExperts:
        """Scales are float32."""
        return StoredExperts(
            "fp8_block", self._gate_order, layer.w13_weight.data,
            layer.w13_weight_scale_inv.data, layer.w2_weight.data, layer.w2_weight_scale_inv.data,
            **self._biases(layer),
        )  # fmt: skip


class Fp8BlockCompressedTensors(
    _Experts, compressed_tensors_moe_w8a8_fp8.CompressedTensorsW8A8Fp8MoEMethod
):
    """FP8 with blocks of 128 x 128, as compressed-tensors writes it."""

    block_quant = True
    static_input_scales = False

    def __init__(self, weight_quant: Any, moe: FusedMoEConfig) -> None:
        _Experts.__init__(self, moe)
        self.weight_quant = weight_quant
        self.weight_block_size = list(weight_quant.block_structure)

    def stored(self, layer: Any) -> StoredExperts:
        """Scales are float32."""
        return StoredExperts(
            "fp8_block", self._gate_order, layer.w13_weight.data, layer.w13_weight_scale.data,
            layer.w2_weight.data, layer.w2_weight_scale.data,
        )  # fmt: skip
