"""The names of FlashInfer's module `fused_moe.cute_dsl.moe_utils` that narrowfloat has."""

from narrowfloat.compat.flashinfer._permuted_rows import (
    MoeActivationType,
    moe_activation,
    moe_permute,
    moe_unpermute,
)
from narrowfloat.compat.flashinfer._routing import moe_sort

__all__ = [
    "MoeActivationType",
    "moe_activation",
    "moe_permute",
    "moe_sort",
    "moe_unpermute",
]
