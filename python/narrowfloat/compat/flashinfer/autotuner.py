"""The names of FlashInfer's module `autotuner` that narrowfloat has."""

from narrowfloat.compat.flashinfer._tuning import autotune

__all__ = [
    "autotune",
]
