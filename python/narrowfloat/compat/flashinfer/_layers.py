"""Prepared layers of weights that come with every call, and the common part of all entry points.

FlashInfer's functions take raw weights each time; a MoeLayer is prepared once. Layers are kept by
the identity of their weights (address, shape, strides, type, device, and torch's count of
modifications) and of every configuration value, and are freed with the memory of any of the
weights: new views that each call makes find the layer again.
"""

from __future__ import annotations

import threading
import weakref
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

import narrowfloat as nf
from narrowfloat._arrays import is_torch, maker_of
from narrowfloat._streams import is_capturing
from narrowfloat.compat.flashinfer._arguments import kind_of
from narrowfloat.compat.flashinfer._arrays import (
    as_type,
    cast,
    check_writable,
    dtype_name,
    is_contiguous,
    to_float32,
)
from narrowfloat.compat.flashinfer.tllm_enums import ActivationType, RoutingMethodType
from narrowfloat.compat.flashinfer._routing import (
    RouterSizes,
    bias_for,
    method_name,
    router_options,
)
from narrowfloat.compat.flashinfer._tuning import layer_for

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

T = TypeVar("T")
_layers: dict[Hashable, Any] = {}  # Layers, and packed weights of GEMMs.
_finalizers: dict[Hashable, list[weakref.finalize[Any, Any]]] = {}  # Finalizers of each kept layer.
_building: dict[Hashable, threading.Lock] = {}
_lock = threading.Lock()


def clear_prepared_cache() -> None:
    """Forgets all layers and packed weights. Tiles of autotune() stay.

    Needed after weights were changed in a way that they do not tell.

    Those are NumPy arrays, torch tensors written through `.data`, and torch's inference tensors.
    """
    for key in list(_layers):
        _forget(key)


def prepared_cache_size() -> int:
    """Layers and packed weights of GEMMs that are kept."""
    return len(_layers)


def _identity(array: Any) -> Hashable:
    if array is None:
        return None
    if is_torch(array):
        version = 0 if array.is_inference() else array._version
        return (array.data_ptr(), tuple(array.shape), array.stride(), array.dtype, array.device,
                version)  # fmt: skip
    if not hasattr(array, "ctypes"):
        return array
    return (array.ctypes.data, array.shape, array.strides, array.dtype.str)


def _memory(array: Any) -> Any:
    """An object that lives as long as the memory of an array; None if it has none."""
    while isinstance(array, np.ndarray) and (is_torch(array.base) or hasattr(array.base, "ctypes")):
        array = array.base
    if is_torch(array):
        return array.untyped_storage()  # The same object for all views.
    return array if hasattr(array, "ctypes") else None


def _forget(key: Hashable) -> None:
    """Drops a layer; what waits for the end of its other weights goes with it."""
    _layers.pop(key, None)
    for finalizer in _finalizers.pop(key, ()):
        finalizer.detach()


def _keep(key: Hashable, weights: tuple[Any, ...], layer: Any) -> None:
    finalizers = []
    for memory in map(_memory, weights):
        if memory is not None:
            finalizers.append(weakref.finalize(memory, _forget, key))
            finalizers[-1].atexit = False
    _finalizers[key] = finalizers
    _layers[key] = layer


def _kept(key: Hashable, weights: tuple[Any, ...], build: Callable[[], T]) -> T:
    found: T | None = _layers.get(key)
    if found is not None:
        return found
    with _lock:
        building = _building.setdefault(key, threading.Lock())
    with building:  # Threads that miss at once prepare one layer.
        try:
            found = _layers.get(key)
            if found is None:
                found = build()
                _keep(key, weights, found)
            return found
        finally:
            with _lock:
                _building.pop(key, None)


# Parameters of an activation -> their names in the functions trtllm_*, and in
# cutlass_fused_moe().
TRTLLM_PARAMETERS = {"alpha": "gemm1_alpha", "beta": "gemm1_beta",
                     "limit_gate": "gemm1_clamp_limit",
                     "limit_up": "gemm1_clamp_limit"}  # fmt: skip
CUTLASS_PARAMETERS = {"alpha": "swiglu_alpha", "beta": "swiglu_beta", "limit_gate": "swiglu_limit",
                      "limit_up": "swiglu_limit"}  # fmt: skip


def _of_activation(names: dict[str, str]) -> dict[str, str]:
    return {f"{prefix}activation.{ours}": argument
            for prefix in ("config.", "") for ours, argument in names.items()}  # fmt: skip


_SAME_NAMES = {"config.top_k": "top_k", "config.experts": "num_experts", "out:": "output"}
# How the library's messages begin -> arguments of the functions whose name begins with trtllm_.
_TRTLLM_NAMES = _SAME_NAMES | _of_activation(TRTLLM_PARAMETERS) | {
    "logits:": "routing_logits",
    "replay:": "routing_replay_out", "row_scale:": "per_token_scale",
    "config.local_experts": "local_num_experts", "config.expert_offset": "local_expert_offset",
    "weights.w1": "gemm1_weights", "weights.w2": "gemm2_weights", "weights.bias1": "gemm1_bias",
    "weights.bias2": "gemm2_bias", "w1_scales": "gemm1_weights_scale",
    "w2_scales": "gemm2_weights_scale",
    "weights.scales": "gemm1_weights_scale, gemm2_weights_scale",
    "weights.": "gemm1_weights, gemm2_weights",
    "config.hidden": "hidden_states", "config.inter": "intermediate_size",
    "hidden:": "hidden_states", "hidden_scales": "hidden_states_scale", "bias:": "routing_bias",
    "packed:": "topk_ids", "ids:": "topk_ids", "weights:": "topk_ids",
}  # fmt: skip
# Those of cutlass_fused_moe().
_CUTLASS_NAMES = _SAME_NAMES | _of_activation(CUTLASS_PARAMETERS) | {
    "out_dtype": "output_dtype", "scales:": "input_sf",
    "weights.w1": "fc1_expert_weights", "weights.w2": "fc2_expert_weights",
    "weights.bias1": "fc1_expert_biases", "weights.bias2": "fc2_expert_biases",
    "w1_scales": "quant_scales", "w2_scales": "quant_scales", "weights.scales": "quant_scales",
    "weights.": "fc1_expert_weights, fc2_expert_weights", "config.hidden": "input",
    "config.inter": "fc2_expert_weights", "hidden:": "input", "hidden_scales": "input_sf",
    "weights:": "token_final_scales", "ids:": "token_selected_experts",
}  # fmt: skip


@contextmanager
def naming_arguments(of_cutlass: bool) -> Iterator[None]:
    """Puts the caller's argument in the place of the library's own in messages."""
    try:
        yield
    except (ValueError, NotImplementedError) as error:
        text = str(error)
        for ours, argument in (_CUTLASS_NAMES if of_cutlass else _TRTLLM_NAMES).items():
            if text.startswith(ours):
                raise kind_of(error, text)(f"{argument}: {text}") from error
        raise


def prepared(argument: str, weights: tuple[Any, ...], facts: Hashable,
             build: Callable[[], nf.MoeLayer]) -> nf.MoeLayer:  # fmt: skip
    """The layer of these weights, built if it is not there. argument: what errors name."""

    def build_now() -> nf.MoeLayer:
        with naming_arguments(argument == "fc1_expert_weights"):
            return build()

    return kept(argument, weights, facts, build_now)


def kept(argument: str, weights: tuple[Any, ...], facts: Hashable, build: Callable[[], T]) -> T:
    """The layer or the packed weights of these arrays, built if it is not there."""

    def build_now() -> T:
        where = [weight.device for weight in weights if is_torch(weight) and weight.is_cuda]
        if where and is_capturing(where[0]):
            raise RuntimeError(
                f"{argument}: not prepared yet, which a graph capture cannot do; call once "
                "before it, with weights, scales and parameters in the same memory"
            )
        return build()

    key = (facts, tuple(_identity(weight) for weight in weights))
    return _kept(key, weights, build_now)


def with_known_tiles(op: str, layer: nf.MoeLayer, hidden: Any,
                     arguments: dict[str, Any]) -> nf.MoeLayer:  # fmt: skip
    """The layer with tiles of autotune(); arguments: keywords of run() without outputs."""

    def runs(tokens: int, layers: Sequence[nf.MoeLayer]) -> Sequence[Callable[[], Any]]:
        cut = {name: value if name == "bias" or value is None else value[:tokens]
               for name, value in arguments.items()}  # fmt: skip
        out = maker_of("hidden_states", hidden).empty((tokens, layer.config.hidden),
                                                      layer.config.out_dtype)  # fmt: skip
        # One lock for all layers.
        largest = max(layers, key=lambda candidate: candidate.required_workspace(tokens))
        space = largest.new_workspace(tokens)
        return [partial(candidate.run, hidden[:tokens], out=out, workspace=space, **cut)
                for candidate in layers]  # fmt: skip

    return layer_for(op, layer, hidden.shape[0], runs)


@dataclass(frozen=True)
class Shape:
    """The arguments about sizes and routing that all trtllm_* entry points have."""

    num_experts: int
    top_k: int
    n_group: int | None
    topk_group: int | None
    intermediate_size: int
    local_expert_offset: int
    local_num_experts: int
    routed_scaling_factor: float | None
    routing_method_type: int
    norm_topk_prob: bool = True
    shared: int = 0

    def __post_init__(self) -> None:
        """Refuses shared experts where upstream has none."""
        if self.shared <= 0:
            return
        if self.local_expert_offset != 0 or self.local_num_experts != self.num_experts:
            raise ValueError(
                "num_fused_shared_experts: Fused shared experts do not yet support expert "
                "parallelism; expected local_expert_offset 0 and local_num_experts "
                f"{self.num_experts}, got {self.local_expert_offset} and {self.local_num_experts}"
            )
        if int(self.routing_method_type) != RoutingMethodType.DeepSeekV3:
            raise ValueError(
                "num_fused_shared_experts: Fused shared experts are only supported with DeepSeekV3 "
                f"routing_method_type, got {self.routing_method_type}"
            )
        RouterSizes(self.num_experts, self.top_k, self.n_group).check_shared(
            "deepseek_v3", self.shared)  # fmt: skip

    def config(self, from_logits: bool, **values: Any) -> nf.MoeConfig:
        """The configuration, of a routing from logits or of a given one."""
        options: dict[str, Any] = {}
        sizes = RouterSizes(self.num_experts, self.top_k, self.n_group, self.topk_group,
                            self.local_expert_offset, self.local_num_experts)  # fmt: skip
        sizes.check()
        if from_logits:
            method = method_name("routing_method_type", self.routing_method_type)
            sizes.check_method(method)
            sizes.check_grouped_kernel()
            options = router_options(method, self.n_group, self.topk_group,
                                     self.routed_scaling_factor, self.norm_topk_prob)  # fmt: skip
            options |= {"weights_bf16": True, "grouped_bias_bf16": "n_group" in options}
        return nf.MoeConfig(
            inter=self.intermediate_size,
            experts=self.num_experts,
            top_k=self.top_k,
            shared_experts=self.shared,
            expert_offset=self.local_expert_offset,
            local_experts=self.local_num_experts,
            negative_one_is_empty=True,
            **options,
            **values,
        )

    def bias(self, routing_bias: Any) -> Any:
        """The routing bias, for methods that read one."""
        return bias_for(method_name("routing_method_type", self.routing_method_type), routing_bias)


UNROUTED = RoutingMethodType.Renormalize  # For given routings, where the method does not count.


def _copied(value: Any) -> Any:
    """A copy of an array of the caller, which a layer must not keep alive."""
    if is_torch(value):
        return value.detach().clone()
    return value.copy() if isinstance(value, np.ndarray) else value


def activation_of(kind: int, parameters: dict[str, Any], names: dict[str, str],
                  geglu: str = "geglu_tanh") -> nf.Activation:  # fmt: skip
    """An ActivationType with its parameters in real units, alpha and so on; names: the caller's."""
    try:
        type_ = ActivationType(int(kind))
    except ValueError:
        raise ValueError(f"activation_type: expected an ActivationType, got {kind!r}") from None
    given = {name: _copied(value) for name, value in parameters.items() if value is not None}
    if type_ in (ActivationType.Swiglu, ActivationType.SwigluBias):
        return nf.Activation("swiglu", **given)
    if type_ == ActivationType.Situ:
        return nf.Activation("situ_glu", **({"alpha": 1.0, "beta": 1.0} | given))
    if type_ == ActivationType.SwigluStep:
        limits = {"limit_gate": STEP_LIMIT, "limit_up": STEP_LIMIT} | given
        return nf.Activation("swiglu_step", **limits)
    plain = {ActivationType.Relu: "relu", ActivationType.Silu: "silu",
             ActivationType.Geglu: geglu, ActivationType.Relu2: "relu2",
             ActivationType.GegluTanh: "geglu_tanh",
             ActivationType.Identity: "identity"}  # fmt: skip
    if type_ not in plain:
        raise NotImplementedError(f"activation_type: {type_.name} is not offered")
    if given:
        raise ValueError(
            f"{names[next(iter(given))]}: {type_.name} does not read it; expected None"
        )
    return nf.Activation(plain[type_])


STEP_LIMIT = 7.0  # The limit of SwigluStep where the caller gives none.


def step_limit(kind: int, up: Any, gate: Any) -> Any:
    """The limit of up rows whose factor contains the intermediate's multiplier; None: no limit."""
    return STEP_LIMIT * up / gate if int(kind) == ActivationType.SwigluStep else None


def is_gated(kind: int) -> bool:
    """Whether the first matrix has two halves; False for numbers without an activation."""
    return int(kind) in set(ActivationType) and ActivationType(int(kind)).is_gated


def parameters_of(alpha: Any, beta: Any, limit: Any) -> dict[str, Any]:
    """Those of an activation with one limit."""
    return {"alpha": alpha, "beta": beta, "limit_gate": limit, "limit_up": limit}


def axes_of(argument: str, array: Any, axes: int) -> Any:
    """The array, which must be there with so many axes."""
    shape = getattr(array, "shape", None)
    if shape is None or len(shape) != axes:
        got = "None" if array is None else shape and tuple(shape) or type(array).__name__
        raise ValueError(f"{argument}: expected an array of {axes} axes, got {got}")
    return array


def check_valid_sizes(hidden: Any, valid_hidden: int | None, inter: int,
                      valid_inter: int | None) -> None:  # fmt: skip
    """NotImplementedError for sizes below those of the arrays: padded layers are not offered."""
    width = axes_of("hidden_states", hidden, 2).shape[1]
    width *= 2 if dtype_name(hidden) == "uint8" else 1
    for name, valid, size in (("valid_hidden_size", valid_hidden, width),
                              ("valid_intermediate_size", valid_inter, inter)):  # fmt: skip
        if valid is not None and valid != size:
            raise NotImplementedError(f"{name}: expected {size}, the size of the arrays, or None; "
                                      f"got {valid}: padded weights are not offered")  # fmt: skip


def each(argument: str, value: Any, experts: int, like: Any) -> Any:
    """A scalar tensor, number or vector as float32 [experts]."""
    if value is None:
        raise ValueError(f"{argument}: expected 1 or {experts} values, got None")
    vector = to_float32(value, like)
    if vector.shape[0] == experts:
        return vector
    if vector.shape[0] != 1:
        raise ValueError(f"{argument}: expected 1 or {experts} values, got {vector.shape[0]}")
    filled = maker_of("input", like).empty((experts,), "float32")
    filled[:] = vector[0]
    return filled


@dataclass
class Run:
    """One call of a function: its name, hidden states with scales, the routing, the outputs."""

    op: str
    hidden: Any
    hidden_scale: Any = None
    row_scale: Any = None
    logits: Any = None
    bias: Any = None
    topk_ids: Any = None  # Packed, or a tuple of ids and weights.
    do_finalize: bool = True
    output: Any = None
    replay: Any = None

    def __post_init__(self) -> None:
        axes_of("hidden_states", self.hidden, 2)
        if self.logits is None and self.topk_ids is None:
            name = "topk_ids" if "routed" in self.op else "routing_logits"
            raise ValueError(f"{name}: expected the routing, got None")

    def routing(self) -> dict[str, Any]:
        """Keywords of MoeLayer.run()."""
        if self.logits is not None:
            return {"logits": self.logits, "bias": self.bias}
        if isinstance(self.topk_ids, tuple):
            return {"ids": self.topk_ids[0], "weights": self.topk_ids[1]}
        return {"packed": self.topk_ids}

    def on(self, layer: nf.MoeLayer) -> Any:
        """The function's output, or the three pieces of do_finalize=False."""
        with naming_arguments(of_cutlass=False):
            return self._on(layer)

    def _on(self, layer: nf.MoeLayer) -> Any:
        arguments = {
            **self.routing(),
            "hidden_scales": self.hidden_scale,
            "row_scale": self.row_scale,
        }
        layer = with_known_tiles(self.op, layer, self.hidden, arguments)
        is_separate = layer.config.shared_experts > 0 and self.replay is not None
        if is_separate:
            self._check_replay(layer.config.top_k)
        arguments["routing_replay"] = None if is_separate else self.replay
        found = self._run(layer, arguments)
        if is_separate:
            self._replay_routed(layer.config)
        return found

    def _check_replay(self, top_k: int) -> None:
        """Before anything is written."""
        rows, tokens = self.replay, self.hidden.shape[0]
        check_writable("routing_replay_out", rows)
        if dtype_name(rows) != "int16" or len(rows.shape) != 2 or rows.shape[1] != top_k \
                or rows.shape[0] < tokens or not is_contiguous(rows):  # fmt: skip
            raise ValueError(
                f"routing_replay_out: expected contiguous int16 [>= {tokens}, {top_k}], got "
                f"{dtype_name(rows)} {tuple(rows.shape)}"
            )

    def _replay_routed(self, config: nf.MoeConfig) -> None:
        """The routed ids of a layer with shared experts, beside which it gives none itself."""
        nf.route(
            self.logits, bias=self.bias, top_k=config.top_k, method=config.method,
            n_group=config.n_group, topk_group=config.topk_group, replay=self.replay,
            routed_scale=config.routed_scale, grouped_bias_bf16=config.grouped_bias_bf16,
        )  # fmt: skip

    def _run(self, layer: nf.MoeLayer, arguments: dict[str, Any]) -> Any:
        if self.do_finalize:
            return layer.run(self.hidden, out=self.output, **arguments)
        if self.output is not None:
            raise ValueError("output: needs do_finalize")
        tokens, config = self.hidden.shape[0], layer.config
        slots = config.top_k + config.shared_experts
        make = maker_of("hidden_states", self.hidden)
        rows = make.empty((layer.max_rows(tokens), config.hidden), "bfloat16")
        weights = make.empty((tokens, slots), "float32")
        places = make.empty((tokens * slots,), "int32")
        layer.run(self.hidden, slot_out=rows, expert_weights=weights, slot_to_row=places,
                  **arguments)  # fmt: skip
        if isinstance(self.topk_ids, tuple):
            return [rows, self.topk_ids[1], places]
        return [rows, cast(weights, "bfloat16"), places]


def plain_bytes(array: Any) -> Any:
    """One-byte scales of whatever type they are typed as, as uint8."""
    return None if array is None else as_type(array, "uint8")
