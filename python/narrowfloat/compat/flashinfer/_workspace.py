"""Workspaces that callers of cutlass_fused_moe() bring: how large, and where they begin."""

from __future__ import annotations

from math import prod
from typing import Any

import narrowfloat as nf
from narrowfloat._arrays import is_torch
from narrowfloat._shapes import round_up
from narrowfloat.compat.flashinfer._arrays import as_type, dtype_name, refuse
from narrowfloat.compat.flashinfer.tllm_enums import ActivationType
from narrowfloat.compat.flashinfer._layers import is_gated

_ALIGNMENT = 256  # Bytes, of a layer's workspace; callers align to 128.


def check_moe_backend(backend: str) -> None:
    """ValueError for a backend that cutlass_fused_moe() has not."""
    if backend not in ("cutlass", "cake"):
        raise ValueError(f"backend: expected cutlass or cake, got {backend!r}")


def cutlass_fused_moe_workspace_size(
    max_num_tokens: int, hidden_size: int, intermediate_size: int, num_experts_total: int,
    top_k: int, *, x_dtype: Any, weight_dtype: Any, output_dtype: Any = "bfloat16",
    activation_type: int = ActivationType.Swiglu, tp_size: int = 1, tp_rank: int = 0,
    ep_size: int = 1, ep_rank: int = 0, min_latency_mode: bool = False,
    use_deepseek_fp8_block_scale: bool = False, use_w4_group_scaling: bool = False,
    use_mxfp8_act_scaling: bool = False, use_fused_finalize: bool = True,
    use_packed_weights: bool = False, use_wfp4afp8_humming: bool = False, device: Any = None,
    backend: str = "cutlass",
) -> int:  # fmt: skip
    """Bytes that are enough for up to max_num_tokens tokens in every mode, on CPU and GPU.

    An upper bound of the layer's own number, which needs the weights: the sums of docs/moe.md 14.2
    with the widest formats, for the token tiles of the rule.

    max_num_tokens, hidden_size, intermediate_size, num_experts_total, top_k: int; T, H, I, E, k.
    activation_type: ActivationType. ep_size: int, ranks that share the experts.
    x_dtype, weight_dtype, output_dtype, tp_size, tp_rank, ep_rank, device: change nothing, as do
        use_deepseek_fp8_block_scale, use_w4_group_scaling, use_mxfp8_act_scaling,
        use_fused_finalize and backend.
    min_latency_mode, use_packed_weights, use_wfp4afp8_humming: not offered.
    """
    check_moe_backend(backend)
    refuse("min_latency_mode", min_latency_mode, "leave it False")
    refuse("use_packed_weights", use_packed_weights, "use_w4_group_scaling is, for MXFP4")
    refuse("use_wfp4afp8_humming", use_wfp4afp8_humming, "use_w4_group_scaling is, for MXFP4")
    for name, value in (("max_num_tokens", max_num_tokens), ("hidden_size", hidden_size),
                        ("intermediate_size", intermediate_size), ("top_k", top_k),
                        ("num_experts_total", num_experts_total),
                        ("ep_size", ep_size)):  # fmt: skip
        if value < 1:
            raise ValueError(f"{name}: expected at least 1, got {value}")
    if num_experts_total % ep_size:
        raise ValueError(f"ep_size: {num_experts_total} experts are no multiple of {ep_size}")
    local = num_experts_total // ep_size
    first_rows = intermediate_size * (2 if is_gated(activation_type) else 1)
    slots = max_num_tokens * top_k
    tile = nf.default_token_tile(max_num_tokens, slots=top_k, local_experts=local)
    rows = round_up(slots + min(local, slots) * (tile - 1), tile)

    def coded(count: int, cols: int) -> int:  # bfloat16, or the code with its scales.
        return round_up(2 * count * cols, 256) + round_up(count * cols // 16, 256) + 4 * count + 256

    def gemm(count: int, cols: int) -> int:  # Rows decoded to float32, and lists of segments.
        return 24 * local + count * (4 * round_up(cols + cols // 16 + 1, 64) + 4) + 512

    return _ALIGNMENT + sum((
        2 * round_up(4 * slots, 256),
        round_up(4 * (slots + 2 * rows + 2 * (rows // tile + 1) + 2), 256) + 256,
        coded(rows, hidden_size),
        round_up(rows * max(4 * first_rows, 4 * hidden_size), 256),
        coded(rows, intermediate_size),
        max(gemm(rows, hidden_size), gemm(rows, intermediate_size)),
    ))  # fmt: skip


def given_workspace(buffer: Any) -> Any:
    """A caller's buffer from its first address that a layer takes; None stays None."""
    if buffer is None:
        return None
    if len(buffer.shape) != 1 or dtype_name(buffer) not in ("uint8", "int8"):
        raise ValueError(
            "workspace_buffer: expected uint8 or int8 of one axis, got "
            f"{dtype_name(buffer)} {tuple(buffer.shape)}"
        )
    if prod(buffer.shape) == 0:
        raise ValueError("workspace_buffer: empty; see cutlass_fused_moe_workspace_size()")
    address = buffer.data_ptr() if is_torch(buffer) else buffer.ctypes.data
    return as_type(buffer, "uint8")[-address % _ALIGNMENT :]
