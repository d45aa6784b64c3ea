"""The names of FlashInfer's module `norm` that narrowfloat has."""

from narrowfloat.compat.flashinfer._norms import add_rmsnorm_fp4quant, rmsnorm_fp4quant
from narrowfloat.compat.flashinfer._norms_fp8 import fused_add_rmsnorm_quant, rmsnorm_quant

__all__ = [
    "add_rmsnorm_fp4quant",
    "fused_add_rmsnorm_quant",
    "rmsnorm_fp4quant",
    "rmsnorm_quant",
]
