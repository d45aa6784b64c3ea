"""FlashInfer's layer for few tokens on Hopper: block-scaled FP8, from router logits in one call."""

from __future__ import annotations

from typing import Any

import narrowfloat as nf
from narrowfloat._arrays import maker_of
from narrowfloat.compat.flashinfer._arguments import accepts, check_axes
from narrowfloat.compat.flashinfer._arrays import contiguous, dtype_name, transpose
from narrowfloat.compat.flashinfer._layers import Run, prepared

EXPERTS, INTER, HIDDEN, MOST_TOKENS = 256, 512, 2048, 8  # The shape of upstream's kernel.
_BLOCK = 128
_ROWS = 64  # Gate rows of a slab of interleaved up weights, which has as many up rows.
_METHODS = {("softmax", True): "renormalize_naive", ("softmax", False): "default",
            ("sigmoid", True): "sigmoid_renorm", ("sigmoid", False): "sigmoid"}  # fmt: skip


def has_monomoe() -> bool:
    """True: mono_moe() runs wherever layers do."""
    return True


def get_scratchpad_size_bytes() -> int:
    """Bytes of a scratchpad. mono_moe() reads none; callers may allocate and pass it."""
    return 256


def alloc_scratchpad(device: Any) -> Any:
    """Zeros uint8 [get_scratchpad_size_bytes()] of torch on a device."""
    import torch

    return torch.zeros(get_scratchpad_size_bytes(), dtype=torch.uint8, device=device)


def _slabs(argument: str, weights: Any) -> int:
    check_axes(argument, weights, "E", "2 * N", "K")
    rows = weights.shape[1]
    if rows % (2 * _ROWS):
        raise ValueError(f"{argument}: N (half of rows) must be a multiple of {_ROWS}; got N="
                         f"{rows / 2:g}")  # fmt: skip
    return int(rows // (2 * _ROWS))


@accepts("w_fp8")
def interleave_for_tma_wgmma_up(w_fp8: Any) -> Any:
    """Rows [gate; up] in groups of 8 that alternate: the same shape and dtype.

    w_fp8: float8_e4m3fn [E, 2 * N, K], N a multiple of 64.
    """
    slabs = _slabs("w_fp8", w_fp8)
    experts, rows, cols = w_fp8.shape
    halves = contiguous(w_fp8).reshape(experts, 2, slabs, _ROWS // 8, 8, cols)
    return contiguous(transpose(halves, 0, 2, 3, 1, 4, 5)).reshape(experts, rows, cols)


def _canonical(weights: Any) -> Any:
    """The way back from interleave_for_tma_wgmma_up()."""
    slabs = _slabs("expert_weights_up", weights)
    experts, rows, cols = weights.shape
    held = contiguous(weights).reshape(experts, slabs, _ROWS // 8, 2, 8, cols)
    return contiguous(transpose(held, 0, 3, 1, 2, 4, 5)).reshape(experts, rows, cols)


def _check_shapes(arrays: dict[str, Any]) -> None:
    """ValueError for other shapes than upstream's kernel takes."""
    down, rows = arrays["expert_weights_down"], arrays["activations_in"]
    check_axes("activations_in", rows, "M", "K")
    check_axes("expert_weights_down", down, "E", "K", "N")
    e, n, k, tokens = EXPERTS, INTER, HIDDEN, rows.shape[0]
    if tuple(down.shape) != (e, k, n):
        raise ValueError(f"expert_weights_down: monomoe: unsupported shape {tuple(down.shape)}; "
                         f"expected E={e}, K={k}, N={n}")  # fmt: skip
    if tokens > MOST_TOKENS:
        raise ValueError(f"activations_in: this kernel caps tokens at {MOST_TOKENS}; got M="
                         f"{tokens}")  # fmt: skip
    wanted = {"activations_in": (tokens, k), "router_logits": (tokens, e),
              "expert_weights_up": (e, 2 * n, k),
              "expert_scales_up": (e, 2 * n // _BLOCK, k // _BLOCK),
              "expert_scales_down": (e, k // _BLOCK, n // _BLOCK)}  # fmt: skip
    for name, shape in wanted.items():
        if tuple(arrays[name].shape) != shape:
            raise ValueError(f"{name}: must be {shape}, got {tuple(arrays[name].shape)}")
    for name in ("expert_weights_up", "expert_weights_down"):
        if dtype_name(arrays[name]) != "float8_e4m3fn":
            raise ValueError(f"{name}: must be float8_e4m3fn, got {dtype_name(arrays[name])}")


@accepts("activations_in", "router_logits", "expert_weights_up", "expert_scales_up",
         "expert_weights_down", "expert_scales_down")  # fmt: skip
def mono_moe(
    activations_in: Any, router_logits: Any, expert_weights_up: Any, expert_scales_up: Any,
    expert_weights_down: Any, expert_scales_down: Any, top_k: int, scoring_func: str = "softmax",
    renormalize: bool = True, out: Any = None, scratchpad: Any = None, interleave_up: bool = True,
) -> Any:  # fmt: skip
    """A layer of up to 8 tokens, 256 experts, K = 2048 and N = 512: bfloat16 [M, K].

    activations_in: bfloat16 [M, K]. router_logits: bfloat16 or float32 [M, E].
    expert_weights_up: float8_e4m3fn [E, 2 * N, K] of [gate; up]; with interleave_up=False as
    interleave_for_tma_wgmma_up() gives them. expert_weights_down: float8_e4m3fn [E, K, N].
    expert_scales_up, expert_scales_down: float32 [E, 2 * N / 128, K / 128], [E, K / 128, N / 128].
    top_k: 1 to 8. scoring_func: "softmax" or "sigmoid". renormalize: whether weights sum to 1.
    out: bfloat16 [M, K], written to. scratchpad: changes nothing.
    """
    if not 1 <= top_k <= 8:
        raise ValueError(f"top_k: must be in [1, 8], got {top_k}")
    method = _METHODS.get((scoring_func, bool(renormalize)))
    if method is None:
        raise ValueError(
            f"scoring_func: must be 'sigmoid' or 'softmax', got {scoring_func!r}"
        )
    _check_shapes({
        "activations_in": activations_in, "router_logits": router_logits,
        "expert_weights_up": expert_weights_up, "expert_scales_up": expert_scales_up,
        "expert_weights_down": expert_weights_down, "expert_scales_down": expert_scales_down,
    })  # fmt: skip

    def build() -> nf.MoeLayer:
        config = nf.MoeConfig(hidden=HIDDEN, inter=INTER, experts=EXPERTS, top_k=top_k,
                              mode="fp8_block", method=method, gate_order="gate_up")  # fmt: skip
        up = contiguous(expert_weights_up) if interleave_up else _canonical(expert_weights_up)
        return nf.MoeLayer.prepare(up, contiguous(expert_weights_down), config,
                                   w1_scales=contiguous(expert_scales_up),
                                   w2_scales=contiguous(expert_scales_down))  # fmt: skip

    weights = (expert_weights_up, expert_scales_up, expert_weights_down, expert_scales_down)
    layer = prepared("expert_weights_up", weights, ("mono", top_k, method, interleave_up), build)
    if out is None:
        out = maker_of("activations_in", activations_in).empty(
            tuple(activations_in.shape), "bfloat16"
        )
    run = Run("mono_moe", activations_in, logits=router_logits, output=out)
    return run.on(layer)
