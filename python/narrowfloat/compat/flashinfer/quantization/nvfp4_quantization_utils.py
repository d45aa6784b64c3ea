"""The names of FlashInfer's module `quantization.nvfp4_quantization_utils` that narrowfloat has."""

from narrowfloat.compat.flashinfer._quantize import make_nvfp4_global_scale
from narrowfloat.compat.flashinfer._recipe import (
    FLOAT4_E2M1_MAX,
    FLOAT8_E4M3_MAX,
    NVFP44Over6Config,
    NVFP44Over6ErrMode,
    NVFP4_4OVER6_CODE_FROM_ENV,
    NVFP4_4OVER6_CODE_STANDARD,
    NVFP4_4OVER6_KNOWN_BITS,
    current_nvfp4_4over6_config,
    env_flag_enabled,
    nvfp4_4over6_code,
    nvfp4_4over6_from_code,
    nvfp4_e4m3_max,
    nvfp4_per_token_scale_inv,
    resolve_nvfp4_4over6,
)

__all__ = [
    "FLOAT4_E2M1_MAX",
    "FLOAT8_E4M3_MAX",
    "NVFP44Over6Config",
    "NVFP44Over6ErrMode",
    "NVFP4_4OVER6_CODE_FROM_ENV",
    "NVFP4_4OVER6_CODE_STANDARD",
    "NVFP4_4OVER6_KNOWN_BITS",
    "current_nvfp4_4over6_config",
    "env_flag_enabled",
    "make_nvfp4_global_scale",
    "nvfp4_4over6_code",
    "nvfp4_4over6_from_code",
    "nvfp4_e4m3_max",
    "nvfp4_per_token_scale_inv",
    "resolve_nvfp4_4over6",
]
