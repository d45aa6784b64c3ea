"""A linear layer with packed weights as a module of torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

import narrowfloat as nf
from narrowfloat._linear import LinearLayer, LinearWeights
from narrowfloat._streams import allocating_on
from narrowfloat._torch_library import library, register
from narrowfloat._torch_moe_state import host_tensor
from narrowfloat._torch_packed import (
    CONFIG,
    Handle,
    PackedModule,
    Underivable,
    asks_for_gradients,
    config_fields,
    config_tensor,
    handle_of,
)

STATE_NAMES = (CONFIG, "weight", "weight_scales", "bias")
_FIELDS = {"mode": str, "shape": list, "layout": str, "factor": float, "multiplier": float}
_TYPES = (torch.float32, torch.float16, torch.bfloat16)

library.define("linear(Tensor input, SymInt layer, SymInt columns) -> Tensor")


class LinearHandle(Handle[LinearLayer]):
    """A linear layer as its operator knows it."""


def _dense(rows: torch.Tensor) -> torch.Tensor:
    """Rows as the library takes them; a copy of strided ones, and where a GPU needs alignment."""
    dense = rows.contiguous()
    return dense.clone() if dense.is_cuda and dense.data_ptr() % 16 else dense


def _linear(input: torch.Tensor, layer: int, columns: int) -> torch.Tensor:
    linear = handle_of(layer, LinearHandle).layer
    rows, cols = linear.shape
    if columns != rows:
        raise ValueError(f"columns: expected the layer's, {rows}, got {columns}")
    if input.dtype not in _TYPES:
        raise ValueError(f"input: expected float32, float16 or bfloat16, got {input.dtype}")
    if input.ndim == 0 or input.shape[-1] != cols:
        raise ValueError(f"input: expected [..., {cols}], got {list(input.shape)}")
    if input.device != linear.device:
        raise ValueError(f"input: expected a tensor on {linear.device}, where the layer's weights "
                         f"are, got one on {input.device}")  # fmt: skip
    wide = "bfloat16" if input.dtype == torch.bfloat16 else "float32"
    with allocating_on(input.device):  # Conversions are kernels.
        made = linear.run(_dense(input.reshape(-1, cols)), wide)
        return made.to(input.dtype).reshape(*input.shape[:-1], columns)


register("linear", _linear,
         lambda input, layer, columns: input.new_empty((*input.shape[:-1], columns)))  # fmt: skip


@dataclass(frozen=True)
class KeptLinear:
    """The canonical weights of a linear layer, tensors on the CPU."""

    weights: LinearWeights

    @classmethod
    def of(cls, weights: LinearWeights) -> KeptLinear:
        """Copies what lies on a GPU."""
        return cls(_moved(weights, host_tensor))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(one.nbytes for one in _tensors(self.weights).values())

    def prepare(self, device: torch.device) -> LinearLayer:
        """The layer on a device."""
        if device.type == "meta":
            raise NotImplementedError("Linear: a layer has no form on the meta device; keep it on "
                                      "the CPU or on a GPU")  # fmt: skip
        return LinearLayer(_moved(self.weights, lambda one: one.to(device)))

    def state(self, module: str = "") -> dict[str, torch.Tensor]:
        """All of it as tensors, by the names of a state_dict(). module: its name in a model."""
        fields = {name: getattr(self.weights, name) for name in _FIELDS}
        return {CONFIG: config_tensor({"linear": fields}, module), **_tensors(self.weights)}

    @classmethod
    def of_state(cls, state: dict[str, torch.Tensor]) -> KeptLinear:
        """Reads what state() made. ValueError for anything else."""
        missing = [name for name in (CONFIG, "weight") if name not in state]
        if missing:
            raise ValueError(f"{', '.join(missing)}: missing in the state of a Linear")
        tensors = {name: host_tensor(tensor) for name, tensor in state.items()}
        try:
            fields = config_fields(tensors[CONFIG])[0]["linear"]
            mode, shape, layout, factor, multiplier = (
                kind(fields[name]) for name, kind in _FIELDS.items()
            )
            rows, cols = map(int, shape)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{CONFIG}: no configuration of a Linear: {error}") from error
        return cls(LinearWeights(mode, (rows, cols), tensors["weight"],
                                 tensors.get("weight_scales"), layout, factor, multiplier,
                                 tensors.get("bias")))  # fmt: skip


def _tensors(weights: LinearWeights) -> dict[str, torch.Tensor]:
    named = {"weight": weights.values, "weight_scales": weights.scales, "bias": weights.bias}
    return {name: one for name, one in named.items() if one is not None}


def _moved(weights: LinearWeights, move: Any) -> LinearWeights:
    """With each tensor as a function returns it."""
    parts = {"values": weights.values, "scales": weights.scales, "bias": weights.bias}
    return replace(weights, **{name: move(one) for name, one in parts.items() if one is not None})


class Linear(PackedModule):
    """y = x W^T + b with packed weights: forward(input) -> [..., out_features] of input's type.

    Weights take the bytes of their format. They are no parameters, and no gradient goes through the
    layer. state_dict(), load_state_dict(), to(device), pickle and deepcopy need the canonical
    weights, which prepare() keeps in host memory, as many bytes again, unless it is told not to.
    """

    STATE_NAMES = STATE_NAMES
    MEND = "make it with narrowfloat.torch.Linear.prepare(..., keep=True)"

    def __init__(self, layer: LinearLayer, *, kept: KeptLinear | None = None) -> None:
        """See prepare()."""
        super().__init__(LinearHandle(layer), kept)

    @classmethod
    def prepare(
        cls, weight: torch.Tensor | nf.QuantizedTensor, mode: str, *,
        bias: torch.Tensor | None = None, input_multiplier: float | None = None,
        math: Literal["exact", "fast"] = "exact", device: Any = None, keep: bool = True,
    ) -> Linear:  # fmt: skip
        """Packs a weight in the form that its implementation computes from.

        weight: [out_features, in_features], a QuantizedTensor of the mode's format with scales in
            layout linear (one-byte scales: or swizzled_128x4), or float32, float16 or bfloat16,
            which is quantized (`math`: by which formulas; mode bf16: rounded).
        mode: one of narrowfloat.moe_modes(): weights, and how rows are quantized.
        bias: [out_features]. input_multiplier: modes with static activation scales, fp8_tensor and
            nvfp4; the largest value of the format, 448 or 2688, over the largest magnitude of the
            input. device: where the layer computes; default: where the weight lies.
        keep: whether the module can be saved and moved.
        """
        if isinstance(weight, torch.Tensor):
            weight = weight.detach()
        if bias is not None:
            bias = bias.detach()
            bias = bias if bias.dtype == torch.bfloat16 else bias.float()
        weights = LinearWeights.of(weight, mode, bias=bias, input_multiplier=input_multiplier,
                                   math=math)  # fmt: skip
        return cls.of_weights(weights, device, keep=keep)

    @classmethod
    def of_weights(cls, weights: LinearWeights, device: Any = None, *, keep: bool = True) -> Linear:
        """A module of canonical weights, which are tensors or NumPy arrays."""
        if device is None:
            values = weights.values
            device = values.device if isinstance(values, torch.Tensor) else "cpu"
        tensors = _moved(weights, lambda one: one if isinstance(one, torch.Tensor)
                         else host_tensor(one))  # fmt: skip
        layer = KeptLinear(tensors).prepare(torch.device(device))
        return cls(layer, kept=KeptLinear.of(tensors) if keep else None)

    @property
    def layer(self) -> LinearLayer:
        """The packed weights."""
        return self._handle.layer

    @property
    def in_features(self) -> int:
        """Columns of the weight."""
        return self.layer.shape[1]

    @property
    def out_features(self) -> int:
        """Rows of the weight."""
        return self.layer.shape[0]

    @property
    def mode(self) -> str:
        """One of narrowfloat.moe_modes()."""
        return self.layer.mode

    def extra_repr(self) -> str:
        """Mode, shape and bytes."""
        layer = self.layer
        return (f"{layer.mode}, in_features={self.in_features}, out_features={self.out_features}, "
                f"bias={layer.bias is not None}, {layer.bytes:,} bytes on {layer.device}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """input: bfloat16, float16 or float32 [..., in_features].

        Modes that multiply bfloat16 rows round others to bfloat16 first. Sums are float32; the
        result is rounded once.
        """
        handle = self._handle
        result = torch.ops.narrowfloat.linear(input, handle.number, handle.layer.shape[0])
        return Underivable.apply(result, input) if asks_for_gradients([input]) else result

    @staticmethod
    def _kept_of(state: dict[str, torch.Tensor]) -> KeptLinear:
        return KeptLinear.of_state(state)

    @staticmethod
    def _handle_for(kept: KeptLinear, device: torch.device) -> LinearHandle:
        return LinearHandle(kept.prepare(device))

    def _require_same(self, kept: KeptLinear) -> None:
        ours, theirs = self.layer.shape, kept.weights.shape
        if ours != theirs:
            raise ValueError(f"expected a Linear of {list(ours)}, got {list(theirs)}")

    @property
    def _device(self) -> torch.device:
        return torch.device(self.layer.device)
