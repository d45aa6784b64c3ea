"""The names of FlashInfer's module `quantization.fp8_quantization` that narrowfloat has."""

from narrowfloat.compat.flashinfer._dequantize import mxfp8_dequantize_host
from narrowfloat.compat.flashinfer._quantize import (
    mxfp8_grouped_quantize,
    mxfp8_quantize,
    per_token_group_quant_8bit,
)

__all__ = [
    "mxfp8_dequantize_host",
    "mxfp8_grouped_quantize",
    "mxfp8_quantize",
    "per_token_group_quant_8bit",
]
