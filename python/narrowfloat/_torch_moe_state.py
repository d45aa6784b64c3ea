"""The canonical weights that nft.Moe keeps in host memory, to be saved, loaded and moved.

Packed weights have the form that one implementation computes from. The canonical ones (codes,
scales, factors, biases) make the same layer anywhere, to the bit.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from narrowfloat._arrays import TorchMaker
from narrowfloat._moe import MoeLayer
from narrowfloat._moe_config import Activation, MoeConfig
from narrowfloat._moe_weights import FACTORS, MoeParts
from narrowfloat._torch_packed import CONFIG, config_fields, config_tensor

_TENSORS = ("w1", "w1_scales", "w2", "w2_scales", "bias1", "bias2")
NAMES = (CONFIG, *_TENSORS, *FACTORS)
_VIEWS = {"bfloat16": torch.bfloat16, "float8_e4m3fn": torch.float8_e4m3fn,
          "float8_e8m0fnu": torch.float8_e8m0fnu}  # fmt: skip


def _number(value: Any) -> Any:
    """A parameter of an activation as JSON has it."""
    return value.tolist() if hasattr(value, "tolist") else value


def _from_json(value: Any) -> Any:
    return np.array(value, np.float32) if isinstance(value, list) else value


def host_tensor(value: Any) -> torch.Tensor:
    """A tensor on the CPU of an array, a tensor or a number; shares memory where it can."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if not isinstance(value, np.ndarray):
        return torch.tensor(value, dtype=torch.float32)
    if value.dtype.name not in _VIEWS:
        return torch.from_numpy(value if value.flags.writeable else value.copy())
    bits = value.view(np.dtype(f"u{value.dtype.itemsize}"))
    return host_tensor(bits).view(_VIEWS[value.dtype.name])


@dataclass(frozen=True)
class KeptWeights:
    """The configuration and the canonical weights of a layer, tensors on the CPU."""

    config: MoeConfig
    tensors: dict[str, torch.Tensor]
    layouts: tuple[str, str]

    @classmethod
    def of(cls, parts: MoeParts, config: MoeConfig) -> KeptWeights:
        """Copies the parts of a layer from a GPU. No two tensors share memory."""
        tensors: dict[str, torch.Tensor] = {}
        for name, value in parts.arrays.items():
            tensor = host_tensor(value)
            taken = {one.data_ptr() for one in tensors.values()}
            tensors[name] = tensor.clone() if tensor.data_ptr() in taken else tensor
        return cls(config, tensors, parts.layouts)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def prepare(self, device: torch.device) -> MoeLayer:
        """The layer on a device."""
        if device.type == "meta":
            raise NotImplementedError("Moe: a layer has no form on the meta device; keep it on the "
                                      "CPU or on a GPU")  # fmt: skip
        arrays = {name: float(tensor) if tensor.ndim == 0 else tensor.to(device)
                  for name, tensor in self.tensors.items()}  # fmt: skip
        return MoeLayer._of_parts(MoeParts(arrays, self.layouts), self.config, TorchMaker(device))

    def state(self, module: str = "") -> dict[str, torch.Tensor]:
        """All of it as tensors, by the names of a state_dict(). module: its name in a model."""
        fields = {**asdict(self.config), "layouts": list(self.layouts)}
        given = self.config.activation
        fields["activation"] = {name: _number(getattr(given, name))
                                for name in asdict(given)}  # fmt: skip
        return {CONFIG: config_tensor(fields, module), **self.tensors}

    @classmethod
    def of_state(cls, state: dict[str, torch.Tensor]) -> KeptWeights:
        """Reads what state() made. ValueError for anything else."""
        missing = [name for name in (CONFIG, "w1", "w2") if name not in state]
        if missing:
            raise ValueError(f"{', '.join(missing)}: missing in the state of a Moe")
        tensors = {name: host_tensor(tensor) for name, tensor in state.items()}
        try:
            fields, _ = config_fields(tensors.pop(CONFIG))
            first, second = fields.pop("layouts")
            parameters = {name: _from_json(value)
                          for name, value in fields.pop("activation").items()}  # fmt: skip
            config = MoeConfig(**fields, activation=Activation(**parameters))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{CONFIG}: no configuration of a Moe: {error}") from error
        return cls(config, tensors, (first, second))

    def with_config(self, **changes: Any) -> KeptWeights:
        """The same weights for a configuration that differs in fields which do not change them."""
        return replace(self, config=replace(self.config, **changes))


def shape_text(layer: MoeLayer) -> str:
    """Mode, shapes, bytes and device, for the repr of a module."""
    config = layer.config
    rows = config.inter * (2 if layer._core_config.is_gated else 1)
    experts = config.experts if config.local_experts is None else config.local_experts
    held = experts + config.shared_experts
    where = layer._device_name
    return (f"{config.mode}, w1=[{held}, {rows}, {config.hidden}], "
            f"w2=[{held}, {config.hidden}, {config.inter}], experts={config.experts}, "
            f"top_k={config.top_k}, {layer.weight_bytes:,} bytes on {where}")  # fmt: skip
