"""Operators of torch: routing, and whole layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import narrowfloat as nf
from narrowfloat._arrays import TorchMaker, maker_of
from narrowfloat._moe_call import to_layer_ids
from narrowfloat._moe_config import config_to_core
from narrowfloat._moe_weights import FACTORS, plain_parts
from narrowfloat._shapes import product
from narrowfloat._streams import allocating_on
from narrowfloat._torch_library import library, register
from narrowfloat._torch_moe_state import NAMES, KeptWeights, shape_text
from narrowfloat._torch_packed import (
    Handle,
    PackedModule,
    Underivable,
    asks_for_gradients,
    handle_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable

_FLOATS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

_LOGITS = "Tensor? logits, Tensor? bias, int top_k, str method, int n_group, int topk_group," \
    " float routed_scale"  # fmt: skip
_RARE = "*, Tensor? packed=None, Tensor? given_ids=None, Tensor? given_weights=None," \
    " int? experts=None, int shared_experts=0, bool norm_topk=True, bool weights_bf16=False," \
    " bool grouped_bias_bf16=False, bool negative_one_is_empty=False"  # fmt: skip
_ROUTE_TO = ", Tensor(r!)? replay=None, Tensor(e!)? errors=None"
_RUN = "Tensor hidden, Tensor? logits, Tensor? bias, SymInt layer"
_RUN_MORE = "*, Tensor? packed=None, Tensor? ids=None, Tensor? weights=None," \
    " Tensor? hidden_scales=None, Tensor? row_scale=None, bool allow_absent=False"  # fmt: skip
_WRITTEN = ("slot_out", "expert_weights", "slot_to_row", "topk_ids", "routing_replay", "errors")
_RUN_TO = "".join(f", Tensor({chr(99 + i)}!)? {one}=None" for i, one in enumerate(_WRITTEN))
# An operator that returns a result writes to no argument: inductor of torch 2.11 cannot compile
# one with a result that may write elsewhere and does not. The shape and type of a layer's result
# are arguments of its call, since compiled code outlives the process that knew the layer.
for _schema in (
    f"route({_LOGITS}, {_RARE}) -> (Tensor ids, Tensor weights)",
    f"route_out({_LOGITS}, Tensor(a!) ids, Tensor(b!) weights, {_RARE}{_ROUTE_TO}) -> ()",
    f"moe({_RUN}, SymInt columns, ScalarType dtype, {_RUN_MORE}) -> Tensor",
    f"moe_out({_RUN}, Tensor(a!) out, Tensor(b!)? workspace, {_RUN_MORE}{_RUN_TO}) -> ()",
):
    library.define(_schema)


def _nothing(*_: Any, **__: Any) -> None:
    """The shape function of an operator that returns nothing."""


def _allocate(make: Callable[[], Any], device: torch.device) -> Any:
    """The result of make(), for the stream of use_stream(), which compiled code does not know."""
    if torch.compiler.is_compiling():
        return make()
    with allocating_on(device):
        return make()


def _route(*args: Any, out: Any = None, **how: Any) -> tuple[torch.Tensor, torch.Tensor]:
    logits, bias, top_k, method, n_group, topk_group, routed_scale = args
    ids, weights = how.pop("given_ids", None), how.pop("given_weights", None)
    return nf.route(logits, bias=bias, top_k=top_k, method=method, n_group=n_group,
                    topk_group=topk_group, routed_scale=routed_scale, ids=ids, weights=weights,
                    out=out, **how)  # fmt: skip


def _route_out(*args: Any, **how: Any) -> None:
    _route(*args[:7], out=args[7:], **how)


def _route_fake(*args: Any, **how: Any) -> tuple[torch.Tensor, torch.Tensor]:
    given = (args[0], how.get("packed"), how.get("given_ids"))
    found = next(tensor for tensor in given if tensor is not None)
    shape = (*found.shape[:1], args[2] + how.get("shared_experts", 0))
    return found.new_empty(shape, dtype=torch.int32), found.new_empty(shape, dtype=torch.float32)


register("route", _route, _route_fake)
register("route_out", _route_out, _nothing)


class _Handle(Handle[nf.MoeLayer]):
    """A layer, and columns and type of its result."""

    def __init__(self, layer: nf.MoeLayer) -> None:
        super().__init__(layer)
        self.columns, self.dtype = layer.config.hidden, _FLOATS[layer.config.out_dtype]


def _moe_fake(
    hidden: Any, logits: Any, bias: Any, layer: int, columns: int, dtype: torch.dtype, **how: Any
) -> torch.Tensor:
    return hidden.new_empty((*hidden.shape[:-1], columns), dtype=dtype)


def _moe(
    hidden: Any, logits: Any, bias: Any, layer: int, columns: int, dtype: torch.dtype, **how: Any
) -> torch.Tensor:
    handle = handle_of(layer, _Handle)
    if (columns, dtype) != (handle.columns, handle.dtype):
        raise ValueError(f"columns, dtype: expected the layer's, {handle.columns} and "
                         f"{handle.dtype}, got {columns} and {dtype}; take them from "
                         "MoeLayer.config")  # fmt: skip
    return handle.layer.run(hidden, logits, bias=bias, **how)


def _moe_out(*args: Any, **how: Any) -> None:
    hidden, logits, bias, number, out, workspace = args
    layer = handle_of(number, _Handle).layer
    start = 0 if workspace is None else -workspace.data_ptr() % 256
    if start > 0:
        # Compiled code has copied an aligned one to another address, without bytes to spare.
        size = layer.required_workspace(product(hidden.shape[:-1])) if hidden.ndim else 0
        is_copy = workspace.numel() - start < size <= workspace.numel()
        workspace = None if is_copy else workspace[start:]
    layer.run(hidden, logits, bias=bias, out=out, workspace=workspace, **how)


register("moe", _moe, _moe_fake)
register("moe_out", _moe_out, _nothing)


def route(
    logits: torch.Tensor | None, top_k: int, method: str = "renormalize", *,
    bias: torch.Tensor | None = None, packed: torch.Tensor | None = None,
    ids: torch.Tensor | None = None, weights: torch.Tensor | None = None,
    experts: int | None = None, shared_experts: int = 0, n_group: int = 1, topk_group: int = 1,
    routed_scale: float = 1.0, norm_topk: bool = True, weights_bf16: bool = False,
    grouped_bias_bf16: bool = False, negative_one_is_empty: bool = False,
    replay: torch.Tensor | None = None, errors: torch.Tensor | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Experts and weights of all slots: int32 and float32 [T, k + S]. As narrowfloat.route().

    logits: float32, bfloat16 or float16 [T, E]; or packed, int32 [T, k]; or ids, int32 [T, k], and
    weights, float32 or bfloat16 [T, k]. replay: int16 [>= T, k], written to.
    """
    if logits is None and packed is None and ids is None:
        raise ValueError("logits: give them, or packed, or ids")
    given = (logits, bias, top_k, method, n_group, topk_group, routed_scale)
    how = {"packed": packed, "given_ids": ids, "given_weights": weights, "experts": experts,
           "shared_experts": shared_experts, "norm_topk": norm_topk, "weights_bf16": weights_bf16,
           "grouped_bias_bf16": grouped_bias_bf16,
           "negative_one_is_empty": negative_one_is_empty}  # fmt: skip
    if out is None and replay is None and errors is None:
        return torch.ops.narrowfloat.route(*given, **how)
    if out is None:
        first = next(one for one in (logits, packed, ids) if one is not None)
        out = _allocate(lambda: _route_fake(*given, **how), first.device)
    torch.ops.narrowfloat.route_out(*given, *out, **how, replay=replay, errors=errors)
    return out


class Moe(PackedModule):
    """A Mixture-of-Experts layer as a module: forward(hidden, logits, bias=None) -> [..., H].

    Moe(layer) wraps a narrowfloat.MoeLayer, which has its weights in packed form alone: such a
    module cannot be saved or moved. Moe.prepare() also keeps the canonical weights in host memory,
    as many bytes again: state_dict(), load_state_dict(), to(device), pickle and deepcopy work, and
    give the same bits. Weights are no parameters, and no gradient goes through a layer.
    """

    STATE_NAMES = NAMES
    MEND = "make it with narrowfloat.torch.Moe.prepare(), which keeps the canonical ones"

    def __init__(self, layer: nf.MoeLayer, *, kept: KeptWeights | None = None) -> None:
        super().__init__(_Handle(layer), kept)

    @classmethod
    def prepare(
        cls, w1: Any, w2: Any, config: nf.MoeConfig, *, device: Any = None, **weights: Any
    ) -> Moe:
        """As narrowfloat.MoeLayer.prepare(), whose keywords `weights` are.

        device: where the layer computes; default: where w1 lies.
        """
        maker = maker_of("w1", w1.values if isinstance(w1, nf.QuantizedTensor) else w1)
        given = dict.fromkeys(("w1_scales", "w2_scales", "bias1", "bias2", *FACTORS))
        unknown = weights.keys() - given.keys() - {"scale_layout"}
        if unknown:
            raise TypeError(f"Moe.prepare(): unexpected keyword {sorted(unknown)[0]!r}")
        arguments: dict[str, Any] = {"scale_layout": "linear", **given, **weights}
        is_gated = config_to_core(config, maker).is_gated
        parts = plain_parts(w1, w2, maker, mode=config.mode, is_gated=is_gated, **arguments)
        kept = KeptWeights.of(parts, config)
        if device is None:
            device = maker.device if isinstance(maker, TorchMaker) else "cpu"
        return cls(kept.prepare(torch.device(device)), kept=kept)

    @property
    def layer(self) -> nf.MoeLayer:
        """The layer."""
        return self._handle.layer

    def extra_repr(self) -> str:
        """Mode, shapes and bytes."""
        return shape_text(self.layer)

    def forward(
        self, hidden: torch.Tensor, logits: torch.Tensor | None = None,
        bias: torch.Tensor | None = None, *, out: torch.Tensor | None = None,
        workspace: torch.Tensor | None = None, allow_absent: bool = True,
        **options: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        """As MoeLayer.run(), but with slot_out, too, it returns a result.

        hidden: bfloat16, float16 or float32 [..., H], or rows quantized for the layer. logits,
            bias: float32 or bfloat16 [..., E] and [E]; or a routing among options.
        workspace: layer.new_workspace(T), made outside of compiled code, or any uint8 tensor with
            256 bytes more than that.
        allow_absent: given ids below 0 or from E on are experts that are not here.
        options: packed, ids (of any integer type), weights, hidden_scales, row_scale; slot_out,
            expert_weights, slot_to_row, topk_ids, routing_replay and errors are written to.
        """
        handle = self._handle
        written = {name: options.pop(name, None) for name in _WRITTEN}
        if options.get("ids") is not None:
            options["ids"] = to_layer_ids("ids", options["ids"])
        given = (hidden, logits, bias, handle.number)
        inputs = [one for one in (hidden, logits, options.get("weights")) if one is not None]
        differentiates = asks_for_gradients(inputs)
        if out is None and workspace is None and all(one is None for one in written.values()):
            result = torch.ops.narrowfloat.moe(
                *given, handle.columns, handle.dtype, **options, allow_absent=allow_absent
            )
            return Underivable.apply(result, *inputs) if differentiates else result
        if differentiates:
            raise RuntimeError("Moe: out, workspace and written options do not go with inputs that "
                               "require gradients; run it under torch.no_grad()")  # fmt: skip
        if out is None:
            shape = (*hidden.shape[:-1], handle.columns)
            out = _allocate(lambda: hidden.new_empty(shape, dtype=handle.dtype), hidden.device)
        torch.ops.narrowfloat.moe_out(
            *given, out, workspace, **options, **written, allow_absent=allow_absent
        )
        return out

    @staticmethod
    def _kept_of(state: dict[str, torch.Tensor]) -> KeptWeights:
        return KeptWeights.of_state(state)

    @staticmethod
    def _handle_for(kept: KeptWeights, device: torch.device) -> _Handle:
        return _Handle(kept.prepare(device))

    def _require_same(self, kept: KeptWeights) -> None:
        ours, theirs = self.layer.config, kept.config
        if (ours.hidden, ours.experts, ours.top_k) != (theirs.hidden, theirs.experts, theirs.top_k):
            raise ValueError(
                f"expected a layer of H={ours.hidden}, E={ours.experts}, k={ours.top_k}, got "
                f"H={theirs.hidden}, E={theirs.experts}, k={theirs.top_k}"
            )

    @property
    def _device(self) -> torch.device:
        return torch.device(self.layer._device_name)
