"""The names of FlashInfer's module `activation` that narrowfloat has."""

from narrowfloat.compat.flashinfer._activations import gelu_and_mul, gelu_tanh_and_mul, silu_and_mul
from narrowfloat.compat.flashinfer._quantize import silu_and_mul_scaled_nvfp4_experts_quantize

__all__ = [
    "gelu_and_mul",
    "gelu_tanh_and_mul",
    "silu_and_mul",
    "silu_and_mul_scaled_nvfp4_experts_quantize",
]
