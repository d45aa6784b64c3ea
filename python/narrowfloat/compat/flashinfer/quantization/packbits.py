"""The names of FlashInfer's module `quantization.packbits` that narrowfloat has."""

from narrowfloat.compat.flashinfer._bits import packbits, segment_packbits

__all__ = [
    "packbits",
    "segment_packbits",
]
