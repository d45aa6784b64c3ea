"""The common part of modules of packed weights: numbers for operators, state, gradients.

A layer is a number to its operators, since schemas know nothing but tensors and numbers.
"""

from __future__ import annotations

import copy
import json
import secrets
import warnings
import weakref
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from narrowfloat._torch_library import library, register

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Self

Layer = TypeVar("Layer")

# Layers as operators know them: by a number that stays theirs. A random one, so that a program that
# was exported elsewhere finds no layer instead of another one.
_layers: weakref.WeakValueDictionary[int, Handle[Any]] = weakref.WeakValueDictionary()


class Handle(Generic[Layer]):
    """A layer with a number; lives as long as it is kept."""

    def __init__(self, layer: Layer) -> None:
        self.layer, self.number = layer, secrets.randbits(62)
        _layers[self.number] = self


HandleType = TypeVar("HandleType", bound=Handle[Any])


def handle_of(number: int, kind: type[HandleType]) -> HandleType:
    """The handle of a number. ValueError for one of no layer of this kind that still exists."""
    handle = _layers.get(number)
    if not isinstance(handle, kind):
        raise ValueError(f"layer: number {number} is of no layer that still exists")
    return handle


class Underivable(torch.autograd.Function):
    """Passes a result on, and refuses to be differentiated."""

    @staticmethod
    def forward(ctx: Any, result: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*inputs)
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        refuse = torch.ops.narrowfloat.no_gradient
        return (None, *(refuse(gradients[0], one) for one in ctx.saved_tensors))


def _no_gradient(gradient: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError(
        "narrowfloat.torch: a layer has no gradient: its weights are packed and its rows may be "
        "quantized; run it under torch.no_grad(), or detach() what goes into it"
    )


CONFIG = "config"  # The name in a state: uint8, JSON.


def config_tensor(fields: dict[str, Any], module: str) -> torch.Tensor:
    """The configuration of a layer as a tensor, with the name that its module has in a model.

    Other software may rename the tensors of a model's state: this name stays.
    """
    text = json.dumps({**fields, "module": module}, sort_keys=True).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def config_fields(tensor: torch.Tensor) -> tuple[dict[str, Any], str]:
    """The fields and the module of config_tensor(). ValueError, TypeError or AttributeError for
    anything else."""
    fields = json.loads(bytes(tensor.tolist()))
    return fields, fields.pop("module", "")


library.define("no_gradient(Tensor gradient, Tensor input) -> Tensor")
register("no_gradient", _no_gradient, lambda gradient, input: torch.empty_like(input))


def asks_for_gradients(tensors: Iterable[Any]) -> bool:
    """Whether one of them requires a gradient where gradients are recorded."""
    return torch.is_grad_enabled() and any(
        isinstance(one, torch.Tensor) and one.requires_grad for one in tensors
    )


class PackedModule(torch.nn.Module):
    """A module around a layer, with its canonical weights in host memory, or without.

    A subclass says what its canonical weights are: STATE_NAMES, the names that state_dict() may
    have; MEND, what a caller does who needs them; and the functions that raise here.
    """

    STATE_NAMES: tuple[str, ...] = ()
    MEND = ""

    def __init__(self, handle: Any, kept: Any) -> None:
        super().__init__()
        self._handle, self._kept = handle, kept

    @staticmethod
    def _kept_of(state: dict[str, torch.Tensor]) -> Any:
        """The canonical weights of a state. ValueError for anything else."""
        raise NotImplementedError

    @staticmethod
    def _handle_for(kept: Any, device: torch.device) -> Any:
        """The handle of a new layer on a device."""
        raise NotImplementedError

    def _require_same(self, kept: Any) -> None:
        """ValueError for weights of a layer that cannot take this one's place."""
        raise NotImplementedError

    @property
    def _device(self) -> torch.device:
        raise NotImplementedError

    @classmethod
    def of_state(
        cls, state: dict[str, torch.Tensor], device: Any = "cpu", *, keep: bool = True
    ) -> Self:
        """A new module of what state_dict() of one returned. keep: whether it has one, too."""
        kept = cls._kept_of(state)
        layer = cls._handle_for(kept, torch.device(device)).layer
        return cls(layer, kept=kept if keep else None)

    @property
    def kept_bytes(self) -> int:
        """Bytes of host memory that the canonical weights take; 0 where they are not kept."""
        return 0 if self._kept is None else self._kept.nbytes

    def _need_kept(self, purpose: str) -> Any:
        if self._kept is None:
            raise RuntimeError(
                f"{type(self).__name__}: cannot {purpose}: the module has packed weights alone, "
                f"which belong to one device; {self.MEND}"
            )
        return self._kept

    def _take(self, kept: Any, device: torch.device) -> None:
        self._handle, self._kept = self._handle_for(kept, device), kept

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """to(), cuda(), cpu(): the layer is prepared again where the function takes tensors."""
        here = self._device
        there = fn(torch.empty(0, device=here)).device
        if there != here:
            self._take(self._need_kept(f"go from {here} to {there}"), there)
        of_module: Any = super()._apply
        of_module(fn, recurse)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if self._kept is None:
            if not torch.compiler.is_compiling():
                warnings.warn(
                    f"{prefix}: state_dict() has no weights of a {type(self).__name__} that has "
                    f"packed ones alone; {self.MEND}",
                    stacklevel=2,
                )
            return
        for name, tensor in self._kept.state(prefix.removesuffix(".")).items():
            destination[prefix + name] = tensor

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        names = [prefix + name for name in self.STATE_NAMES]
        found = {name.removeprefix(prefix): state_dict[name]
                 for name in names if name in state_dict}  # fmt: skip
        if strict:
            unexpected_keys += [key for key in state_dict
                                if key.startswith(prefix) and key not in names]  # fmt: skip
        if not found:
            if self._kept is not None:
                missing_keys += [prefix + name for name in self._kept.state()]
            return
        try:
            kept = self._kept_of(found)
            self._require_same(kept)
            self._take(kept, self._device)
        except (ValueError, NotImplementedError) as error:
            error_msgs.append(f"{prefix}: {error}")

    def __getstate__(self) -> dict[str, Any]:
        kept = self._need_kept("be pickled")
        state = {name: value for name, value in self.__dict__.items()
                 if name not in ("_handle", "_kept")}  # fmt: skip
        return {**state, "_state": kept.state(), "_where": str(self._device)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        where = torch.device(state.pop("_where"))
        kept = self._kept_of(state.pop("_state"))
        self.__dict__.update(state)
        self._take(kept, where)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A module of its own around the same layer, which does not change."""
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(
            {name: value if name in ("_handle", "_kept") else copy.deepcopy(value, memo)
             for name, value in self.__dict__.items()}
        )  # fmt: skip
        return copied
