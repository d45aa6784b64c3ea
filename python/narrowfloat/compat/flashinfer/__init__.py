"""FlashInfer's quantization, Mixture-of-Experts and all-reduce functions, on narrowfloat.

    import narrowfloat.compat.flashinfer as flashinfer

Names, argument order, defaults, shapes and types are FlashInfer 0.7.2's, and so are the modules
below; narrowfloat.compat.install_as_flashinfer() gives them its name. Tensors are torch's or
NumPy's, on the CPU or on a GPU.
Arrays of other libraries are taken through DLPack: they count as NumPy's, on a GPU as torch's,
which must be imported there. docs/python.md has a table of what is the same to the bit, what within
a tolerance, and what is not offered. Arguments that are not offered raise NotImplementedError with
their name.
"""

from narrowfloat.compat.flashinfer import (
    activation as activation,
    autotuner as autotuner,
    comm as comm,
    cute_dsl as cute_dsl,
    fp4_quantization as fp4_quantization,
    fp8_quantization as fp8_quantization,
    fused_moe as fused_moe,
    gemm as gemm,
    norm as norm,
    page as page,
    quantization as quantization,
    tllm_enums as tllm_enums,
    utils as utils,
)
from narrowfloat.compat.flashinfer._activations import gelu_and_mul, gelu_tanh_and_mul, silu_and_mul
from narrowfloat.compat.flashinfer._bits import packbits, segment_packbits
from narrowfloat.compat.flashinfer._cutlass import cutlass_fused_moe
from narrowfloat.compat.flashinfer._dequantize import (
    e2m1_and_ufp8sf_scale_to_float,
    mxfp4_dequantize,
    mxfp4_dequantize_host,
    mxfp8_dequantize_host,
)
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
from narrowfloat.compat.flashinfer._kv_cache import (
    nvfp4_kv_dequantize,
    nvfp4_kv_dequantize_paged,
    nvfp4_kv_quantize,
    nvfp4_quantize_append_paged_kv_cache,
    nvfp4_quantize_append_paged_kv_cache_with_slot_mapping,
    nvfp4_quantize_paged_kv_cache,
)
from narrowfloat.compat.flashinfer._layers import clear_prepared_cache, prepared_cache_size
from narrowfloat.compat.flashinfer._layouts import (
    block_scale_interleave,
    convert_to_block_layout,
    nvfp4_block_scale_interleave,
    reorder_rows_for_gated_act_gemm,
    shuffle_matrix_a,
    shuffle_matrix_sf_a,
    undo_block_scale_interleave,
    undo_convert_to_block_layout,
    undo_reorder_rows_for_gated_act_gemm,
    undo_shuffle_matrix_a,
    undo_shuffle_matrix_sf_a,
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
from narrowfloat.compat.flashinfer._mono_moe import interleave_for_tma_wgmma_up, mono_moe
from narrowfloat.compat.flashinfer._norms import add_rmsnorm_fp4quant, rmsnorm_fp4quant
from narrowfloat.compat.flashinfer._norms_fp8 import fused_add_rmsnorm_quant, rmsnorm_quant
from narrowfloat.compat.flashinfer._permuted_rows import (
    MoeActivationType,
    moe_activation,
    moe_permute,
    moe_unpermute,
)
from narrowfloat.compat.flashinfer._quantize import (
    fp4_quantize,
    make_nvfp4_global_scale,
    mxfp4_quantize,
    mxfp8_grouped_quantize,
    mxfp8_quantize,
    nvfp4_batched_quantize,
    nvfp4_quantize,
    nvfp4_quantize_smooth,
    per_token_group_quant_8bit,
    scaled_fp4_grouped_quantize,
    silu_and_mul_nvfp4_quantize,
    silu_and_mul_scaled_nvfp4_experts_quantize,
)
from narrowfloat.compat.flashinfer._recipe import (
    NVFP44Over6Config,
    NVFP44Over6ErrMode,
    resolve_nvfp4_4over6,
)
from narrowfloat.compat.flashinfer._routing import (
    TrtllmGenRoutingResult,
    fused_topk_deepseek,
    hash_topk,
    moe_sort,
    trtllm_gen_routing,
)
from narrowfloat.compat.flashinfer._tuning import autotune
from narrowfloat.compat.flashinfer._workspace import cutlass_fused_moe_workspace_size
from narrowfloat.compat.flashinfer.comm import (
    AllReduceFusionPattern,
    AllReduceFusionWorkspace,
    QuantizationSFLayout,
    allreduce_fusion,
    compute_fp4_swizzled_layout_sf_size,
    create_allreduce_fusion_workspace,
    trtllm_allreduce_fusion,
    trtllm_create_ipc_workspace_for_all_reduce_fusion,
    trtllm_destroy_ipc_workspace_for_all_reduce_fusion,
    trtllm_moe_allreduce_fusion,
    trtllm_moe_finalize_allreduce_fusion,
)
from narrowfloat.compat.flashinfer.tllm_enums import (
    ActivationType,
    Fp8QuantizationType,
    GatedActType,
    RoutingInputMode,
    RoutingMethodType,
    SfLayout,
    WeightLayout,
    is_gated_activation,
)
from narrowfloat.compat.flashinfer.utils import next_positive_power_of_2

__version__ = "0.7.2"  # The version of FlashInfer whose interface this is.

__all__ = [
    "ActivationType",
    "AllReduceFusionPattern",
    "AllReduceFusionWorkspace",
    "Fp8QuantizationType",
    "GatedActType",
    "MoeActivationType",
    "NVFP44Over6Config",
    "NVFP44Over6ErrMode",
    "QuantizationSFLayout",
    "RoutingInputMode",
    "RoutingMethodType",
    "SfLayout",
    "TrtllmGenRoutingResult",
    "WeightLayout",
    "add_rmsnorm_fp4quant",
    "allreduce_fusion",
    "autotune",
    "batch_deepgemm_fp8_nt_groupwise",
    "block_scale_interleave",
    "clear_prepared_cache",
    "compute_fp4_swizzled_layout_sf_size",
    "convert_to_block_layout",
    "create_allreduce_fusion_workspace",
    "cutlass_fused_moe",
    "cutlass_fused_moe_workspace_size",
    "e2m1_and_ufp8sf_scale_to_float",
    "fp4_quantize",
    "fused_add_rmsnorm_quant",
    "fused_topk_deepseek",
    "gelu_and_mul",
    "gelu_tanh_and_mul",
    "gemm_fp8_nt_groupwise",
    "group_deepgemm_fp8_nt_groupwise",
    "group_gemm_fp8_nt_groupwise",
    "group_gemm_mxfp4_nt_groupwise",
    "group_gemm_mxfp8_mxfp4_nt_groupwise",
    "group_gemm_nvfp4_nt_groupwise",
    "grouped_gemm_nt_masked",
    "hash_topk",
    "interleave_for_tma_wgmma_up",
    "interleave_moe_scales_for_sm90_mixed_gemm",
    "interleave_moe_weights_for_sm90_mixed_gemm",
    "is_gated_activation",
    "make_nvfp4_global_scale",
    "mm_bf16_fp4",
    "mm_fp4",
    "mm_mxfp8",
    "moe_activation",
    "moe_permute",
    "moe_sort",
    "moe_unpermute",
    "mono_moe",
    "mxfp4_dequantize",
    "mxfp4_dequantize_host",
    "mxfp4_quantize",
    "mxfp8_dequantize_host",
    "mxfp8_grouped_quantize",
    "mxfp8_quantize",
    "next_positive_power_of_2",
    "nvfp4_batched_quantize",
    "nvfp4_block_scale_interleave",
    "nvfp4_kv_dequantize",
    "nvfp4_kv_dequantize_paged",
    "nvfp4_kv_quantize",
    "nvfp4_quantize",
    "nvfp4_quantize_append_paged_kv_cache",
    "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping",
    "nvfp4_quantize_paged_kv_cache",
    "nvfp4_quantize_smooth",
    "packbits",
    "per_token_group_quant_8bit",
    "prepare_bf16_fp4_weights",
    "prepared_cache_size",
    "preprocess_moe_weights_for_sm90_mixed_gemm_humming",
    "reorder_rows_for_gated_act_gemm",
    "resolve_nvfp4_4over6",
    "rmsnorm_fp4quant",
    "rmsnorm_quant",
    "scaled_fp4_grouped_quantize",
    "segment_packbits",
    "shuffle_matrix_a",
    "shuffle_matrix_sf_a",
    "silu_and_mul",
    "silu_and_mul_nvfp4_quantize",
    "silu_and_mul_scaled_nvfp4_experts_quantize",
    "trtllm_allreduce_fusion",
    "trtllm_bf16_moe",
    "trtllm_bf16_routed_moe",
    "trtllm_create_ipc_workspace_for_all_reduce_fusion",
    "trtllm_destroy_ipc_workspace_for_all_reduce_fusion",
    "trtllm_fp4_block_scale_moe",
    "trtllm_fp4_block_scale_routed_moe",
    "trtllm_fp8_block_scale_moe",
    "trtllm_fp8_block_scale_routed_moe",
    "trtllm_fp8_per_tensor_scale_moe",
    "trtllm_fp8_per_tensor_scale_routed_moe",
    "trtllm_gen_routing",
    "trtllm_moe_allreduce_fusion",
    "trtllm_moe_finalize_allreduce_fusion",
    "trtllm_mxint4_block_scale_moe",
    "trtllm_mxint4_block_scale_routed_moe",
    "undo_block_scale_interleave",
    "undo_convert_to_block_layout",
    "undo_reorder_rows_for_gated_act_gemm",
    "undo_shuffle_matrix_a",
    "undo_shuffle_matrix_sf_a",
]
