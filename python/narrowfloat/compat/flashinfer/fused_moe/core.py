"""The names of FlashInfer's module `fused_moe.core` that narrowfloat has."""

from narrowfloat.compat.flashinfer._cutlass import cutlass_fused_moe
from narrowfloat.compat.flashinfer._layouts import (
    convert_to_block_layout,
    reorder_rows_for_gated_act_gemm,
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
from narrowfloat.compat.flashinfer._row_indices import (
    _maybe_get_cached_w3_w1_permute_indices,
    get_reorder_rows_for_gated_act_gemm_row_indices,
    get_shuffle_matrix_a_row_indices,
    get_shuffle_matrix_sf_a_row_indices,
    get_w2_permute_indices_with_cache,
)
from narrowfloat.compat.flashinfer._workspace import cutlass_fused_moe_workspace_size
from narrowfloat.compat.flashinfer.tllm_enums import (
    ActivationType,
    Fp8QuantizationType,
    RoutingInputMode,
    RoutingMethodType,
    SfLayout,
    WeightLayout,
)
from narrowfloat.compat.flashinfer.utils import device_support_pdl

__all__ = [
    "ActivationType",
    "Fp8QuantizationType",
    "RoutingInputMode",
    "RoutingMethodType",
    "SfLayout",
    "WeightLayout",
    "_maybe_get_cached_w3_w1_permute_indices",
    "convert_to_block_layout",
    "cutlass_fused_moe",
    "cutlass_fused_moe_workspace_size",
    "device_support_pdl",
    "get_reorder_rows_for_gated_act_gemm_row_indices",
    "get_shuffle_matrix_a_row_indices",
    "get_shuffle_matrix_sf_a_row_indices",
    "get_w2_permute_indices_with_cache",
    "reorder_rows_for_gated_act_gemm",
    "trtllm_bf16_moe",
    "trtllm_bf16_routed_moe",
    "trtllm_fp4_block_scale_moe",
    "trtllm_fp4_block_scale_routed_moe",
    "trtllm_fp8_block_scale_moe",
    "trtllm_fp8_block_scale_routed_moe",
    "trtllm_fp8_per_tensor_scale_moe",
    "trtllm_fp8_per_tensor_scale_routed_moe",
    "trtllm_mxint4_block_scale_moe",
    "trtllm_mxint4_block_scale_routed_moe",
]
