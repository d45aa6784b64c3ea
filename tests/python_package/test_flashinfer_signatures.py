"""narrowfloat.compat.flashinfer: names, order, defaults of arguments; numbers of enumerations.

Those of FlashInfer 0.7.2, not written off the package. Keywords that
the package adds follow all of these and are keyword-only.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import narrowfloat.compat.flashinfer as fi
from narrowfloat.compat.flashinfer._recipe import UNSET

WITHOUT = "num_experts, top_k, n_group, topk_group, intermediate_size, local_expert_offset, " \
    "local_num_experts"  # fmt: skip
SHAPE = f"{WITHOUT}, routed_scaling_factor"
ROUTED = "routing_logits, routing_bias, hidden_states"
CLAMPS = "gemm1_alpha=None, gemm1_beta=None, gemm1_clamp_limit=None"
FP8_BLOCK = "hidden_states, hidden_states_scale, gemm1_weights, gemm1_weights_scale, " \
    f"gemm2_weights, gemm2_weights_scale, {SHAPE}, routing_method_type=0, " \
    "use_shuffled_weight=False, weight_layout=0, do_finalize=True, enable_pdl=None"  # fmt: skip
FP8_TENSOR = "hidden_states, gemm1_weights, output1_scales_scalar, output1_scales_gate_scalar, " \
    f"gemm2_weights, output2_scales_scalar, {SHAPE}, use_routing_scales_on_input, " \
    "routing_method_type=0, do_finalize=True, enable_pdl=None, tune_max_num_tokens=8192, " \
    "activation_type=3"  # fmt: skip
FP4 = "routing_bias, hidden_states, hidden_states_scale, gemm1_weights, gemm1_weights_scale, " \
    "gemm1_bias, gemm1_alpha, gemm1_beta, gemm1_clamp_limit, gemm2_weights, " \
    "gemm2_weights_scale, gemm2_bias, output1_scale_scalar, output1_scale_gate_scalar, " \
    f"output2_scale_scalar, {SHAPE}, routing_method_type=0, do_finalize=True, enable_pdl=None, " \
    "activation_type=3, per_token_scale=None, output=None, tune_max_num_tokens=8192"  # fmt: skip
NORM = "y_fp4=None, block_scale=None, global_scale=None, eps=1e-6, block_size=16, " \
    "scale_format=None, is_sf_swizzled_layout=False"  # fmt: skip
VALID = "valid_hidden_size=None, valid_intermediate_size=None"
PAGED = "paged_kv_cache, kv_cache_sf"

SIGNATURES = {
    "fp4_quantize": "input, global_scale=None, sf_vec_size=16, sf_use_ue8m0=False, "
    "is_sf_swizzled_layout=True, is_sf_8x4_layout=False, is_global_scale_inversed=False, "
    "enable_pdl=None, backend='cuda', nvfp4_4over6=UNSET",
    "nvfp4_quantize": "a, a_global_sf, sfLayout=0, do_shuffle=False, sf_vec_size=16, "
    "enable_pdl=None, backend='cuda', per_token_activation=False, "
    "expanded_idx_to_permuted_idx=None, out_scale=None, nvfp4_4over6=UNSET",
    "mxfp4_quantize": "a, backend='cuda', enable_pdl=None, sfLayout=0",
    "mxfp4_dequantize": "a_fp4, a_sf, sfLayout=0",
    "mxfp4_dequantize_host": "weight, scale, group_size=32",
    "e2m1_and_ufp8sf_scale_to_float": "e2m1_tensor, ufp8_scale_tensor, global_scale_tensor=None, "
    "sf_vec_size=16, ufp8_type=1, is_sf_swizzled_layout=True, is_sf_8x4_layout=False",
    "silu_and_mul_nvfp4_quantize": "input, global_scale, sf_vec_size=16, "
    "is_sf_swizzled_layout=True, is_sf_8x4_layout=False, enable_pdl=None, nvfp4_4over6=UNSET",
    "nvfp4_quantize_smooth": "x, pre_quant_scale, global_scale, enable_pdl=None, "
    "backend='auto'",
    "nvfp4_batched_quantize": "a, a_global_sf, sf_vec_size=16, nvfp4_4over6=UNSET",
    "scaled_fp4_grouped_quantize": "a, mask, a_global_sf, nvfp4_4over6=UNSET",
    "silu_and_mul_scaled_nvfp4_experts_quantize": "a, mask, a_global_sf, nvfp4_4over6=UNSET",
    "mxfp8_quantize": "input, is_sf_swizzled_layout=True, alignment=32, enable_pdl=None, "
    "backend='cuda', sf_swizzle_layout=None",
    "mxfp8_grouped_quantize": "a, mask, backend='cutile'",
    "mxfp8_dequantize_host": "input, scale_tensor, is_sf_swizzled_layout=True, "
    "sf_swizzle_layout=None",
    "per_token_group_quant_8bit": "x, group_size, eps=1e-10, dst_dtype=None, "
    "column_major_scales=False, scale_tma_aligned=False, scale_ue8m0=False, backend='cutile'",
    "shuffle_matrix_a": "input_tensor, epilogue_tile_m",
    "shuffle_matrix_sf_a": "input_tensor, epilogue_tile_m, num_elts_per_sf=16",
    "convert_to_block_layout": "input_tensor, blockK",
    "reorder_rows_for_gated_act_gemm": "x",
    "nvfp4_kv_quantize": "input, global_scale",
    "nvfp4_kv_dequantize_paged": f"{PAGED}, block_tables, seq_lens, k_scale, v_scale, output_k, "
    "output_v, kv_layout='NHD'",
    "nvfp4_quantize_append_paged_kv_cache": "append_key, append_value, batch_indices, positions, "
    f"{PAGED}, kv_indices, kv_indptr, kv_last_page_len, k_scale, v_scale, kv_layout='NHD'",
    "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping": "append_key, append_value, "
    f"slot_mapping, {PAGED}, k_scale, v_scale, kv_layout='NHD'",
    "nvfp4_quantize_paged_kv_cache": "k_cache, v_cache, kv_layout='HND', k_global_sf=None, "
    "v_global_sf=None",
    "rmsnorm_fp4quant": f"input, weight, {NORM}, enable_pdl=None",
    "add_rmsnorm_fp4quant": f"input, residual, weight, {NORM}, output_both_sf_layouts=False, "
    "block_scale_unswizzled=None, enable_pdl=None, y_out=None",
    "packbits": "x, bitorder='big'",
    "segment_packbits": "x, indptr, bitorder='big'",
    "make_nvfp4_global_scale": "input_tensor, per_token_activation, global_scale=None, "
    "nvfp4_4over6_config=None",
    "hash_topk": "router_logits, input_ids, tid2eid, num_fused_shared_experts=0, "
    "routed_scaling_factor=1.0, launch_with_pdl=True",
    "trtllm_bf16_moe": f"{ROUTED}, gemm1_weights, gemm2_weights, {SHAPE}=None, "
    "routing_method_type=0, use_shuffled_weight=True, weight_layout=2, do_finalize=True, "
    "enable_pdl=True, tune_max_num_tokens=8192, activation_type=3, norm_topk_prob=True, "
    f"routing_replay_out=None, {CLAMPS}, output=None",
    "trtllm_bf16_routed_moe": f"topk_ids, hidden_states, gemm1_weights, gemm2_weights, {SHAPE}"
    "=None, routing_method_type=0, use_shuffled_weight=True, weight_layout=2, do_finalize=True, "
    "enable_pdl=True, gemm1_lora_delta=None, tune_max_num_tokens=8192, activation_type=3, "
    f"routing_replay_out=None, {CLAMPS}, output=None",
    "trtllm_fp8_per_tensor_scale_moe": f"routing_logits, routing_bias, {FP8_TENSOR}, "
    "norm_topk_prob=True, routing_replay_out=None, output=None, gemm1_clamp_limit=None",
    "trtllm_fp8_per_tensor_scale_routed_moe": f"topk_ids, routing_bias, {FP8_TENSOR}, "
    "routing_replay_out=None, output=None, gemm1_clamp_limit=None",
    "trtllm_fp8_block_scale_moe": f"routing_logits, routing_bias, {FP8_BLOCK}, "
    "tune_max_num_tokens=8192, fp8_quantization_type=1, num_fused_shared_experts=None, "
    f"activation_type=3, norm_topk_prob=True, routing_replay_out=None, {CLAMPS}, output=None, "
    f"{VALID}, *, gemm1_bias=None, gemm2_bias=None",
    "trtllm_fp8_block_scale_routed_moe": f"topk_ids, routing_bias, {FP8_BLOCK}, "
    "gemm1_lora_delta=None, output=None, tune_max_num_tokens=8192, fp8_quantization_type=1, "
    f"activation_type=3, {CLAMPS}, {VALID}",
    "trtllm_fp4_block_scale_moe": f"routing_logits, {FP4}, norm_topk_prob=True, "
    f"routing_replay_out=None, num_fused_shared_experts=None, {VALID}, "
    "hidden_states_scale_layout=None",
    "trtllm_fp4_block_scale_routed_moe": f"topk_ids, {FP4}, gemm1_lora_delta=None, {VALID}, "
    "num_fused_shared_experts=None, hidden_states_scale_layout=None",
    "trtllm_gen_routing": "routing_logits, routing_bias, routing_method, top_k, *, "
    "num_fused_shared_experts=0, n_group=0, topk_group=0, local_expert_offset=0, "
    "local_num_experts=None, routed_scaling_factor=1.0, tile_tokens_dim=8, norm_topk_prob=True, "
    "enable_pdl=None",
    "fused_topk_deepseek": "scores, bias, n_group, topk_group, topk, routed_scaling_factor, "
    "topk_values, topk_indices, launch_with_pdl=True, routing_replay_out=None, *, "
    "backend='default'",
    "cutlass_fused_moe": "input, token_selected_experts, token_final_scales, fc1_expert_weights, "
    "fc2_expert_weights, output_dtype, quant_scales, fc1_expert_biases=None, "
    "fc2_expert_biases=None, input_sf=None, swiglu_alpha=None, swiglu_beta=None, "
    "swiglu_limit=None, tp_size=1, tp_rank=0, ep_size=1, ep_rank=0, cluster_size=1, "
    "cluster_rank=0, output=None, enable_alltoall=False, use_deepseek_fp8_block_scale=False, "
    "use_w4_group_scaling=False, use_mxfp8_act_scaling=False, min_latency_mode=False, "
    "use_packed_weights=False, use_wfp4afp8_humming=False, tune_max_num_tokens=8192, "
    "enable_pdl=None, activation_type=3, swizzled_input_sf=True, use_fused_finalize=True, "
    "profile_ids=None, workspace_buffer=None, *, clamped_relu2_limit=None, situ_beta=None, "
    "situ_linear_beta=None, backend='cutlass'",
    "cutlass_fused_moe_workspace_size": "max_num_tokens, hidden_size, intermediate_size, "
    "num_experts_total, top_k, *, x_dtype, weight_dtype, output_dtype='bfloat16', "
    "activation_type=3, tp_size=1, tp_rank=0, ep_size=1, ep_rank=0, min_latency_mode=False, "
    "use_deepseek_fp8_block_scale=False, use_w4_group_scaling=False, "
    "use_mxfp8_act_scaling=False, use_fused_finalize=True, use_packed_weights=False, "
    "use_wfp4afp8_humming=False, device=None, backend='cutlass'",
}
# The package's own, by function (docs/python.md): the mode of quantizers, 4-over-6 of NVFP4's.
MODE, CHOICE = ["math"], ["four_over_six"]
ADDED = {
    **dict.fromkeys(
        ("fp4_quantize", "nvfp4_quantize", "silu_and_mul_nvfp4_quantize", "nvfp4_quantize_smooth",
         "nvfp4_batched_quantize", "scaled_fp4_grouped_quantize",
         "silu_and_mul_scaled_nvfp4_experts_quantize", "rmsnorm_fp4quant",
         "add_rmsnorm_fp4quant"), MODE + CHOICE),
    **dict.fromkeys(
        ("mxfp4_quantize", "mxfp8_quantize", "mxfp8_grouped_quantize", "nvfp4_kv_quantize",
         "nvfp4_quantize_append_paged_kv_cache",
         "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping",
         "nvfp4_quantize_paged_kv_cache"), MODE),
    "make_nvfp4_global_scale": CHOICE,
}  # fmt: skip
SIGNATURES["moe_sort"] = (
    "token_selected_experts, token_final_scales, num_experts, top_k, local_expert_offset=0, "
    "num_local_experts=None, tile_tokens_dim=128, enable_pdl=False, "
    "out_tile_idx_to_expert_idx=None, out_tile_idx_to_mn_limit=None, "
    "out_expanded_idx_to_permuted_idx=None, out_permuted_idx_to_expanded_idx=None, "
    "out_total_num_padded_tokens=None, out_num_non_exiting_tiles=None"
)
# Not FlashInfer's: the ways back from its layouts, with the same names of what is the same.
SIGNATURES |= {
    "undo_shuffle_matrix_a": "input_tensor, epilogue_tile_m",
    "undo_shuffle_matrix_sf_a": "input_tensor, epilogue_tile_m, rows, blocks, num_elts_per_sf=16",
    "undo_reorder_rows_for_gated_act_gemm": "x",
    "undo_convert_to_block_layout": "input_tensor",
    "undo_block_scale_interleave": "swizzled_sf, rows, blocks, batch=None",
}
SIGNATURES["autotune"] = "tune_mode=True, cache=None, tuning_buckets=None, round_up=None, " \
    "skip_ops=None, cuda_graph_profile_replays=None"  # fmt: skip

# GEMMs, activations, norms and the steps between experts.
SIGNATURES |= {
    "silu_and_mul":
    "input, out=None, enable_pdl=None",
    "gelu_and_mul":
    "input, out=None, enable_pdl=None",
    "gelu_tanh_and_mul":
    "input, out=None, enable_pdl=None",
    "rmsnorm_quant":
    "out, input, weight, scale, eps=1e-06, enable_pdl=None",
    "fused_add_rmsnorm_quant":
    "out, input, residual, weight, scale, eps=1e-06, enable_pdl=None",
    "moe_permute":
    "input, permuted_output, tile_idx_to_mn_limit, permuted_idx_to_expanded_idx, "
    "num_non_exiting_tiles, max_num_permuted_tokens, top_k, tile_size, "
    "enable_pdl=False, input_sf=None, permuted_sf=None",
    "moe_unpermute":
    "permuted_input, output, expanded_idx_to_permuted_idx, topk_scales, num_tokens, "
    "top_k, enable_pdl=False, input_is_expanded=False",
    "moe_activation":
    "input, output, tile_idx_to_mn_limit, num_non_exiting_tiles, activation_type, "
    "max_num_permuted_tokens, tile_size, enable_pdl=False",
    "mono_moe":
    "activations_in, router_logits, expert_weights_up, expert_scales_up, "
    "expert_weights_down, expert_scales_down, top_k, scoring_func='softmax', "
    "renormalize=True, out=None, scratchpad=None, interleave_up=True",
    "interleave_for_tma_wgmma_up":
    "w_fp8",
    "group_gemm_fp8_nt_groupwise":
    "a, b, a_scale, b_scale, m_indptr, scale_granularity_mnk=(1, 128, 128), "
    "scale_major_mode='MN', mma_sm=1, out=None, out_dtype=None, backend='trtllm', "
    "segment_alignment=1",
    "group_gemm_mxfp8_mxfp4_nt_groupwise":
    "a, b, a_scale, b_scale, m_indptr, mma_sm=1, tile_m=128, tile_n=128, tile_k=128, "
    "swap_ab=True, out=None, out_dtype=None",
    "group_gemm_nvfp4_nt_groupwise":
    "a, b, a_scale, b_scale, m_indptr, alpha=None, tile_m=128, tile_n=128, "
    "tile_k=128, swap_ab=True, out=None, out_dtype=None",
    "batch_deepgemm_fp8_nt_groupwise":
    "a, b, a_scale, b_scale, masked_m, expected_m, scale_granularity_mnk=(1, 128, "
    "128), out=None, out_dtype=None, backend='deepgemm'",
    "group_deepgemm_fp8_nt_groupwise":
    "a, b, a_scale, b_scale, m_indices, scale_granularity_mnk=(1, 128, 128), "
    "out=None, out_dtype=None",
    "grouped_gemm_nt_masked":
    "lhs, rhs, out, masked_m, *, ab_dtype, sf_dtype, c_dtype, sf_vec_size, "
    "topk_weights=None, idx_src_info=None, rank_src_info=None, out_ptrs=None, "
    "num_ranks=0, dst_signals=None, sm_count=None, barrier_flag_local=None, "
    "barrier_flag_multicast=None, is_combine_fusion=False, is_swap_ab=False, kwargs",
    "gemm_fp8_nt_groupwise":
    "a, b, a_scale, b_scale, scale_major_mode=None, mma_sm=1, "
    "scale_granularity_mnk=(1, 128, 128), out=None, out_dtype=None, backend='cutlass'",
    "mm_fp4":
    "a, b, a_descale, b_descale, alpha=None, out_dtype='bfloat16', out=None, "
    "block_size=16, use_8x4_sf_layout=False, backend='auto', use_nvfp4=True, "
    "enable_pdl=True",
    "mm_mxfp8":
    "a, b, a_descale, b_descale, out=None, out_dtype='bfloat16', "
    "use_8x4_sf_layout=False, backend='auto'",
    "mm_bf16_fp4":
    "a, b, b_descale, alpha=None, *, backend, out_dtype=None, out=None, "
    "block_size=16, enable_pdl=True",
    "prepare_bf16_fp4_weights":
    "b, b_descale, alpha=None, *, backend, block_size=16",
}
SIGNATURES["group_gemm_mxfp4_nt_groupwise"] = SIGNATURES["group_gemm_mxfp8_mxfp4_nt_groupwise"]

# The functions of the all-reduce are those of version 0.7.2.
_COMM_ROWS = "residual_in, residual_out, norm_out, quant_out, scale_out"
_SHARED = "world_size, world_rank, token_num, hidden_dim, workspace_ptrs, launch_with_pdl"
SIGNATURES |= {
    "create_allreduce_fusion_workspace": "backend='auto', world_size=None, rank=None, "
    "max_token_num=None, hidden_dim=None, dtype=None, gpus_per_node=None, comm_backend=None, "
    "force_oneshot_support=False, group=None, *, top_k=None, rms_eps=None, weight_bias=None, "
    "routed_scaling_factor=None, include_shared_expert=None, add_residual=None, "
    "write_residual_output=None, apply_rms_norm=None, output_dtype=None, dynamic_fp8=None, "
    "write_norm_output=None, config=None",
    "allreduce_fusion": "input, workspace, pattern, launch_with_pdl=False, "
    "trigger_completion_at_end=True, output=None, residual_out=None, norm_out=None, "
    "quant_out=None, scale_out=None, residual_in=None, rms_gamma=None, rms_eps=1e-6, "
    "scale_factor=None, layout_code=None, use_oneshot=None, fp32_acc=False, "
    "moe_reduction_device_num_experts=None, moe_reduction_scale_input=None, "
    "moe_reduction_active_experts_token_input=None, moe_reduction_token_input=None, "
    "expanded_idx_to_permuted_idx=None, expert_scale_factor=None, shared_expert_output=None, "
    "block_quant_group_size=None, weight_bias=0.0, *, moe_finalize_backend='trtllm'",
    "trtllm_allreduce_fusion": f"allreduce_in, {_SHARED}, trigger_completion_at_end, fp32_acc, "
    f"pattern_code, use_oneshot, allreduce_out, {_COMM_ROWS}, rms_gamma, rms_eps, scale_factor, "
    "layout_code, metadata=None, block_quant_group_size=None, weight_bias=None",
    "trtllm_create_ipc_workspace_for_all_reduce_fusion": "tp_rank, tp_size, max_token_num, "
    "hidden_dim, use_fp32_lamport=False, group=None, create_metadata=False, comm_backend=None, "
    "use_symm_dev_mem=False",
    "trtllm_destroy_ipc_workspace_for_all_reduce_fusion": "workspace, group=None",
    "trtllm_moe_allreduce_fusion": f"{_SHARED}, residual_in, rms_gamma, rms_eps, scale_factor, "
    "moe_reduction_device_num_experts, moe_reduction_scale_input, "
    "moe_reduction_active_experts_token_input, moe_reduction_token_input, layout_code, "
    "moe_allreduce_out, residual_out, norm_out, quant_out, scale_out, weight_bias=None, *, "
    "backend='trtllm'",
    "trtllm_moe_finalize_allreduce_fusion": "allreduce_in, residual_in, norm_weight, "
    "expanded_idx_to_permuted_idx, norm_out, residual_out, quant_out, scale_out, workspace_ptrs, "
    "launch_with_pdl, world_rank, world_size, eps, shared_expert_output, expert_scale_factor, "
    "routed_scaling_factor, weight_bias=None, *, backend='trtllm'",
    "compute_fp4_swizzled_layout_sf_size": "total_row, total_column",
}
COMM_ADDED = {"create_allreduce_fusion_workspace": ["device"],
              "trtllm_create_ipc_workspace_for_all_reduce_fusion": ["device"],
              "trtllm_moe_finalize_allreduce_fusion": ["scale_factor"]}  # fmt: skip
ADDED |= COMM_ADDED

ENUMERATIONS = {
    "RoutingMethodType": "Default Renormalize DeepSeekV3 Llama4 RenormalizeNaive TopK "
    "SigmoidRenorm MiniMax2 Sigmoid TopKSigmoid Unspecified",
    "RoutingInputMode": "FromLogits PackedPrecomputed UnpackedPrecomputed",
    "ActivationType": "Gelu Relu Silu Swiglu Geglu SwigluBias Relu2 SwigluStep GegluTanh Identity "
    "Situ InvalidType ClampedRelu2",
    "GatedActType": "SwiGlu GeGlu",
    "NVFP44Over6ErrMode": "MAE MSE",
    "WeightLayout": "MajorK MajorMn BlockMajorK",
    "Fp8QuantizationType": "NoneFp8 DeepSeekFp8 MxFp8 PerTensorFp8 PerChannelFp8",
    "AllReduceFusionPattern": "kAllReduce kARResidualRMSNorm kARResidualRMSNormFP8Quant "
    "kARResidualRMSNormFP4Quant kARResidualRMSNormOutFP8Quant kARResidualRMSNormOutFP4Quant "
    "kMoEReductionARResidualRMSNorm kMoEFinalizeARResidualRMSNorm "
    "kARResidualRMSNormPerTokenGroupFP8PackedQuant "
    "kARResidualRMSNormOutPerTokenGroupFP8PackedQuant kARResidualRMSNormDynamicFP8Quant "
    "kARResidualRMSNormOutDynamicFP8Quant kMoEFinalizeARResidualRMSNormFP8Quant",
    "QuantizationSFLayout": "SWIZZLED_128x4 SWIZZLED_8x4 LINEAR",
    "SfLayout": "layout_128x4 layout_8x4 layout_linear",
}


def spelled(name: str) -> list[str]:
    """Arguments of a function as the list above spells them, without those of its own."""
    words: list[str] = []
    for parameter in inspect.signature(getattr(fi, name)).parameters.values():
        if parameter.name in MODE + CHOICE + COMM_ADDED.get(name, []):
            assert parameter.kind == parameter.KEYWORD_ONLY and parameter.default is None
            continue
        if parameter.kind == parameter.KEYWORD_ONLY and "*" not in words:
            words.append("*")
        default = parameter.default
        if default is parameter.empty:
            words.append(parameter.name)
            continue
        if default is UNSET:
            words.append(f"{parameter.name}=UNSET")
            continue
        value = int(default) if hasattr(default, "numerator") and not isinstance(
            default, bool) else default  # fmt: skip
        words.append(f"{parameter.name}={value!r}")
    return words


@pytest.mark.parametrize("name", list(SIGNATURES))
def test_signatures(name: str) -> None:
    """In order, with defaults."""
    wanted = re.sub(r"\b1e-6\b", "1e-06", SIGNATURES[name])
    assert spelled(name) == re.split(r", (?![^(]*\))", wanted)


@pytest.mark.parametrize("name", list(SIGNATURES))
def test_added_keywords(name: str) -> None:
    """Quantizers have them, other functions have none."""
    found = [word for word in inspect.signature(getattr(fi, name)).parameters
             if word in MODE + CHOICE + COMM_ADDED.get(name, [])]  # fmt: skip
    assert found == ADDED.get(name, [])


@pytest.mark.parametrize("name", list(ENUMERATIONS))
def test_enumerations(name: str) -> None:
    """Members count from 0 in the order of the specification; they are integers."""
    members = [(member.name, int(member)) for member in getattr(fi, name)]
    assert members == [(word, i) for i, word in enumerate(ENUMERATIONS[name].split())]
    assert np.int32(getattr(fi, name)(1)) == 1


def test_the_list_is_complete() -> None:
    """But for the functions without arguments of that kind."""
    others = {"block_scale_interleave", "nvfp4_block_scale_interleave", "nvfp4_kv_dequantize",
              "trtllm_mxint4_block_scale_moe",
              "trtllm_mxint4_block_scale_routed_moe", "clear_prepared_cache",
              "prepared_cache_size", "is_gated_activation", "next_positive_power_of_2",
              "interleave_moe_scales_for_sm90_mixed_gemm",
              "interleave_moe_weights_for_sm90_mixed_gemm",
              "preprocess_moe_weights_for_sm90_mixed_gemm_humming",
              "resolve_nvfp4_4over6"}  # fmt: skip
    functions = {name for name in fi.__all__ if name[0].islower()}
    assert functions == set(SIGNATURES) | others


SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "flashinfer_signatures.py"


def compared(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The script that reads FlashInfer's sources."""
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True,
                          check=False)  # fmt: skip


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None,
                    reason="flashinfer-python is not installed")  # fmt: skip
def test_the_installed_flashinfer() -> None:
    """Its signatures and names are those here."""
    done = compared()
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_differences_that_the_page_lists() -> None:
    """Each with a reason; the keywords are those of the lists above, the others are ours alone."""
    accepted = runpy.run_path(str(SCRIPT))["Accepted"].of_page()
    assert accepted.wrong == []
    of_another_release = set(SIGNATURES["create_allreduce_fusion_workspace"].partition("*, ")[2]
                             .replace("=None", "").split(", "))  # fmt: skip
    assert len(of_another_release) == 12
    released = {"create_allreduce_fusion_workspace": of_another_release} | {
        f"{alias}block_scale_interleave": {"out"} for alias in ("", "nvfp4_")} | {
        f"trtllm_fp8_per_tensor_scale_{kind}moe": {"gemm1_clamp_limit"} for kind in ("", "routed_")
    }  # fmt: skip
    wanted = {name: set(ADDED.get(name, [])) | released.get(name, set())
              for name in {*ADDED, *released}}  # fmt: skip
    assert accepted.keywords == wanted
    assert accepted.released == {(name, word) for name in released for word in released[name]}
    assert accepted.alone == {"clear_prepared_cache", "prepared_cache_size"} | {
        name for name in fi.__all__ if name.startswith("undo_")
    }


PAGE_OF_A_TEST = """
<!-- flashinfer differences: begin -->
| Functions | Difference | Reason |
|---|---|---|
| `packbits` | keyword `math` | none of its own |
| `packbits` | keyword `of` of 0.7 | only there |
| `segment_packbits`, `unknown` | not upstream's | |
| `mm_fp4` | faster | it is |
<!-- flashinfer differences: end -->
"""


def test_the_script_finds_differences(tmp_path: Path) -> None:
    """Another default, another order, a missing function: each is printed, by its name.

    So are rows of the page that say nothing, and those that nothing differs by.
    """
    namespace = runpy.run_path(str(SCRIPT))
    page = tmp_path / "page.md"
    page.write_text(PAGE_OF_A_TEST)
    accepted = namespace["Accepted"].of_page(page)
    for module in namespace["MODULES"]:
        file = tmp_path / f"{module.replace('.', '/')}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        (file.parent / "__init__.py").touch()
        file.touch()
    (tmp_path / "quantization" / "packbits.py").write_text(
        "def packbits(x, bitorder='big'): ...\n"
        "def segment_packbits(x, indptr, bitorder='little'): ...\n"
    )
    (tmp_path / "utils.py").write_text("def next_positive_power_of_2(y): ...\n")
    (tmp_path / "gemm" / "gemm_svdquant.py").write_text("def mm_mxfp8(*a): ...\n")
    none = namespace["Accepted"]()
    differences = "\n".join(namespace["compare_signatures"](tmp_path, fi, none))
    assert "\npackbits:" not in f"\n{differences}"
    assert "segment_packbits:\n" in differences and "'little'" in differences
    assert "next_positive_power_of_2:\n" in differences and "('a', 'any', '')" in differences
    assert "mm_fp4: upstream has no such function" in differences
    reasons, kinds = accepted.wrong
    assert "no reason for `segment_packbits`, `unknown`" in reasons and "'faster'" in kinds
    found = namespace["compare_signatures"](tmp_path, fi, accepted)
    assert "packbits: the keyword math is no difference" in found
    assert "packbits: the keyword of is no difference" not in found
    for name in ("segment_packbits", "unknown"):
        assert f"{name}: upstream has it, or nobody does" in found
