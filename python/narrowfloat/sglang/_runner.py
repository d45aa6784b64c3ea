"""The runner of SGLang's MoE layers that hands rows and routing to EngineExperts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang.srt.layers.moe.moe_runner.base import (
    DispatchMoeRunnerCore,
    MoeQuantInfo,
    MoeRunnerConfig,
)
from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput
from sglang.srt.layers.moe.topk import TopKOutputChecker
from sglang.srt.layers.moe.utils import MoeRunnerBackendLike, resolve_moe_runner_backend

from narrowfloat._engine_experts import EngineExperts
from narrowfloat._engine_formats import NAME


@dataclass
class PackedExperts(MoeQuantInfo):
    """The packed experts of a layer.

    is_scaled: routing weights have the layer's routed_scaling_factor already.
    """

    experts: EngineExperts
    is_scaled: bool


class ExpertsRunner(DispatchMoeRunnerCore):
    """Runs rows of the standard dispatcher, whose ids are those of this rank or -1."""

    @property
    def runner_backend(self) -> MoeRunnerBackendLike:
        """The name."""
        return resolve_moe_runner_backend(NAME)

    def run_from_dispatch(
        self,
        dispatch_output: Any,
        quant_info: PackedExperts,
        runner_config: MoeRunnerConfig,
        hooks: Any = None,
    ) -> StandardCombineInput:
        """The weighted sums over the experts of this rank."""
        if hooks is not None:
            raise NotImplementedError("narrowfloat's experts in SGLang do not have LoRA adapters")
        topk = dispatch_output.topk_output
        if not TopKOutputChecker.format_is_standard(topk):
            raise NotImplementedError(
                f"topk_output: expected ids and weights of experts, got {topk.format.name}; give "
                f"--moe-runner-backend {NAME}"
            )
        out = quant_info.experts(dispatch_output.hidden_states, topk.topk_ids, topk.topk_weights)
        factor = runner_config.routed_scaling_factor
        if factor is not None and not quant_info.is_scaled:
            out *= factor
        return StandardCombineInput(hidden_states=out)
