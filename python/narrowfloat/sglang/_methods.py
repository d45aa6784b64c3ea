"""Methods for experts: SGLang's own classes create and load the weights, ours run them.

A method of ours inherits create_weights() of the class that SGLang would use, so that the names,
shapes and loaders of its parameters are those that SGLang's models fill. __init__() of that class
is passed over, since it refuses GPUs and runners of SGLang's own kernels.
FusedMoE.weight_loader() looks for "ModelOpt" in the names of classes, so ours has this word, too.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.moe.moe_runner import MoeRunner, MoeRunnerConfig
from sglang.srt.layers.moe.utils import (
    get_moe_a2a_backend,
    get_moe_runner_backend,
    resolve_moe_runner_backend,
)
from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase
from sglang.srt.layers.quantization.compressed_tensors.schemes import (
    CompressedTensorsW4A16Nvfp4MoE,
    CompressedTensorsW8A8Fp8MoE,
)
from sglang.srt.layers.quantization.fp8 import Fp8MoEMethod
from sglang.srt.layers.quantization.modelopt_quant import ModelOptNvFp4FusedMoEMethod
from sglang.srt.layers.quantization.mxfp4 import Mxfp4MoEMethod
from sglang.srt.runtime_context import get_exec

import narrowfloat as nf
from narrowfloat._engine_experts import EngineExperts, StoredExperts, activation_of
from narrowfloat._engine_formats import NAME
from narrowfloat.sglang._runner import PackedExperts


def _refuse(config: MoeRunnerConfig, gated_only: bool) -> None:
    """Raises NotImplementedError for what a layer of experts asks for and does not get."""
    backend, a2a = get_moe_runner_backend().value, get_moe_a2a_backend().value
    moe = get_exec().moe
    reasons = {
        f"--moe-runner-backend {backend} (auto or {NAME} do)": backend not in ("auto", NAME),
        f"--moe-a2a-backend {a2a}": a2a != "none",
        "moving experts between ranks (--enable-eplb)": moe.enable_eplb,
        "rows of each expert apart (no_combine)": config.no_combine,
        "experts without a gate in this format": gated_only and not config.is_gated,
    }
    for what, is_asked in reasons.items():
        if is_asked:
            raise NotImplementedError(f"narrowfloat's experts in SGLang do not have {what}; leave "
                                      "it or narrowfloat away")  # fmt: skip


def _activation(config: MoeRunnerConfig) -> nf.Activation:
    """The activation that SGLang's Triton runner computes for a configuration."""
    name, limit = config.activation, config.gemm1_clamp_limit
    if not config.is_gated:
        return activation_of(f"{name}_no_mul")
    if name == "silu" and config.gemm1_alpha is not None:
        beta = 1.0 if config.gemm1_beta is None else config.gemm1_beta
        return activation_of("silu", config.gemm1_alpha, beta, limit)
    if name == "silu" and limit is not None:
        return activation_of("swiglustep", limit=limit)
    return activation_of(name, limit=config.swiglu_limit)


def _gate_order(config: MoeRunnerConfig) -> str:
    """SGLang's field for interleaved rows is true by default, and read beside an alpha alone."""
    is_interleaved = config.gemm1_alpha is not None and config.gate_up_interleaved
    return "interleaved" if is_interleaved else "gate_up"


class _Experts(FusedMoEMethodBase):
    """The part of all our methods that comes after the parameters are made."""

    gated_only = False
    load_up_proj_weight_first = False
    moe_runner_config: MoeRunnerConfig
    packed: PackedExperts

    def create_moe_runner(
        self, layer: torch.nn.Module, moe_runner_config: MoeRunnerConfig
    ) -> None:
        """Makes the runner, which SGLang finds by our name."""
        _refuse(moe_runner_config, self.gated_only)
        self.moe_runner_config = moe_runner_config
        self.runner = MoeRunner(resolve_moe_runner_backend(NAME), moe_runner_config)

    def get_moe_runner_backend(self, layer: torch.nn.Module) -> Any:
        """Ours."""
        return resolve_moe_runner_backend(NAME)

    def get_moe_routing_method_type(self, layer: torch.nn.Module, requested_method: Any) -> Any:
        """As the model asks."""
        return requested_method

    def stored(self, layer: Any) -> StoredExperts:
        """The loaded weights; each class has its own."""
        raise NotImplementedError

    def process_weights_after_loading(self, layer: Any) -> None:
        """Packs the weights of the layer and frees the loaded ones."""
        config = self.moe_runner_config
        experts = EngineExperts(
            self.stored(layer), _activation(config), is_gated=config.is_gated,
            top_k=config.top_k, total_experts=config.num_experts, out_dtype=layer.params_dtype,
            weight_on_input=config.apply_router_weight_on_input,
            add_bias2=layer.moe_tp_rank == 0,
        )  # fmt: skip
        self.packed = PackedExperts(experts, layer.should_fuse_routed_scaling_factor_in_topk)
        for name in [name for name, _ in layer.named_parameters(recurse=False)]:
            delattr(layer, name)

    def apply(self, layer: torch.nn.Module, dispatch_output: Any) -> Any:
        """The experts of this rank."""
        assert self.runner is not None
        return self.runner.run(dispatch_output, self.packed)

    def _biases(self, layer: Any) -> dict[str, torch.Tensor]:
        if not layer.with_bias:
            return {}
        return {"bias1": layer.w13_weight_bias.data, "bias2": layer.w2_weight_bias.data}


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.data.view(torch.uint8)


def _gate_and_up(scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Global scales of gate and up; one column stands for experts without a gate."""
    columns = scales.reshape(scales.shape[0], -1)
    return columns[:, 0], columns[:, -1]


class NvFp4ModelOpt(_Experts, ModelOptNvFp4FusedMoEMethod):
    """NVFP4 as ModelOpt writes it: global scales multiply."""

    enable_flashinfer_trtllm_moe = False
    use_flashinfer_trtllm_weight_layout = False

    def __init__(self, quant_config: Any) -> None:
        self.quant_config = quant_config

    def stored(self, layer: Any) -> StoredExperts:
        """Gate and up with a global scale of their own each."""
        gate, up = _gate_and_up(layer.w13_weight_scale_2.data)
        return StoredExperts(
            "nvfp4_bf16", _gate_order(self.moe_runner_config), layer.w13_weight.data,
            _bytes(layer.w13_weight_scale), layer.w2_weight.data, _bytes(layer.w2_weight_scale),
            gate_scale=gate, up_scale=up, down_scale=layer.w2_weight_scale_2.data,
        )  # fmt: skip


class NvFp4CompressedTensors(_Experts, CompressedTensorsW4A16Nvfp4MoE):
    """NVFP4 as compressed-tensors writes it: global scales divide."""

    create_weights = CompressedTensorsW4A16Nvfp4MoE.create_weights

    def __init__(self, has_input_global_scale: bool) -> None:
        CompressedTensorsW4A16Nvfp4MoE.__init__(self, has_input_global_scale)

    def stored(self, layer: Any) -> StoredExperts:
        """Gate and up with a global scale of their own each."""
        gate, up = _gate_and_up(1.0 / layer.w13_weight_global_scale.data)
        return StoredExperts(
            "nvfp4_bf16", _gate_order(self.moe_runner_config), layer.w13_weight_packed.data,
            _bytes(layer.w13_weight_scale), layer.w2_weight_packed.data,
            _bytes(layer.w2_weight_scale), gate_scale=gate, up_scale=up,
            down_scale=1.0 / layer.w2_weight_global_scale.data,
        )  # fmt: skip


class Mxfp4(_Experts, Mxfp4MoEMethod):
    """MXFP4, of gpt-oss in one tensor a layer, with biases, or one expert after the other."""

    gated_only = True

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.use_marlin = self.use_deep_gemm = self.use_mega_moe = self.use_flashinfer = False
        self._fi_kernel = None

    def stored(self, layer: Any) -> StoredExperts:
        """Without global scales."""
        return StoredExperts(
            "mxfp4_bf16", _gate_order(self.moe_runner_config), layer.w13_weight.data,
            _bytes(layer.w13_weight_scale), layer.w2_weight.data, _bytes(layer.w2_weight_scale),
            **self._biases(layer),
        )  # fmt: skip


class Fp8Block(_Experts, Fp8MoEMethod):
    """FP8 with blocks of 128 x 128, as DeepSeek writes it; or MXFP4 beside it (DeepSeek-V4)."""

    block_quant, use_mxfp8 = True, False

    def __init__(self, quant_config: Any) -> None:
        self.quant_config = quant_config
        self.weight_block_size = quant_config.weight_block_size
        self.is_fp4_expert = quant_config.is_fp4_experts

    def create_weights(self, layer: torch.nn.Module, *sizes: Any, **options: Any) -> None:
        """SGLang's, with scales of MXFP4 as bytes."""
        if self.is_fp4_expert:
            options["fp4_scale_dtype"] = torch.float8_e8m0fnu
        super().create_weights(layer, *sizes, **options)

    def stored(self, layer: Any) -> StoredExperts:
        """Scales of FP8 are float32."""
        order = _gate_order(self.moe_runner_config)
        if self.is_fp4_expert:
            return StoredExperts(
                "mxfp4_bf16", order, _bytes(layer.w13_weight), _bytes(layer.w13_weight_scale_inv),
                _bytes(layer.w2_weight), _bytes(layer.w2_weight_scale_inv), **self._biases(layer),
            )  # fmt: skip
        return StoredExperts(
            "fp8_block", order, layer.w13_weight.data, layer.w13_weight_scale_inv.data,
            layer.w2_weight.data, layer.w2_weight_scale_inv.data, **self._biases(layer),
        )  # fmt: skip


class Fp8BlockCompressedTensors(_Experts, CompressedTensorsW8A8Fp8MoE):
    """FP8 with blocks of 128 x 128, as compressed-tensors writes it."""

    gated_only = True
    block_quant, static_input_scales = True, False
    create_weights = CompressedTensorsW8A8Fp8MoE.create_weights

    def __init__(self, weight_quant: Any) -> None:
        self.weight_quant = weight_quant
        self.weight_block_size = list(weight_quant.block_structure)

    def stored(self, layer: Any) -> StoredExperts:
        """Scales are float32."""
        return StoredExperts(
            "fp8_block", _gate_order(self.moe_runner_config), layer.w13_weight.data,
            layer.w13_weight_scale.data, layer.w2_weight.data, layer.w2_weight_scale.data,
        )  # fmt: skip
