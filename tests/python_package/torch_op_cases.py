"""Arguments of operators of narrowfloat.torch, and the package's functions that they stand for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import narrowfloat as nf

HAS_GPU = torch.cuda.is_available() and nf.build_info()["cuda_enabled"]
on_each_device = pytest.mark.parametrize("device", [
    "cpu", pytest.param("cuda", marks=pytest.mark.skipif(
        not HAS_GPU, reason="no GPU, or a build without CUDA"))])  # fmt: skip


def moved(value: Any, device: str) -> Any:
    """The same arguments with their tensors on a device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {name: moved(one, device) for name, one in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(moved(one, device) for one in value)
    return value


def more_cases() -> dict[str, tuple[tuple, dict]]:
    """Positional arguments, and none by keyword; new tensors in each call."""
    generator = torch.Generator().manual_seed(11)

    def floats(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    def bytes_of(*shape: int) -> torch.Tensor:
        return torch.randint(0, 120, shape, generator=generator, dtype=torch.uint8)

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    pages, rows = (4, 4, 2), floats(3, 2, 64)
    cache = [torch.zeros(*pages, width, dtype=torch.uint8) for width in (32, 32, 4, 4)]
    filled = [bytes_of(*pages, width) for width in (32, 32, 4, 4)]
    half = torch.tensor([0.5])
    out = [torch.zeros(2, 4, 2, 64, dtype=torch.bfloat16) for _ in range(2)]
    ids = torch.stack([torch.randperm(8, generator=generator)[:2] for _ in range(9)]).int()
    maps = nf.permute(ids, local_experts=8, token_tile=8)
    plain = {
        "quantize_group_8bit": (floats(5, 256), 128, "int8", 1e-10, "column_major_aligned", False),
        "kv_quantize": (floats(5, 64), half, "exact"),
        "kv_dequantize": (bytes_of(5, 32), bytes_of(5, 4), half, torch.float16),
        "kv_dequantize_paged": (*filled, torch.tensor([[3, 1], [0, 2]]), ints(4, 3), *out, half,
                                None, "NHD"),
        "kv_append_paged": (rows, floats(3, 2, 64), ints(0, 0, 1), ints(0, 5, 2), *cache,
                            ints(3, 1, 0), ints(0, 2, 3), half, None, "NHD", "exact"),
        "kv_append_slots": (rows, floats(3, 2, 64), torch.tensor([12, -1, 3]), *cache, None, half,
                            "NHD", "fast"),
        "kv_quantize_paged_cache": (floats(2, 3, 4, 64), floats(2, 3, 4, 64), "HND",
                                    torch.tensor([300.0]), None, "exact"),
        "kv_reorder_v_scales": (bytes_of(2, 3, 8, 4), "HND"),
        "kv_restore_v_scales": (bytes_of(2, 8, 3, 4), "NHD"),
        "shuffle_rows": (floats(64, 24), 128),
        "unshuffle_rows": (floats(2, 64, 24), 64),
        "shuffle_scales": (bytes_of(128, 6), 128),
        "unshuffle_scales": (bytes_of(2, 1024), 128, 6, 128),
        "pack_bits": (torch.rand(37, generator=generator) > 0.5, "little"),
        "segment_pack_bits": (torch.rand(37, generator=generator) > 0.5, ints(0, 8, 8, 24, 37),
                              "big"),
        "permute": (ids, 4, 2, 8),
        "combine": (floats(maps.row_to_slot.shape[0], 32), maps.slot_to_row,
                    torch.rand(9, 2, generator=generator), 9, torch.float32),
    }  # fmt: skip
    return {name: (arguments, {}) for name, arguments in plain.items()}


# Last arguments that only say how new results are made.
MAKING = {"kv_dequantize": 1, "combine": 2}


def out_cases() -> dict[str, tuple[tuple, tuple]]:
    """Cases of operators with given results: arguments, and the new results."""
    cases = {}
    for name, (arguments, _) in more_cases().items():
        made = getattr(torch.ops.narrowfloat, name)(*arguments)
        if made is not None:
            given = arguments[: len(arguments) - MAKING.get(name, 0)]
            cases[f"{name}_out"] = given, made if isinstance(made, tuple | list) else (made,)
    return cases


def _cache_of_six(key: Any, value: Any, layout: str, k: Any, v: Any, math: str) -> tuple:
    codes, scales, k_decode, v_decode = nf.kv_quantize_paged_cache(
        key, value, layout, k_encode_scale=k, v_encode_scale=v, math=math
    )
    return (*codes, *scales, k_decode, v_decode)


def _maps(ids: Any, local: int, offset: int, tile: int) -> tuple:
    maps = nf.permute(ids, local_experts=local, expert_offset=offset, token_tile=tile)
    return (maps.slot_to_row, maps.row_to_token, maps.row_to_slot, maps.num_rows,
            maps.tile_to_expert, maps.tile_row_end, maps.num_tiles)  # fmt: skip


def functions() -> dict[str, Callable[..., Any]]:
    """With the arguments of the operators."""
    same = ("kv_dequantize", "kv_reorder_v_scales", "kv_restore_v_scales", "shuffle_rows",
            "unshuffle_rows", "shuffle_scales", "unshuffle_scales", "pack_bits")  # fmt: skip
    return {name: getattr(nf, name) for name in same} | {
        "quantize_group_8bit": lambda x, size, dtype, eps, order, powers: nf.quantize_group_8bit(
            x, size, dtype, eps=eps, scale_order=order, power_of_two_scales=powers),
        "kv_quantize": lambda x, scale, math: nf.kv_quantize(x, scale, math=math),
        "kv_dequantize_paged": lambda *a: nf.kv_dequantize_paged(
            *a[:8], k_scale=a[8], v_scale=a[9], layout=a[10]),
        "kv_append_paged": lambda *a: nf.kv_append_paged(
            *a[:10], k_scale=a[10], v_scale=a[11], layout=a[12], math=a[13]),
        "kv_append_slots": lambda *a: nf.kv_append_slots(
            *a[:7], k_scale=a[7], v_scale=a[8], layout=a[9], math=a[10]),
        "kv_quantize_paged_cache": _cache_of_six,
        "segment_pack_bits": lambda x, ends, order: nf.segment_pack_bits(
            x, ends, order, out=(torch.zeros(8, dtype=torch.uint8), torch.empty_like(ends))),
        "permute": _maps,
        "combine": lambda rows, places, weights, tokens, dtype: nf.combine(
            rows, places, weights, tokens=tokens, dtype=dtype),
    }  # fmt: skip
