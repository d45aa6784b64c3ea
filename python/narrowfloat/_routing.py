"""Routing of tokens to experts, and the permutation of their slots into rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from narrowfloat import _core
from narrowfloat._arrays import maker_of, shape_of, to_core


def optional_to_core(argument: str, array: Any) -> Any:
    """to_core() of an array that may be None."""
    return None if array is None else to_core(argument, array)


def route(
    logits: Any = None,
    *,
    top_k: int,
    method: str = "renormalize",
    bias: Any = None,
    packed: Any = None,
    ids: Any = None,
    weights: Any = None,
    experts: int | None = None,
    shared_experts: int = 0,
    n_group: int = 1,
    topk_group: int = 1,
    routed_scale: float = 1.0,
    norm_topk: bool = True,
    weights_bf16: bool = False,
    grouped_bias_bf16: bool = False,
    negative_one_is_empty: bool = False,
    replay: Any = None,
    errors: Any = None,
    out: tuple[Any, Any] | None = None,
) -> tuple[Any, Any]:
    """Experts and weights of all slots: (int32 [T, k + S], float32 [T, k + S]), best expert first.

    logits: float32, bfloat16 or float16 [T, E]. Or a precomputed routing: packed, int32 [T, k] of
        id << 16 | bfloat16 bits; or ids, int32 [T, k], and weights, float32 or bfloat16 [T, k].
    method: one of routing_methods(). bias: float32 or bfloat16 [E]; deepseek_v3 and minimax2 only.
    experts: E; with logits their columns. shared_experts: S, of ids E... and weight 1.
    n_group, topk_group: deepseek_v3. routed_scale: that and minimax2. norm_topk: sigmoid_renorm.
    weights_bf16: weights are rounded to bfloat16. grouped_bias_bf16: so is the bias of groups.
    negative_one_is_empty: a given id of -1 is an empty slot, not an error.
    replay: int16 [>= T, k] that the routed ids are also written to.
    errors: int64 [2] on a GPU: what it found in given ids; count in the low half of [0], lowest
        index in [1]. On the CPU such ids raise ValueError.
    out: arrays for the results.
    """
    given = [value for value in (logits, packed, ids) if value is not None]
    if not given:
        raise ValueError("logits: give them, or packed, or ids")
    tokens, columns = shape_of("logits" if logits is not None else "ids", given[0])
    config = _core.MoeConfig()
    config.method, config.top_k = method, top_k
    if experts is None:
        if logits is None:
            raise ValueError("experts: give it with a precomputed routing")
        experts = columns
    config.experts = experts
    config.shared_experts, config.n_group, config.topk_group = shared_experts, n_group, topk_group
    config.routed_scale, config.norm_topk = routed_scale, norm_topk
    config.weights_bf16, config.grouped_bias_bf16 = weights_bf16, grouped_bias_bf16
    config.negative_one_is_empty = negative_one_is_empty
    if out is None:
        make = maker_of("logits", given[0])
        slots = (tokens, top_k + shared_experts)
        out = make.empty(slots, "int32"), make.empty(slots, "float32")
    arrays = {"logits": logits, "bias": bias, "packed": packed, "ids": ids, "weights": weights}
    _core.route(
        {name: optional_to_core(name, array) for name, array in arrays.items()},
        config,
        {"ids": out[0], "weights": out[1], "replay": replay},
        errors,
    )
    return out


@dataclass(frozen=True)
class Permutation:
    """The rows of the slots of all tokens; int32 arrays.

    slot_to_row: [T * slots], row of slot t * slots + s, -1 where its expert is not local.
    row_to_token, row_to_slot: [max rows], -1 in padding rows and beyond the last tile.
    num_rows: [1], rows in use, padding included. num_tiles: [1], tiles in use.
    tile_to_expert, tile_row_end: [max tiles], local expert of a tile, one past its last row; 0
        beyond the last tile.
    """

    token_tile: int
    slot_to_row: Any
    row_to_token: Any
    row_to_slot: Any
    num_rows: Any
    tile_to_expert: Any
    tile_row_end: Any
    num_tiles: Any


def permute(
    ids: Any, *, local_experts: int, expert_offset: int = 0, token_tile: int | None = None,
    out: Permutation | None = None,
) -> Permutation:  # fmt: skip
    """Sorts the slots of all tokens by expert; each expert's rows are padded to whole tiles.

    ids: int32 [T, slots] of global experts. Those in [expert_offset, expert_offset +
    local_experts) have rows, in the order of the slot indexes. token_tile: a power of two; default:
    that of `out`, or default_token_tile(). out: maps to be written.
    """
    shape = shape_of("ids", ids)
    if len(shape) != 2:
        raise ValueError(f"ids: expected [tokens, slots], got {shape}")
    tokens, slots = shape
    if out is not None:
        if token_tile not in (None, out.token_tile):
            raise ValueError(f"token_tile: {token_tile}, but out has {out.token_tile}")
        token_tile = out.token_tile
    if token_tile is None:
        token_tile = _core.default_token_tile(tokens, slots, local_experts)
    tiles, rows = _core.permutation_sizes(tokens, slots, local_experts, token_tile)
    sizes = {"slot_to_row": tokens * slots, "row_to_token": rows, "row_to_slot": rows,
             "num_rows": 1, "tile_to_expert": tiles, "tile_row_end": tiles,
             "num_tiles": 1}  # fmt: skip
    if out is None:
        make = maker_of("ids", ids)
        arrays = {name: make.empty((size,), "int32") for name, size in sizes.items()}
        out = Permutation(token_tile, **arrays)
    _core.permute(ids, expert_offset, local_experts, token_tile,
                  {name: getattr(out, name) for name in sizes})  # fmt: skip
    return out


def combine(
    slot_rows: Any,
    slot_to_row: Any,
    weights: Any = None,
    *,
    tokens: int | None = None,
    dtype: Any = None,
    out: Any = None,
) -> Any:
    """The weighted sum of each token's slots, in slot order; rounded once.

    slot_rows: bfloat16, float16 or float32 [rows, H]. slot_to_row: int32 [T * slots], -1 to skip.
    weights: float32 or bfloat16 [T, slots]; absent: 1. tokens: T, where there are no weights.
    out: [T, N], N <= H: the last columns are dropped. dtype: of a new one; default: the rows'.
    """
    if out is None:
        if weights is not None:
            tokens = shape_of("weights", weights)[0]
        if tokens is None:
            raise ValueError("tokens: give it, or weights, or out")
        cols = shape_of("slot_rows", slot_rows)[-1]
        out = maker_of("slot_rows", slot_rows).empty(
            (tokens, cols), slot_rows.dtype if dtype is None else dtype
        )
    _core.combine(
        to_core("slot_rows", slot_rows),
        slot_to_row,
        optional_to_core("weights", weights),
        to_core("out", out),
    )
    return out
