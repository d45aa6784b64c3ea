"""The names of FlashInfer's module `quantization.fp4_quantization` that narrowfloat has."""

from narrowfloat.compat.flashinfer._dequantize import (
    e2m1_and_ufp8sf_scale_to_float,
    mxfp4_dequantize,
    mxfp4_dequantize_host,
)
from narrowfloat.compat.flashinfer._kv_cache import (
    nvfp4_kv_dequantize,
    nvfp4_kv_dequantize_paged,
    nvfp4_kv_quantize,
    nvfp4_quantize_paged_kv_cache,
)
from narrowfloat.compat.flashinfer._layouts import (
    block_scale_interleave,
    nvfp4_block_scale_interleave,
    shuffle_matrix_a,
    shuffle_matrix_sf_a,
)
from narrowfloat.compat.flashinfer._quantize import (
    fp4_quantize,
    mxfp4_quantize,
    nvfp4_batched_quantize,
    nvfp4_quantize,
    scaled_fp4_grouped_quantize,
    silu_and_mul_nvfp4_quantize,
)
from narrowfloat.compat.flashinfer.tllm_enums import SfLayout

__all__ = [
    "SfLayout",
    "block_scale_interleave",
    "e2m1_and_ufp8sf_scale_to_float",
    "fp4_quantize",
    "mxfp4_dequantize",
    "mxfp4_dequantize_host",
    "mxfp4_quantize",
    "nvfp4_batched_quantize",
    "nvfp4_block_scale_interleave",
    "nvfp4_kv_dequantize",
    "nvfp4_kv_dequantize_paged",
    "nvfp4_kv_quantize",
    "nvfp4_quantize",
    "nvfp4_quantize_paged_kv_cache",
    "scaled_fp4_grouped_quantize",
    "shuffle_matrix_a",
    "shuffle_matrix_sf_a",
    "silu_and_mul_nvfp4_quantize",
]
