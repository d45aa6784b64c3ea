"""The names of FlashInfer's module `fp8_quantization` that narrowfloat has."""

from narrowfloat.compat.flashinfer._dequantize import mxfp8_dequantize_host
from narrowfloat.compat.flashinfer._quantize import mxfp8_quantize

__all__ = [
    "mxfp8_dequantize_host",
    "mxfp8_quantize",
]
