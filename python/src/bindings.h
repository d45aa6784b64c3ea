// The functions with which each source adds its part to the module.
#pragma once

#include <nanobind/nanobind.h>

namespace narrowfloat::python {

void bind_formats(nanobind::module_& module);          // FormatInfo, QuantizedLayout, names, sizes.
void bind_options(nanobind::module_& module);          // QuantizeOptions, RmsNormOptions.
void bind_operations(nanobind::module_& module);       // QuantizedBuffers and their operations.
void bind_kv_cache(nanobind::module_& module);         // KV caches.
void bind_reorder(nanobind::module_& module);          // Shuffles, bits, 8-bit groups.
void bind_files(nanobind::module_& module);            // Single safetensors files.
void bind_checkpoints(nanobind::module_& module);      // Checkpoints and their reports.
void bind_moe(nanobind::module_& module);              // MoeConfig, MoeWeights, MoeLayer.
void bind_rank_groups(nanobind::module_& module);      // RankGroup.
void bind_allreduce(nanobind::module_& module);        // AllReduceWorkspace and its options; links.
void bind_expert_parallel(nanobind::module_& module);  // ExpertParallel.
void bind_grouped_gemm(nanobind::module_& module);     // GroupedWeights.
void bind_routing(nanobind::module_& module);          // route, permute, combine; listings.
void bind_explanations(nanobind::module_& module);     // explain.
void bind_streams(nanobind::module_& module);          // The stream of CUDA calls.
void bind_runtime(nanobind::module_& module);          // Version, threads.

}  // namespace narrowfloat::python
