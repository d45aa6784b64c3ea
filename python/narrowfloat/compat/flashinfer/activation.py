"""The names of FlashInfer's module `activation` that narrowfloat has."""

from narrowfloat.compat.flashinfer._quantize import silu_and_mul_scaled_nvfp4_experts_quantize

__all__ = [
    "silu_and_mul_scaled_nvfp4_experts_quantize",
]
