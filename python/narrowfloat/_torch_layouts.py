"""Operators of torch: 8-bit groups, KV caches, shuffles, bits, and the steps of a MoE layer.

Each is the function of `narrowfloat` of the same name, with all of its arguments by position.
Scales of one number are tensors here. Those that fill given tensors return nothing: they are called
`<name>_out` where there is one with new results, and take the results after the arguments, in
place of the arguments that only say how those are made.
"""

from __future__ import annotations

from typing import Any

import torch

import narrowfloat as nf
from narrowfloat import _core
from narrowfloat._shapes import product, round_up
from narrowfloat._streams import allocating_on
from narrowfloat._torch_library import library, register

_INT32, _BYTE, _FLOAT = torch.int32, torch.uint8, torch.float32


def _operator(schema: str, real: Any, fake: Any) -> None:
    library.define(schema)
    register(schema.partition("(")[0], real, fake)


def _nothing(*_: Any) -> None:
    """The shape function of an operator that returns nothing."""


def _pair(name: str, arguments: str, results: str, real: Any, fake: Any, making: str = "") -> None:
    """An operator with new results, and one with given ones.

    results: names. making: further arguments of the first one. real: takes both, and out=.
    """
    names = results.split()
    made = "Tensor" if len(names) == 1 else "(" + ", ".join(f"Tensor {one}" for one in names) + ")"
    given = ", ".join(f"Tensor({chr(97 + i)}!) {one}" for i, one in enumerate(names))
    _operator(f"{name}({arguments}{making}) -> {made}", real, fake)

    def real_out(*args: Any) -> None:
        out = args[-len(names):]
        real(*args[: -len(names)], out=out[0] if len(names) == 1 else out)

    _operator(f"{name}_out({arguments}, {given}) -> ()", real_out, _nothing)


def _groups_fake(input: Any, group_size: int, dtype: str, eps: float, order: str,
                 powers: bool) -> Any:  # fmt: skip
    *lead, cols = input.shape
    groups, rows = cols // group_size, product(lead)
    if order == "column_major_aligned":
        rows = round_up(rows, 4)
    shape = (*lead, groups) if order == "row_major" else (groups, rows)
    codes = torch.int8 if dtype == "int8" else _BYTE
    return input.new_empty(input.shape, dtype=codes), input.new_empty(shape, dtype=_FLOAT)


_pair(
    "quantize_group_8bit",
    "Tensor input, int group_size, str dtype, float eps, str scale_order, bool power_of_two_scales",
    "codes scales",
    lambda input, size, dtype, eps, order, powers, out=None: nf.quantize_group_8bit(
        input, size, dtype, eps=eps, scale_order=order, power_of_two_scales=powers, out=out
    ),
    _groups_fake,
)


def _kv_rows(input: Any) -> Any:
    *lead, cols = input.shape
    return (input.new_empty((*lead, cols // 2), dtype=_BYTE),
            input.new_empty((*lead, cols // 16), dtype=_BYTE))  # fmt: skip


_pair(
    "kv_quantize",
    "Tensor input, Tensor? decode_scale, str math",
    "values scales",
    lambda input, scale, math, out=None: nf.kv_quantize(input, scale, math=math, out=out),
    lambda input, scale, math: _kv_rows(input),
)
_pair(
    "kv_dequantize",
    "Tensor values, Tensor scales, Tensor? decode_scale",
    "out",
    nf.kv_dequantize,
    lambda values, scales, scale, dtype: values.new_empty(
        (*values.shape[:-1], 2 * values.shape[-1]), dtype=dtype
    ),
    ", ScalarType dtype",
)
_operator(
    "kv_dequantize_paged(Tensor k_cache, Tensor v_cache, Tensor k_scales, Tensor v_scales,"
    " Tensor block_tables, Tensor seq_lens, Tensor(a!) output_k, Tensor(b!) output_v,"
    " Tensor? k_scale, Tensor? v_scale, str layout) -> ()",
    lambda *args: nf.kv_dequantize_paged(*args[:8], k_scale=args[8], v_scale=args[9],
                                         layout=args[10]),
    _nothing,
)  # fmt: skip
_CACHE = "Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor(c!) k_scales, Tensor(d!) v_scales"
_operator(
    f"kv_append_paged(Tensor key, Tensor value, Tensor batch_indices, Tensor positions, {_CACHE},"
    " Tensor indices, Tensor indptr, Tensor? k_scale, Tensor? v_scale, str layout, str math)"
    " -> ()",
    lambda *args: nf.kv_append_paged(*args[:10], k_scale=args[10], v_scale=args[11],
                                     layout=args[12], math=args[13]),
    _nothing,
)  # fmt: skip
_operator(
    f"kv_append_slots(Tensor key, Tensor value, Tensor slots, {_CACHE}, Tensor? k_scale,"
    " Tensor? v_scale, str layout, str math) -> ()",
    lambda *args: nf.kv_append_slots(*args[:7], k_scale=args[7], v_scale=args[8], layout=args[9],
                                     math=args[10]),
    _nothing,
)  # fmt: skip


def _whole_caches(key: Any, value: Any, layout: str, k: Any, v: Any, math: str,
                  out: Any = None) -> Any:  # fmt: skip
    given = None if out is None else (out[:2], out[2:4], *out[4:])
    codes, scales, k_decode, v_decode = nf.kv_quantize_paged_cache(
        key, value, layout, k_encode_scale=k, v_encode_scale=v, math=math, out=given
    )
    return (*codes, *scales, k_decode, v_decode)


def _whole_caches_fake(key: Any, value: Any, *_: Any) -> Any:
    (k, k_scales), (v, v_scales) = _kv_rows(key), _kv_rows(value)
    decode = [key.new_empty((1,), dtype=_FLOAT) for _ in range(2)]
    return (k, v, k_scales, v_scales, *decode)


_pair(
    "kv_quantize_paged_cache",
    "Tensor key, Tensor value, str layout, Tensor? k_encode_scale, Tensor? v_encode_scale,"
    " str math",
    "k v k_scales v_scales k_decode_scale v_decode_scale",
    _whole_caches,
    _whole_caches_fake,
)
for _name in ("kv_reorder_v_scales", "kv_restore_v_scales"):
    _pair(_name, "Tensor scales, str layout", "out", getattr(nf, _name),
          lambda scales, layout: scales.new_empty(scales.shape, dtype=_BYTE))  # fmt: skip
for _name in ("shuffle_rows", "unshuffle_rows"):
    _pair(_name, "Tensor input, int epilogue_tile_m", "out", getattr(nf, _name),
          lambda input, tile: input.new_empty(input.shape))  # fmt: skip
_pair(
    "shuffle_scales",
    "Tensor scales, int epilogue_tile_m",
    "out",
    nf.shuffle_scales,
    lambda scales, tile: scales.new_empty(
        (*scales.shape[:-1], round_up(scales.shape[-1], 4)), dtype=_BYTE
    ),
)


def _unshuffle_fake(scales: Any, rows: int, blocks: int, tile: int) -> Any:
    size = max(1, round_up(rows, 128) * round_up(blocks, 4))
    batch = product(scales.shape) // size
    lead = () if batch == 1 or not rows * blocks else (batch,)
    return scales.new_empty((*lead, rows, blocks), dtype=_BYTE)


_pair(
    "unshuffle_scales",
    "Tensor scales, int rows, int blocks, int epilogue_tile_m",
    "out",
    nf.unshuffle_scales,
    _unshuffle_fake,
)
_pair(
    "pack_bits",
    "Tensor input, str order",
    "out",
    nf.pack_bits,
    lambda input, order: input.new_empty(((input.numel() + 7) // 8,), dtype=_BYTE),
)


def _segments_fake(input: Any, offsets: Any, order: str) -> Any:
    size = (input.numel() + 7 * (offsets.shape[0] - 1)) // 8
    return input.new_empty((size,), dtype=_BYTE), offsets.new_empty(offsets.shape)


def _segments(input: Any, offsets: Any, order: str, out: Any = None) -> Any:
    """New results have zeros after the last segment: their length is its bound."""
    if out is None:
        with allocating_on(input.device):
            size = _core.segment_packed_bytes(input.numel(), max(0, offsets.shape[0] - 1))
            out = input.new_empty((size,), dtype=_BYTE), offsets.new_empty(offsets.shape)
            out[0].zero_()
    return nf.segment_pack_bits(input, offsets, order, out=out)


_pair(
    "segment_pack_bits",
    "Tensor input, Tensor offsets, str order",
    "bytes new_offsets",
    _segments,
    _segments_fake,
)


def _permuted(ids: Any, local_experts: int, expert_offset: int, token_tile: int,
              out: Any = None) -> Any:  # fmt: skip
    given = None if out is None else nf.Permutation(token_tile, *out)
    maps = nf.permute(ids, local_experts=local_experts, expert_offset=expert_offset,
                      token_tile=token_tile, out=given)  # fmt: skip
    return (maps.slot_to_row, maps.row_to_token, maps.row_to_slot, maps.num_rows,
            maps.tile_to_expert, maps.tile_row_end, maps.num_tiles)  # fmt: skip


def _permuted_fake(ids: Any, local_experts: int, expert_offset: int, token_tile: int) -> Any:
    tokens, slots = ids.shape
    count = tokens * slots
    occupied = torch.sym_min(local_experts, count)
    tiles = occupied + (count - occupied) // token_tile
    rows = tiles * token_tile
    sizes = (count, rows, rows, 1, tiles, tiles, 1)
    return tuple(ids.new_empty((size,), dtype=_INT32) for size in sizes)


_pair(
    "permute",
    "Tensor ids, int local_experts, int expert_offset, int token_tile",
    "slot_to_row row_to_token row_to_slot num_rows tile_to_expert tile_row_end num_tiles",
    _permuted,
    _permuted_fake,
)
_pair(
    "combine",
    "Tensor slot_rows, Tensor slot_to_row, Tensor? weights",
    "out",
    lambda rows, places, weights, tokens=None, dtype=None, out=None: nf.combine(
        rows, places, weights, tokens=tokens, dtype=dtype, out=out
    ),
    lambda rows, places, weights, tokens, dtype: rows.new_empty(
        (tokens, rows.shape[-1]), dtype=dtype
    ),
    ", SymInt tokens, ScalarType dtype",
)
