"""The names of FlashInfer's module `utils` that engines import."""

from __future__ import annotations

import sys
from typing import Any

from narrowfloat.compat.flashinfer._row_indices import (
    get_shuffle_block_size,
    get_shuffle_matrix_a_row_indices,
    get_shuffle_matrix_sf_a_row_indices,
)


def ceil_div(x: int, y: int) -> int:
    """x / y, rounded up."""
    return -(-x // y)


def round_up(x: int, y: int) -> int:
    """x rounded up to a multiple of y."""
    return ceil_div(x, y) * y


def next_positive_power_of_2(x: int) -> int:
    """The smallest power of two that is not below the int x; 1 for x < 1."""
    return 1 if x < 1 else 1 << (x - 1).bit_length()


def last_positive_power_of_2(x: int) -> int:
    """The largest power of two that is not above x; 1 for x < 1."""
    return 1 if x < 1 else 1 << (x.bit_length() - 1)


def calculate_tile_tokens_dim(
    num_tokens: int, num_experts: int, top_k: int, max_tile_tokens_dim: int = 128
) -> int:
    """The rows of a tile that FlashInfer's heuristic takes: 8 to max_tile_tokens_dim.

    It assumes that the largest expert gets 1.3 times the mean. Layers here choose their own tiles.
    """
    expected = int(num_tokens * top_k // num_experts * 1.3)
    return min(max(next_positive_power_of_2(expected), 8), max_tile_tokens_dim)


def get_compute_capability(device: Any) -> tuple[int, int]:
    """Major and minor compute capability of a torch.device of type cuda."""
    torch = sys.modules.get("torch")
    if torch is None or torch.device(device).type != "cuda":
        raise ValueError(f"device: device must be a cuda device, got {device}")
    major, minor = torch.cuda.get_device_capability(device)
    return major, minor


def device_support_pdl(device: Any) -> bool:
    """Whether kernels can be launched programmatically dependent there: from Hopper on."""
    return getattr(device, "type", "") == "cuda" and get_compute_capability(device)[0] >= 9


def get_native_fp4_dtype() -> Any:
    """torch.float4_e2m1fn_x2, or torch.uint8 where torch has no such type."""
    import torch

    return getattr(torch, "float4_e2m1fn_x2", torch.uint8)


__all__ = [
    "calculate_tile_tokens_dim",
    "ceil_div",
    "device_support_pdl",
    "get_compute_capability",
    "get_native_fp4_dtype",
    "get_shuffle_block_size",
    "get_shuffle_matrix_a_row_indices",
    "get_shuffle_matrix_sf_a_row_indices",
    "last_positive_power_of_2",
    "next_positive_power_of_2",
    "round_up",
]
