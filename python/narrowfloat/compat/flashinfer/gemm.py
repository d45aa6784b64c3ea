"""The names of FlashInfer's module `gemm` that narrowfloat has."""

from narrowfloat.compat.flashinfer._gemm import (
    batch_deepgemm_fp8_nt_groupwise,
    gemm_fp8_nt_groupwise,
    group_deepgemm_fp8_nt_groupwise,
    group_gemm_fp8_nt_groupwise,
    group_gemm_mxfp4_nt_groupwise,
    group_gemm_mxfp8_mxfp4_nt_groupwise,
    group_gemm_nvfp4_nt_groupwise,
    grouped_gemm_nt_masked,
    mm_bf16_fp4,
    mm_fp4,
    mm_mxfp8,
    prepare_bf16_fp4_weights,
)
from narrowfloat.compat.flashinfer._quantize import nvfp4_quantize_smooth

__all__ = [
    "batch_deepgemm_fp8_nt_groupwise",
    "gemm_fp8_nt_groupwise",
    "group_deepgemm_fp8_nt_groupwise",
    "group_gemm_fp8_nt_groupwise",
    "group_gemm_mxfp4_nt_groupwise",
    "group_gemm_mxfp8_mxfp4_nt_groupwise",
    "group_gemm_nvfp4_nt_groupwise",
    "grouped_gemm_nt_masked",
    "mm_bf16_fp4",
    "mm_fp4",
    "mm_mxfp8",
    "nvfp4_quantize_smooth",
    "prepare_bf16_fp4_weights",
]
