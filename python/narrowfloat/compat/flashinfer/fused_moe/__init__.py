"""The names of FlashInfer's module `fused_moe` that narrowfloat has."""

from narrowfloat.compat.flashinfer._cutlass import cutlass_fused_moe
from narrowfloat.compat.flashinfer._layouts import (
    convert_to_block_layout,
    reorder_rows_for_gated_act_gemm,
)
from narrowfloat.compat.flashinfer._mixed_input import (
    interleave_moe_scales_for_sm90_mixed_gemm,
    interleave_moe_weights_for_sm90_mixed_gemm,
    preprocess_moe_weights_for_sm90_mixed_gemm_humming,
)
from narrowfloat.compat.flashinfer._moe import (
    trtllm_bf16_moe,
    trtllm_bf16_routed_moe,
    trtllm_fp8_block_scale_moe,
    trtllm_fp8_block_scale_routed_moe,
    trtllm_fp8_per_tensor_scale_moe,
    trtllm_fp8_per_tensor_scale_routed_moe,
    trtllm_mxint4_block_scale_moe,
    trtllm_mxint4_block_scale_routed_moe,
)
from narrowfloat.compat.flashinfer._moe_fp4 import (
    trtllm_fp4_block_scale_moe,
    trtllm_fp4_block_scale_routed_moe,
)
from narrowfloat.compat.flashinfer._mono_moe import (
    alloc_scratchpad,
    get_scratchpad_size_bytes,
    has_monomoe,
    interleave_for_tma_wgmma_up,
    mono_moe,
)
from narrowfloat.compat.flashinfer._recipe import NVFP44Over6Config, NVFP44Over6ErrMode
from narrowfloat.compat.flashinfer._routing import (
    TrtllmGenRoutingResult,
    fused_topk_deepseek,
    hash_topk,
    trtllm_gen_routing,
)
from narrowfloat.compat.flashinfer._workspace import cutlass_fused_moe_workspace_size
from narrowfloat.compat.flashinfer.fused_moe import (
    core as core,
    cute_dsl as cute_dsl,
    monomoe as monomoe,
    prepare as prepare,
)
from narrowfloat.compat.flashinfer.tllm_enums import (
    ActivationType,
    Fp8QuantizationType,
    RoutingInputMode,
    RoutingMethodType,
    WeightLayout,
)

__all__ = [
    "ActivationType",
    "Fp8QuantizationType",
    "NVFP44Over6Config",
    "NVFP44Over6ErrMode",
    "RoutingInputMode",
    "RoutingMethodType",
    "TrtllmGenRoutingResult",
    "WeightLayout",
    "alloc_scratchpad",
    "convert_to_block_layout",
    "cutlass_fused_moe",
    "cutlass_fused_moe_workspace_size",
    "fused_topk_deepseek",
    "get_scratchpad_size_bytes",
    "has_monomoe",
    "hash_topk",
    "interleave_for_tma_wgmma_up",
    "interleave_moe_scales_for_sm90_mixed_gemm",
    "interleave_moe_weights_for_sm90_mixed_gemm",
    "mono_moe",
    "preprocess_moe_weights_for_sm90_mixed_gemm_humming",
    "reorder_rows_for_gated_act_gemm",
    "trtllm_bf16_moe",
    "trtllm_bf16_routed_moe",
    "trtllm_fp4_block_scale_moe",
    "trtllm_fp4_block_scale_routed_moe",
    "trtllm_fp8_block_scale_moe",
    "trtllm_fp8_block_scale_routed_moe",
    "trtllm_fp8_per_tensor_scale_moe",
    "trtllm_fp8_per_tensor_scale_routed_moe",
    "trtllm_gen_routing",
    "trtllm_mxint4_block_scale_moe",
    "trtllm_mxint4_block_scale_routed_moe",
]
