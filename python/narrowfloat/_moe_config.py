"""The configuration of a Mixture-of-Experts layer, and its way into the extension."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from numbers import Real
from typing import Any

import numpy as np

from narrowfloat import _core
from narrowfloat._arrays import Maker, to_core


@dataclass(frozen=True)
class Activation:
    """Between the two matrices of an expert.

    kind: one of activations(). Parameters are numbers or float32 [local experts]; those that the
    kind does not read stay None. gpt-oss: Activation("swiglu", 1.702, 1.0, 7.0, 7.0).
    """

    kind: str = "swiglu"
    alpha: Any = None
    beta: Any = None
    limit_gate: Any = None
    limit_up: Any = None


@dataclass(frozen=True, kw_only=True)
class MoeConfig:
    """The configuration of a layer.

    hidden, inter: H and I, the experts' width after gating. experts: E. top_k: k.
    mode: one of moe_modes(). method, ..., norm_topk: route().
    gate_order: of w1's rows: "up_gate", "gate_up" (stacked Hugging Face weights), "interleaved".
    expert_offset, local_experts: expert parallelism; default: all experts.
    weight_on_input: the routing weight multiplies the first matrix's result (Llama 4; k is 1).
    add_fc2_bias: false on all ranks of tensor parallelism but one.
    out_dtype: bfloat16, float16 or float32. slot_dtype: of one slot's result, bfloat16 or float32.
    token_tile: rows that an expert's tokens are padded to; a power of two.
    fast_sums: a CPU's GEMMs sum as fast as it can, within a GPU's tolerances, and not with the same
        bytes on every CPU. GPUs, and references, ignore it.
    accumulation, fp32_rows, double_quantize_fc1: references on the CPU (include/narrowfloat/moe.h).
    """

    hidden: int
    inter: int
    experts: int
    top_k: int
    mode: str = "bf16"
    method: str = "renormalize"
    gate_order: str = "up_gate"
    activation: Activation = field(default_factory=Activation)
    shared_experts: int = 0
    n_group: int = 1
    topk_group: int = 1
    routed_scale: float = 1.0
    norm_topk: bool = True
    weights_bf16: bool = False
    grouped_bias_bf16: bool = False
    negative_one_is_empty: bool = False
    expert_offset: int = 0
    local_experts: int | None = None
    weight_on_input: bool = False
    add_fc2_bias: bool = True
    out_dtype: str = "bfloat16"
    slot_dtype: str = "bfloat16"
    token_tile: int | None = None
    fast_sums: bool = False
    accumulation: str = "float32"
    fp32_rows: bool = False
    double_quantize_fc1: bool = False


def factor_to_core(argument: str, value: Any, maker: Maker) -> Any:
    """A number, or an array on the weights' device."""
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, np.ndarray):
        value = maker.from_numpy(value)
    return to_core(argument, value)


def config_to_core(config: MoeConfig, maker: Maker) -> _core.MoeConfig:
    target = _core.MoeConfig()
    for item in fields(config):
        value = getattr(config, item.name)
        if item.name == "local_experts" and value is None:
            value = config.experts - config.expert_offset
        if item.name != "activation":
            setattr(target, item.name, value)
    given = config.activation
    parameters = {
        name: factor_to_core(name, getattr(given, name), maker)
        for name in ("alpha", "beta", "limit_gate", "limit_up")
        if getattr(given, name) is not None
    }
    target.set_activation(given.kind, parameters)
    return target


def config_from_core(source: _core.MoeConfig) -> MoeConfig:
    values = {item.name: getattr(source, item.name) for item in fields(MoeConfig)}
    values["activation"] = Activation(source.activation, **source.activation_parameters)
    return MoeConfig(**values)
