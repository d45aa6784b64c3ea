"""The names of FlashInfer's module `fused_moe.monomoe` that narrowfloat has."""

from narrowfloat.compat.flashinfer._mono_moe import (
    alloc_scratchpad,
    get_scratchpad_size_bytes,
    has_monomoe,
    interleave_for_tma_wgmma_up,
    mono_moe,
)

__all__ = [
    "alloc_scratchpad",
    "get_scratchpad_size_bytes",
    "has_monomoe",
    "interleave_for_tma_wgmma_up",
    "mono_moe",
]
