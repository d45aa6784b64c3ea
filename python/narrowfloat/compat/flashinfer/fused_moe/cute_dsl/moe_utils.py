"""The names of FlashInfer's module `fused_moe.cute_dsl.moe_utils` that narrowfloat has."""

from narrowfloat.compat.flashinfer._routing import moe_sort

__all__ = [
    "moe_sort",
]
