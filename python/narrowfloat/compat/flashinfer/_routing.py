"""FlashInfer's routing functions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import narrowfloat as nf
from narrowfloat._arrays import maker_of
from narrowfloat.compat.flashinfer._arguments import accepts
from narrowfloat.compat.flashinfer._arrays import (
    cast,
    check_backend,
    check_writable,
    copy_into,
    device_name,
    dtype_name,
    is_contiguous,
    is_on_gpu,
    picked,
    softplus,
    where,
)
from narrowfloat.compat.flashinfer._errors import CheckError
from narrowfloat.compat.flashinfer.tllm_enums import RoutingMethodType

_METHODS = tuple(nf.routing_methods())


class TrtllmGenRoutingResult(NamedTuple):
    """The result of trtllm_gen_routing()."""

    topk_ids: Any
    topk_weights: Any
    total_num_padded_tokens: Any
    expanded_idx_to_permuted_idx: Any
    permuted_idx_to_token_idx: Any
    cta_idx_xy_to_batch_idx: Any
    cta_idx_xy_to_mn_limit: Any
    num_non_exiting_ctas: Any


def method_name(argument: str, method: Any) -> str:
    """Our name of a RoutingMethodType."""
    number = int(method)
    if number == RoutingMethodType.Unspecified or not 0 <= number < len(_METHODS):
        raise ValueError(f"{argument}: expected a RoutingMethodType, got {method!r}")
    return _METHODS[number]


def router_options(
    method: str,
    n_group: int | None,
    topk_group: int | None,
    routed_scaling_factor: float | None,
    norm_topk_prob: bool,
) -> dict[str, Any]:
    """Keywords of route() and MoeConfig. What a method does not read is left out, as upstream."""
    options: dict[str, Any] = {"method": method}
    groups, kept = n_group or 0, topk_group or 0
    if groups > 1 or kept > 1:
        if method != "deepseek_v3":
            raise ValueError(f"n_group: {method} has no groups, got {groups} and topk_group {kept}")
        options |= {"n_group": groups, "topk_group": kept}
    if method in ("deepseek_v3", "minimax2") and routed_scaling_factor is not None:
        options["routed_scale"] = float(routed_scaling_factor)
    if method == "sigmoid_renorm":
        options["norm_topk"] = bool(norm_topk_prob)
    return options


@dataclass(frozen=True)
class RouterSizes:
    """The sizes of a router and of its shard, and their names in the caller."""

    experts: int
    top_k: int
    n_group: int | None = 0
    topk_group: int | None = 0
    local_offset: int = 0
    local_experts: int | None = None
    k_name: str = "top_k"
    local_name: str = "local_num_experts"

    def check(self) -> None:
        """Checks that apply to given routings, too."""
        if not 1 <= self.top_k <= self.experts:
            raise CheckError(
                f"{self.k_name}: expected 1 to {self.experts}, the number of experts, got "
                f"{self.top_k}"
            )
        if self.local_offset < 0:
            raise CheckError(f"local_expert_offset: expected at least 0, got {self.local_offset}")
        local = self.experts if self.local_experts is None else self.local_experts
        if local < 1 or self.local_offset + local > self.experts:
            raise CheckError(
                f"{self.local_name}: expected 1 to {self.experts - self.local_offset} from "
                f"local_expert_offset {self.local_offset} on, of {self.experts}, got {local}"
            )

    def check_method(self, method: str) -> None:
        """Checks the limits of upstream's routers."""
        self.check()
        if method == "deepseek_v3":
            self.check_deepseek()
        elif method in _UP_TO_32 and self.top_k > 32:
            raise CheckError(f"{self.k_name}: {method} takes up to 32, got {self.top_k}")

    def check_deepseek(self) -> None:
        """Checks DeepSeek-V3's groups."""
        groups, kept = self.n_group or 0, self.topk_group or 0
        if groups == 0:
            raise CheckError(
                f"n_group: n_group should not be zero for DeepSeekV3 routing, got {self.n_group}; "
                "expected 1 for no groups"
            )
        if groups < 1 or self.experts % groups:
            raise CheckError(
                f"n_group: expected a divisor of {self.experts} experts, 1 for no groups, got "
                f"{self.n_group}"
            )
        if not 1 <= kept <= min(4, groups):
            raise CheckError(
                f"topk_group: expected 1 to {min(4, groups)} of {groups} groups, got "
                f"{self.topk_group}"
            )
        usable = self.experts // groups * kept
        most = min(usable - 1, 8 if self.experts <= 384 else 22)
        if self.top_k > most:
            raise CheckError(
                f"{self.k_name}: expected 1 to {most} of {usable} experts in the kept groups, got "
                f"{self.top_k}"
            )

    def check_grouped_kernel(self) -> None:
        """Checks what the trtllm kernel for groups takes, beyond what the method itself needs."""
        groups = self.n_group or 0
        if groups <= 1:
            return
        if groups > 8:
            raise CheckError(f"n_group: expected at most 8 groups, got {groups}")
        if self.experts % 4:
            raise CheckError(
                f"num_experts: expected a multiple of 4 with groups, got {self.experts}")
        if self.experts // groups > 32:
            raise CheckError(
                f"n_group: expected up to 32 experts a group, got {self.experts // groups}")

    def check_shared(self, method: str, shared: int) -> None:
        """Checks fused shared experts: upstream has them in DeepSeek-V3's router with groups."""
        if shared < 0:
            raise CheckError(f"num_fused_shared_experts: must be non-negative, got {shared}")
        if shared == 0:
            return
        if method != "deepseek_v3" or (self.n_group or 0) <= 1:
            raise CheckError(
                f"num_fused_shared_experts: {method} with n_group {self.n_group} does not support "
                f"fusing shared expert; expected deepseek_v3 with at least 2 groups, or 0 shared "
                f"experts, got {shared}"
            )
        room = min(32 - self.top_k, 512 - self.experts)
        if shared > room:
            raise CheckError(
                f"num_fused_shared_experts: expected at most {room} beside {self.k_name} "
                f"{self.top_k} of {self.experts} experts (32 slots, 512 experts in all), got "
                f"{shared}"
            )


_UP_TO_32 = ("renormalize", "renormalize_naive", "sigmoid_renorm", "sigmoid", "topk_sigmoid")


def padded(array: Any, size: int, value: int) -> Any:
    """The int32 elements, followed by the value up to the size."""
    count = array.shape[0]
    if count == size:
        return array
    longer = maker_of("array", array).empty((size,), "int32")
    longer[:count], longer[count:] = array, value
    return longer


def bias_for(method: str, bias: Any) -> Any:
    """The bias, for the methods that read one."""
    return bias if method in ("deepseek_v3", "minimax2") else None


@accepts("routing_logits")
def trtllm_gen_routing(
    routing_logits: Any,
    routing_bias: Any,
    routing_method: Any,
    top_k: int,
    *,
    num_fused_shared_experts: int = 0,
    n_group: int = 0,
    topk_group: int = 0,
    local_expert_offset: int = 0,
    local_num_experts: int | None = None,
    routed_scaling_factor: float = 1.0,
    tile_tokens_dim: int = 8,
    norm_topk_prob: bool = True,
    enable_pdl: bool | None = None,
) -> TrtllmGenRoutingResult:
    """Router and permutation alone: a TrtllmGenRoutingResult. The rank inside an expert is stable.

    routing_logits: float32 or bfloat16 [T, E]. routing_bias: float32 or bfloat16 [E] or None.
    routing_method: RoutingMethodType. top_k, n_group, topk_group: int.
    routed_scaling_factor: float. norm_topk_prob: bool. As narrowfloat.route() has them.
    num_fused_shared_experts: S, int; slots of weight 1 that follow the k of the router, of experts
        E to E + S - 1; only DeepSeekV3 with groups.
    local_expert_offset, local_num_experts: int; the experts whose slots get rows; default: all. A
        shard has S experts more, those that follow it: shared ones only for the last shard.
    tile_tokens_dim: int, a power of two; rows of a tile. enable_pdl: changes nothing.
    Gives bfloat16 weights [T, k + S], int32 ids and rows of slots of that shape, and the int32 maps
    of narrowfloat.permute().
    """
    if len(routing_logits.shape) != 2 or dtype_name(routing_logits) not in ("float32", "bfloat16"):
        raise ValueError(
            "routing_logits: expected float32 or bfloat16 of two axes, got "
            f"{dtype_name(routing_logits)} {tuple(routing_logits.shape)}"
        )
    method = method_name("routing_method", routing_method)
    tokens, experts = routing_logits.shape
    router = RouterSizes(experts, top_k, n_group, topk_group, local_expert_offset,
                         local_num_experts)  # fmt: skip
    router.check_method(method)
    router.check_grouped_kernel()
    shared = num_fused_shared_experts
    router.check_shared(method, shared)
    options = router_options(method, n_group, topk_group, routed_scaling_factor, norm_topk_prob)
    ids, weights = nf.route(
        routing_logits, bias=bias_for(method, routing_bias), top_k=top_k, shared_experts=shared,
        weights_bf16=True, grouped_bias_bf16="n_group" in options, **options,
    )  # fmt: skip
    local = (experts if local_num_experts is None else local_num_experts) + shared
    maps = nf.permute(ids, local_experts=local, expert_offset=local_expert_offset,
                      token_tile=tile_tokens_dim)  # fmt: skip
    outside = (ids < local_expert_offset) | (ids >= local_expert_offset + local)
    # Upstream sizes the maps for the slots of all experts, whatever the shard.
    slots, total = tokens * (top_k + shared), experts + shared
    tiles = min(slots, total) + max(slots - total, 0) // tile_tokens_dim
    return TrtllmGenRoutingResult(
        where(~outside, ids, -1),
        cast(weights, "bfloat16"),
        maps.num_rows,
        maps.slot_to_row.reshape(tuple(ids.shape)),
        padded(maps.row_to_token, tiles * tile_tokens_dim, -1),
        padded(maps.tile_to_expert, tiles, 0),
        padded(maps.tile_row_end, tiles, 0),
        maps.num_tiles,
    )


@accepts("scores", "topk_values", "topk_indices")
def fused_topk_deepseek(
    scores: Any,
    bias: Any,
    n_group: int,
    topk_group: int,
    topk: int,
    routed_scaling_factor: float,
    topk_values: Any,
    topk_indices: Any,
    launch_with_pdl: bool = True,
    routing_replay_out: Any = None,
    *,
    backend: str = "default",
) -> None:
    """DeepSeek-V3's routing into topk_values and topk_indices.

    scores, bias: float32, float16 or bfloat16 [T, E] and [E].
    n_group, topk_group, topk: groups of experts, those that are kept, and k; ints.
    routed_scaling_factor: float. topk_values: of any float dtype [T, k]; topk_indices: int32 or
    int64 [T, k]; both written to. routing_replay_out: int16 [>= T, k], written to, or None.
    launch_with_pdl, backend: change nothing.
    ValueError where upstream's kernel has none: k above 8; more than 384 experts, in groups 256;
    groups of more than 32 experts, or more than 128 in the kept ones.
    """
    check_backend(backend)
    _check_fused_topk(scores, n_group, topk_group, topk)
    for name, array in (("scores", scores), ("bias", bias), ("topk_values", topk_values),
                        ("topk_indices", topk_indices)):  # fmt: skip
        if not is_contiguous(array):
            raise ValueError(f"{name}: must be contiguous, got a strided view")
    if dtype_name(bias) == "float16":  # The library takes biases of float32 and bfloat16.
        bias = cast(bias, "float32")
    _check_output("topk_indices", topk_indices, (scores.shape[0], topk), ("int32", "int64"))
    _check_output("topk_values", topk_values, (scores.shape[0], topk),
                  ("float32", "float16", "bfloat16", "float64"))  # fmt: skip
    ids, weights = nf.route(
        scores, bias=bias, top_k=topk, method="deepseek_v3", replay=routing_replay_out,
        n_group=n_group, topk_group=topk_group, routed_scale=float(routed_scaling_factor),
    )  # fmt: skip
    copy_into("topk_indices", topk_indices, ids)
    copy_into("topk_values", topk_values, weights)


def _check_fused_topk(scores: Any, n_group: int, topk_group: int, topk: int) -> None:
    if len(scores.shape) != 2:
        raise ValueError(f"scores: expected two axes, got shape {tuple(scores.shape)}")
    experts = scores.shape[1]
    RouterSizes(experts, topk, n_group, topk_group, k_name="topk").check_method("deepseek_v3")
    if topk > 8:
        raise ValueError(f"topk: expected up to 8, got {topk}")
    if n_group == 1:
        if experts > 384:
            raise ValueError(f"scores: expected up to 384 experts without groups, got {experts}")
    elif experts > 256:
        raise ValueError(f"scores: expected up to 256 experts in groups, got {experts}")
    elif experts // n_group > 32:
        raise ValueError(f"n_group: expected up to 32 experts a group, got {experts // n_group}")
    elif experts // n_group * topk_group > 128:
        raise ValueError(f"topk_group: expected up to 128 experts in the kept groups, got "
                         f"{experts // n_group * topk_group}")  # fmt: skip


def _check_output(name: str, out: Any, shape: tuple[int, ...], types: tuple[str, ...]) -> None:
    """Checks an output before the first write to any."""
    check_writable(name, out)
    if tuple(out.shape) != shape or dtype_name(out) not in types:
        raise ValueError(
            f"{name}: expected {' or '.join(types)} of shape {shape}, got {dtype_name(out)} "
            f"{tuple(out.shape)}"
        )


@accepts("token_selected_experts")
def moe_sort(
    token_selected_experts: Any,
    token_final_scales: Any,
    num_experts: int,
    top_k: int,
    local_expert_offset: int = 0,
    num_local_experts: int | None = None,
    tile_tokens_dim: int = 128,
    enable_pdl: bool = False,
    out_tile_idx_to_expert_idx: Any = None,
    out_tile_idx_to_mn_limit: Any = None,
    out_expanded_idx_to_permuted_idx: Any = None,
    out_permuted_idx_to_expanded_idx: Any = None,
    out_total_num_padded_tokens: Any = None,
    out_num_non_exiting_tiles: Any = None,
) -> tuple[Any, ...]:
    """Slots sorted by expert: the maps of trtllm_gen_routing() under other names, int32.

    token_selected_experts: int32 [T, k]. token_final_scales: not needed. num_experts, top_k: E, k.
    local_expert_offset, num_local_experts: the experts whose slots get rows; default: all.
    tile_tokens_dim: int, a power of two; rows of a tile. enable_pdl: changes nothing.
    out_tile_idx_to_expert_idx, out_tile_idx_to_mn_limit: expert of a tile, and end of its rows.
    out_expanded_idx_to_permuted_idx: [T, k], row of a slot. out_permuted_idx_to_expanded_idx: slot
    of a row. out_total_num_padded_tokens, out_num_non_exiting_tiles: [1]. Written to where given.
    """
    if token_selected_experts.shape[1] != top_k:
        raise ValueError(f"top_k: {top_k}, but {token_selected_experts.shape[1]} experts a token")
    RouterSizes(num_experts, top_k, 0, 0, local_expert_offset, num_local_experts,
                local_name="num_local_experts").check()  # fmt: skip
    local = num_experts if num_local_experts is None else num_local_experts
    maps = nf.permute(token_selected_experts, local_experts=local, token_tile=tile_tokens_dim,
                      expert_offset=local_expert_offset)  # fmt: skip
    found = (
        ("out_tile_idx_to_expert_idx", out_tile_idx_to_expert_idx, maps.tile_to_expert),
        ("out_tile_idx_to_mn_limit", out_tile_idx_to_mn_limit, maps.tile_row_end),
        ("out_expanded_idx_to_permuted_idx", out_expanded_idx_to_permuted_idx,
         maps.slot_to_row.reshape(tuple(token_selected_experts.shape))),
        ("out_permuted_idx_to_expanded_idx", out_permuted_idx_to_expanded_idx, maps.row_to_slot),
        ("out_total_num_padded_tokens", out_total_num_padded_tokens, maps.num_rows),
        ("out_num_non_exiting_tiles", out_num_non_exiting_tiles, maps.num_tiles),
    )  # fmt: skip
    for name, out, value in found:
        if out is not None:
            _check_output(name, out, tuple(value.shape), ("int32",))
    return tuple(
        value if out is None else copy_into(name, out, value) for name, out, value in found
    )


def _check_hash_topk(router_logits: Any, input_ids: Any, tid2eid: Any, shared: int,
                     factor: float) -> None:  # fmt: skip
    """Shapes, types and numbers; not what device arrays hold."""
    if shared not in (0, 1):
        raise ValueError(f"num_fused_shared_experts: expected 0 or 1, got {shared}")
    if shared and not (math.isfinite(factor) and factor > 0):
        raise ValueError(
            "routed_scaling_factor: must be positive and finite when a shared expert is fused, got "
            f"{factor}"
        )
    for name, array, axes, dtype in (("router_logits", router_logits, 2, "float32"),
                                     ("input_ids", input_ids, 1, "int64"),
                                     ("tid2eid", tid2eid, 2, "int32")):  # fmt: skip
        if len(array.shape) != axes or dtype_name(array) != dtype:
            raise ValueError(f"{name}: expected {dtype} of {axes} axes, got "
                             f"{dtype_name(array)} {tuple(array.shape)}")  # fmt: skip
        if not is_contiguous(array):
            raise ValueError(f"{name}: must be contiguous, got a strided view")
        if device_name(array) != device_name(router_logits):
            raise ValueError(f"{name}: must be on the same device as router_logits, "
                             f"{device_name(router_logits)}, got {device_name(array)}")  # fmt: skip
    if input_ids.shape[0] != router_logits.shape[0]:
        raise ValueError(f"input_ids: {input_ids.shape[0]} tokens, but "
                         f"{router_logits.shape[0]} rows of router_logits")  # fmt: skip
    if not 1 <= tid2eid.shape[1] <= 32 - shared:
        raise ValueError(f"tid2eid: expected 1 to {32 - shared} experts a token, got "
                         f"{tid2eid.shape[1]}")  # fmt: skip
    if tid2eid.shape[0] == 0 or router_logits.shape[1] == 0:
        raise ValueError("tid2eid, router_logits: expected at least one token id and one expert")


@accepts()
def hash_topk(
    router_logits: Any,
    input_ids: Any,
    tid2eid: Any,
    num_fused_shared_experts: int = 0,
    routed_scaling_factor: float = 1.0,
    launch_with_pdl: bool = True,
) -> tuple[Any, Any]:
    """Experts from a table by token id: float32 weights [T, k + S] and int32 ids.

    router_logits: float32 [T, E]; weights come from them. input_ids: int64 [T]. tid2eid: int32
    [vocabulary, k]. Ids out of range are a ValueError on the CPU; on a GPU their slots get the id
    -1 and the weight 0. num_fused_shared_experts: S, 0 or 1; the last slot is the expert E.
    routed_scaling_factor: float, positive with a shared expert. launch_with_pdl: changes nothing.
    """
    shared = num_fused_shared_experts
    _check_hash_topk(router_logits, input_ids, tid2eid, shared, routed_scaling_factor)
    (tokens, experts), top_k = router_logits.shape, tid2eid.shape[1]
    known = (input_ids >= 0) & (input_ids < tid2eid.shape[0])
    routed = tid2eid[where(known, input_ids, 0)]
    usable = known[:, None] & (routed >= 0) & (routed < experts)
    if not is_on_gpu(router_logits):
        for name, valid in (("input_ids", known), ("tid2eid", usable)):
            if not bool(valid.all()):
                raise ValueError(f"{name}: holds values that are out of range")
    # Wide, since softplus of logits below -104 is nothing in float32.
    x = picked(cast(router_logits, "float64"), where(usable, routed, 0))
    root = where(usable, softplus(x) ** 0.5, 0)
    total = root.sum(-1, keepdims=True)
    make = maker_of("router_logits", router_logits)
    ids = make.empty((tokens, top_k + shared), "int32")
    weights = make.empty((tokens, top_k + shared), "float32")
    ids[:, :top_k] = where(usable, routed, -1)
    ids[:, top_k:] = experts
    weights[:, :top_k] = root / where(total != 0, total, 1)
    weights[:, top_k:] = 1.0 / routed_scaling_factor
    return weights, ids
