"""The names of FlashInfer's module `cute_dsl` that narrowfloat has."""

from narrowfloat.compat.flashinfer._norms import add_rmsnorm_fp4quant, rmsnorm_fp4quant

__all__ = [
    "add_rmsnorm_fp4quant",
    "rmsnorm_fp4quant",
]
