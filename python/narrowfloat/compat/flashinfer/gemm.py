"""The names of FlashInfer's module `gemm` that narrowfloat has."""

from narrowfloat.compat.flashinfer._quantize import nvfp4_quantize_smooth

__all__ = [
    "nvfp4_quantize_smooth",
]
