"""The experts of one layer of an inference engine: stored weights become a layer that runs.

An engine loads the weights of its experts in the form of the checkpoint and routes by itself. This
file has what does not depend on the engine: which modes stored formats run in, which activations
there are, and the map from a model's expert ids to those of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import narrowfloat as nf
from narrowfloat.torch import Moe

_OUT_DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
# Names of engines -> kinds of this library. Gated ones come first.
_KINDS = {
    "silu": "swiglu", "swigluoai": "swiglu", "swigluoai_uninterleave": "swiglu",
    "swiglustep": "swiglu_step", "gelu": "geglu_erf", "gelu_tanh": "geglu_tanh",
    "silu_no_mul": "silu", "gelu_no_mul": "gelu_erf", "gelu_tanh_no_mul": "gelu_tanh",
    "relu2_no_mul": "relu2",
}  # fmt: skip


def activation_of(
    name: str, alpha: float | None = None, beta: float | None = None, limit: float | None = None
) -> nf.Activation:
    """The activation that an engine calls `name`, with the parameters that it gives for SwiGLU."""
    if name not in _KINDS:
        raise NotImplementedError(f"activation: expected one of {', '.join(_KINDS)}, got {name}; "
                                  "narrowfloat does not serve this model's experts")  # fmt: skip
    kind = _KINDS[name]
    if name == "swigluoai":  # The numbers of gpt-oss, where the engine does not give them.
        alpha, beta, limit = (
            default if given is None else given
            for given, default in ((alpha, 1.702), (beta, 1.0), (limit, 7.0))
        )
    if kind == "swiglu":
        return nf.Activation(kind, alpha, beta, limit, limit)
    if kind == "swiglu_step":
        if limit is None:
            raise ValueError("swiglu_limit: swiglustep needs one, got None")
        return nf.Activation(kind, None, None, limit, limit)
    given = {"alpha": alpha, "beta": beta, "swiglu_limit": limit}
    for parameter, value in given.items():
        if value is not None:
            raise NotImplementedError(f"{parameter}: expected None beside activation {name}, got "
                                      f"{value}; only SwiGLU has it")  # fmt: skip
    return nf.Activation(kind)


@dataclass(frozen=True)
class StoredExperts:
    """Weights of the experts of this rank as a checkpoint has them, on one device.

    w1: [experts, F1, ...] and w2: [experts, H, ...], codes; the scales are linear block scales.
    gate_scale, up_scale, down_scale: float32 [experts], global scales that multiply; None for
        formats without.
    mode: narrowfloat.moe_modes(). gate_order: of w1's rows.
    """

    mode: str
    gate_order: str
    w1: torch.Tensor
    w1_scales: torch.Tensor
    w2: torch.Tensor
    w2_scales: torch.Tensor
    gate_scale: torch.Tensor | None = None
    up_scale: torch.Tensor | None = None
    down_scale: torch.Tensor | None = None
    bias1: torch.Tensor | None = None
    bias2: torch.Tensor | None = None

    def sizes(self) -> tuple[int, int, int]:
        """Experts, H and F1."""
        experts, rows, _ = self.w1.shape
        return experts, self.w2.shape[1], rows


class EngineExperts:
    """Runs the experts of one layer with a routing that the engine made."""

    def __init__(
        self,
        stored: StoredExperts,
        activation: nf.Activation,
        *,
        is_gated: bool,
        top_k: int,
        total_experts: int,
        out_dtype: torch.dtype,
        weight_on_input: bool = False,
        add_bias2: bool = True,
    ) -> None:
        """Packs the weights; the stored ones may be freed afterwards.

        top_k: experts per token, of total_experts on all ranks. weight_on_input: the routing weight
            multiplies the experts' input; top_k is 1 then. add_bias2: false on all ranks of tensor
            parallelism but one.
        """
        if out_dtype not in _OUT_DTYPES:
            raise NotImplementedError(f"dtype: expected bfloat16, float16 or float32, got "
                                      f"{out_dtype}")  # fmt: skip
        experts, hidden, rows = stored.sizes()
        config = nf.MoeConfig(
            hidden=hidden, inter=rows // 2 if is_gated else rows, experts=total_experts,
            local_experts=experts, top_k=top_k, mode=stored.mode, gate_order=stored.gate_order,
            activation=activation, weight_on_input=weight_on_input, add_fc2_bias=add_bias2,
            out_dtype=_OUT_DTYPES[out_dtype],
        )  # fmt: skip
        factors = {"gate_scale": stored.gate_scale if is_gated else None,
                   "up_scale": stored.up_scale, "down_scale": stored.down_scale,
                   "bias1": stored.bias1, "bias2": stored.bias2}  # fmt: skip
        given: dict[str, Any] = {name: value.contiguous() for name, value in factors.items()
                                 if value is not None}  # fmt: skip
        layer = nf.MoeLayer.prepare(
            stored.w1, stored.w2, config, w1_scales=stored.w1_scales, w2_scales=stored.w2_scales,
            **given,
        )  # fmt: skip
        self._moe = Moe(layer)

    @property
    def layer(self) -> nf.MoeLayer:
        """The layer."""
        return self._moe.layer

    def __call__(
        self,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        expert_map: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[T, H] of the sums over the experts of this rank.

        ids, weights: [T, k]. expert_map: int [all experts], the index on this rank or -1; without
        it ids are those of this rank. An id that is not here, or below 0, adds nothing.
        """
        if expert_map is not None:
            last = expert_map.shape[0] - 1
            local = expert_map[ids.long().clamp(0, last)]
            ids = torch.where((ids >= 0) & (ids <= last), local, -1)
        if weights.dtype not in (torch.float32, torch.bfloat16):
            weights = weights.float()
        return self._moe(hidden, ids=ids, weights=weights)
