"""The names of FlashInfer's module `quantization` that narrowfloat has."""

from narrowfloat.compat.flashinfer._bits import packbits, segment_packbits
from narrowfloat.compat.flashinfer._dequantize import (
    e2m1_and_ufp8sf_scale_to_float,
    mxfp4_dequantize,
    mxfp4_dequantize_host,
    mxfp8_dequantize_host,
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
    make_nvfp4_global_scale,
    mxfp4_quantize,
    mxfp8_grouped_quantize,
    mxfp8_quantize,
    nvfp4_batched_quantize,
    nvfp4_quantize,
    per_token_group_quant_8bit,
    scaled_fp4_grouped_quantize,
    silu_and_mul_nvfp4_quantize,
)
from narrowfloat.compat.flashinfer._recipe import (
    NVFP44Over6Config,
    NVFP44Over6ErrMode,
    nvfp4_4over6_code,
    nvfp4_4over6_from_code,
    nvfp4_e4m3_max,
    resolve_nvfp4_4over6,
)
from narrowfloat.compat.flashinfer.tllm_enums import SfLayout
from narrowfloat.compat.flashinfer.quantization import (
    fp4_quantization as fp4_quantization,
    fp8_quantization as fp8_quantization,
    nvfp4_quantization_utils as nvfp4_quantization_utils,
)

__all__ = [
    "NVFP44Over6Config",
    "NVFP44Over6ErrMode",
    "SfLayout",
    "block_scale_interleave",
    "e2m1_and_ufp8sf_scale_to_float",
    "fp4_quantize",
    "make_nvfp4_global_scale",
    "mxfp4_dequantize",
    "mxfp4_dequantize_host",
    "mxfp4_quantize",
    "mxfp8_dequantize_host",
    "mxfp8_grouped_quantize",
    "mxfp8_quantize",
    "nvfp4_4over6_code",
    "nvfp4_4over6_from_code",
    "nvfp4_batched_quantize",
    "nvfp4_block_scale_interleave",
    "nvfp4_e4m3_max",
    "nvfp4_kv_dequantize",
    "nvfp4_kv_dequantize_paged",
    "nvfp4_kv_quantize",
    "nvfp4_quantize",
    "nvfp4_quantize_paged_kv_cache",
    "packbits",
    "per_token_group_quant_8bit",
    "resolve_nvfp4_4over6",
    "scaled_fp4_grouped_quantize",
    "segment_packbits",
    "shuffle_matrix_a",
    "shuffle_matrix_sf_a",
    "silu_and_mul_nvfp4_quantize",
]
