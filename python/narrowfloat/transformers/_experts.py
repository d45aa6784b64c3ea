"""Experts of a model as a layer: made from dense weights, and the function for dense modules."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

import narrowfloat as nf
from narrowfloat._arrays import TorchMaker
from narrowfloat._linear import STATIC_MODES
from narrowfloat._moe import MoeLayer
from narrowfloat._moe_weights import WEIGHT_FORMATS, MoeParts
from narrowfloat._torch_moe_state import KeptWeights
from narrowfloat.torch import Moe
from narrowfloat.transformers._config import NarrowfloatConfig
from narrowfloat.transformers._gates import Gate, find_gate

_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k",
          "experts_per_token", "num_selected_experts", "moe_k", "top_k_experts")  # fmt: skip
_DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


class Experts(Moe):
    """In place of a model's experts module: forward(hidden, ids, weights), as transformers calls.

    Ids that name no expert of this rank (transformers' expert parallelism) add nothing.
    """

    def forward(self, hidden: torch.Tensor, *routing: Any, **named: Any) -> torch.Tensor:
        """hidden: [..., H]. Then ids and weights, [..., k], by position or by any names."""
        ids, weights = (*routing, *named.values())
        if weights.dtype == torch.float16:
            weights = weights.float()
        out = super().forward(hidden, ids=ids, weights=weights)
        return out.to(hidden.dtype)


def is_experts(module: torch.nn.Module) -> bool:
    """Whether a module is of a class with transformers' decorator use_experts_implementation."""
    names = ("has_gate", "has_bias", "is_transposed", "_apply_gate", "num_experts")
    return not isinstance(module, Experts) and all(hasattr(module, name) for name in names)


def top_k_of(name: str, module: Any, given: int | None) -> int:
    """Experts per token, of the model's configuration."""
    config = getattr(module, "config", None)
    found = [getattr(config, one, None) for one in _TOP_K]
    counts = [value for value in found if isinstance(value, int)]
    if given is None and not counts:
        raise ValueError(f"{name}: its configuration does not say how many experts a token has; "
                         "give top_k to NarrowfloatConfig")  # fmt: skip
    return counts[0] if given is None else given


def _quantized(weight: torch.Tensor, format: str, math: Any) -> dict[str, torch.Tensor]:
    """values, scales, and factor of a dense matrix per expert; each expert on its own."""
    shape = list(weight.shape[1:])
    sizes = nf.QuantizedTensor.empty(shape, format, layout="linear", like=weight[0])
    parts = {"values": sizes.values, "scales": sizes.scales, "factor": sizes.global_scale}
    made = {name: part.new_empty((len(weight), *part.shape))
            for name, part in parts.items() if part is not None}  # fmt: skip
    for expert, matrix in enumerate(weight):
        factor = made["factor"][expert] if "factor" in made else None
        target = nf.QuantizedTensor(made["values"][expert], made["scales"][expert], factor,
                                    sizes.layout, shape)  # fmt: skip
        nf.quantize(matrix.contiguous(), out=target, math=math)
    if "factor" in made:
        made["factor"] = made["factor"].reshape(-1)
    return made


@dataclass
class ExpertsPlan:
    """The experts of one module on their way into a layer: tensors come in any order."""

    name: str
    gate: Gate
    top_k: int
    experts: int
    is_gated: bool
    is_transposed: bool
    parameters: tuple[str, ...]
    parts: dict[str, Any] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    dtype: str = "bfloat16"

    @classmethod
    def of(cls, name: str, module: Any, top_k: int | None) -> ExpertsPlan:
        """NotImplementedError for a module that no layer can stand for."""
        if getattr(module, "has_post_expert_norm", False):
            raise NotImplementedError(f"{name}: {type(module).__name__} has a norm after each "
                                      "expert; put its name into modules_to_not_convert")
        first = "gate_up_proj" if module.has_gate else "up_proj"
        names: tuple[str, ...] = (first, "down_proj")
        if module.has_bias:
            names += (f"{first}_bias", "down_proj_bias")
        unknown = {one for one, _ in module.named_parameters()} - set(names)
        missing = [one for one in names if getattr(module, one, None) is None]
        if unknown or missing:
            raise NotImplementedError(
                f"{name}: {type(module).__name__} has parameters "
                f"{', '.join(sorted(one for one, _ in module.named_parameters()))}; expected "
                f"{', '.join(names)}; put its name into modules_to_not_convert"
            )
        return cls(name, find_gate(name, module), top_k_of(name, module, top_k),
                   module.num_experts, module.has_gate, module.is_transposed, names)

    def add(self, parameter: str, tensor: torch.Tensor, mode: str, math: str) -> None:
        """Takes a dense parameter, quantized at once."""
        if tensor.dtype not in _DTYPES:
            raise ValueError(f"{self.name}.{parameter}: expected bfloat16, float16 or float32, got "
                             f"{tensor.dtype}")  # fmt: skip
        if parameter.endswith("_bias"):
            self.parts["bias2" if parameter == "down_proj_bias" else "bias1"] = tensor.float()
            return
        which = "w2" if parameter == "down_proj" else "w1"
        self.dtype = _DTYPES[tensor.dtype]
        weight = tensor.detach()
        if self.is_transposed:
            weight = weight.transpose(1, 2)
        self.shapes[which] = tuple(weight.shape)
        format = WEIGHT_FORMATS[mode]
        if format is None:
            self.parts[which] = weight.to(torch.bfloat16).contiguous()
            return
        made = _quantized(weight, format, math)
        self.parts[which] = made["values"]
        if format == "fp8_tensor":
            made["factor"] = made["scales"].reshape(-1)
        else:
            self.parts[f"{which}_scales"] = made["scales"]
        if "factor" in made:
            names = ("down_scale",) if which == "w2" else ("up_scale", "gate_scale")
            self.parts |= dict.fromkeys(names[: 2 if self.is_gated else 1], made["factor"])

    @property
    def is_complete(self) -> bool:
        """Whether all parameters have come."""
        return len(self.missing) == 0

    @property
    def missing(self) -> list[str]:
        """Parameters that have not come."""
        has = {"down_proj": "w2", "down_proj_bias": "bias2"}
        return [name for name in self.parameters
                if has.get(name, "bias1" if name.endswith("_bias") else "w1") not in self.parts]

    def config(self, mode: str, fast_sums: bool) -> nf.MoeConfig:
        """The layer's configuration; results of slots are as wide as the model's numbers."""
        experts, rows, hidden = self.shapes["w1"]
        # A rank of expert parallelism may own fewer experts than a token has. Its ids count from 0;
        # those from `experts` on are not here.
        return nf.MoeConfig(
            hidden=hidden, inter=rows // 2 if self.is_gated else rows,
            experts=max(experts, self.top_k), local_experts=experts, top_k=self.top_k, mode=mode,
            gate_order=self.gate.order, activation=self.gate.activation, out_dtype=self.dtype,
            slot_dtype="float32" if self.dtype == "float32" else "bfloat16", fast_sums=fast_sums,
        )  # fmt: skip

    def _add_multipliers(self, mode: str, input_amax: Any, inter_amax: Any) -> None:
        """Static scales: the format's largest value over the largest that came.

        Experts without tokens take the largest of all experts.
        """
        device, largest = self.parts["w1"].device, 448.0 if mode == "fp8_tensor" else 2688.0
        highest = float(inter_amax.max())
        if not (float(input_amax.max()) > 0 and highest > 0):
            raise ValueError(f"{self.name}: statistics: no magnitude above zero")
        of_input = largest / float(input_amax.max())
        of_inter = (largest / torch.where(inter_amax > 0, inter_amax, highest)).to(device)
        self.parts["input_multiplier"], self.parts["inter_multiplier"] = of_input, of_inter
        for name in ("up_scale", "gate_scale"):
            if name in self.parts:
                self.parts[name] = self.parts[name] / of_input
        self.parts["down_scale"] = self.parts["down_scale"] / of_inter

    def build(
        self, mode: str, keep_weights: bool, statistics: str | None = None,
        fast_sums: bool = False,
    ) -> Experts:  # fmt: skip
        """The module, where the tensors lie."""
        if mode in STATIC_MODES:
            from narrowfloat.transformers._calibrate import read_amax

            self._add_multipliers(mode, *read_amax(statistics or "", self.name))
        parts = MoeParts(self.parts, ("linear", "linear"))
        config = self.config(mode, fast_sums)
        device = self.parts["w1"].device
        try:
            layer = MoeLayer._of_parts(parts, config, TorchMaker(device))
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}; put its name into modules_to_not_convert, or "
                             "take another mode") from error  # fmt: skip
        return Experts(layer, kept=KeptWeights.of(parts, config) if keep_weights else None)


_HOOKS = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks",
          "_forward_hooks_with_kwargs", "_forward_hooks_always_called")  # fmt: skip


def _move_hooks(old: torch.nn.Module, new: torch.nn.Module) -> None:
    """transformers' expert and tensor parallelism sum over ranks in a hook of the experts."""
    for name in _HOOKS:
        getattr(new, name).update(getattr(old, name))


def quantize_experts(model: Any, config: NarrowfloatConfig) -> Any:
    """Puts the dense experts of a model that is loaded already into layers, in place.

    A module at a time: its dense weights are freed before the next one. Returns the model. Hooks of
    forward() stay, so a model may be one rank of transformers' expert parallelism, if its shards
    are plain tensors.
    ValueError for a model without experts that transformers lets others compute.
    """
    modules = {name: module for name, module in model.named_modules() if is_experts(module)}
    if not modules:
        raise ValueError(f"model: {type(model).__name__} has no experts that transformers lets "
                         "others compute (use_experts_implementation)")  # fmt: skip
    chosen = {name: module for name, module in modules.items() if config.converts(name)}
    plans = {name: ExpertsPlan.of(name, chosen[name], config.top_k) for name in chosen}
    modules.clear()
    chosen.clear()
    mode = config.mode or "nvfp4_bf16"
    for name, plan in plans.items():
        for parameter in plan.parameters:
            tensor = getattr(model.get_submodule(name), parameter)
            if hasattr(tensor, "full_tensor"):
                raise ValueError(
                    f"{name}.{parameter}: expected a tensor of this rank, got a DTensor; load the "
                    "model with experts_implementation='narrowfloat' instead, which runs such "
                    "experts as they are"
                )
            plan.add(parameter, tensor.detach(), mode, config.math)
        layer = plan.build(mode, config.keep_weights, config.statistics, config.fast_sums)
        _move_hooks(model.get_submodule(name), layer)
        model.set_submodule(name, layer)
        plan.parts.clear()
    return model


class _Prepared:
    """A layer of a dense module's weights as they were."""

    def __init__(self, module: Any, top_k: int) -> None:
        self.key, self.top_k = _key(module), top_k
        plan = ExpertsPlan.of(type(module).__name__, module, top_k)
        for name in plan.parameters:
            tensor = getattr(module, name)
            if not name.endswith("_bias") and tensor.dtype != torch.bfloat16:
                raise ValueError(
                    f"{name}: experts_implementation='narrowfloat' multiplies bfloat16 weights as "
                    f"they are, got {tensor.dtype}; load the model with dtype=torch.bfloat16, or "
                    "quantize its experts with a NarrowfloatConfig"
                )
            plan.add(name, tensor.detach(), "bf16", "exact")
        self.experts = plan.build("bf16", keep_weights=False)


def _key(module: Any) -> list[tuple[int, int]]:
    return [(one.data_ptr(), one._version) for one in module.parameters(recurse=False)]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _prepare(module: Any, top_k: int) -> Experts:
    found = module.__dict__.get("_narrowfloat")
    if found is None or found.key != _key(module) or found.top_k != top_k:
        found = _Prepared(module, top_k)
        # Not a submodule: the dense weights are the module's state, and stay it.
        module.__dict__["_narrowfloat"] = found
    return found.experts


def experts_forward(
    module: Any, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Runs modules with dense weights, for experts_implementation="narrowfloat".

    They are packed again in the layer's form at the first call, and again after changes.
    """
    return _prepare(module, ids.shape[-1])(hidden, ids, weights)
