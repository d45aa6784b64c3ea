"""The names of FlashInfer's module `page` that narrowfloat has."""

from narrowfloat.compat.flashinfer._kv_cache import (
    nvfp4_quantize_append_paged_kv_cache,
    nvfp4_quantize_append_paged_kv_cache_with_slot_mapping,
)

__all__ = [
    "nvfp4_quantize_append_paged_kv_cache",
    "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping",
]
