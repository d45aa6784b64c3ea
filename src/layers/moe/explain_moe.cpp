// explain_moe(): the problem of each stage put to its implementations.
#include <utility>

#include "base/throw_error.h"
#include "layers/moe/moe_checks.h"
#include "layers/moe/stage_problems.h"
#include "runtime/dispatch.h"

namespace narrowfloat {
namespace {

// The activation's candidates stay as they are, all of them passed over.
Explanation fused_into_gemm(Explanation activation) {
  activation.chosen = "fused into grouped_gemm";
  for (Candidate& candidate : activation.candidates) {
    if (candidate.supported) candidate.reason = "passed over: grouped_gemm does the activation";
  }
  return activation;
}

}  // namespace

std::vector<Explanation> explain_moe(const MoeConfig& config, int64_t tokens, Device device) {
  check_moe_config(config, device);
  if (tokens < 0) throw_invalid("tokens: expected >= 0, got {}", tokens);
  MoeExtents extents = moe_extents(config);
  const int32_t tile =
      config.token_tile.value_or(default_token_tile(tokens, extents.slots, extents.local_experts));
  const PermutationLayout permutation =
      permutation_layout(tokens, extents.slots, extents.local_experts, tile);
  extents.fuses_activation = StageProblems(config, extents, permutation, device).fuses_activation();
  const StageProblems stages(config, extents, permutation, device);
  const auto gemms = grouped_gemm_impls();
  std::vector<Explanation> explanations;
  if (device.type != DeviceType::kCpu) {
    explanations.push_back(
        explain_candidates("route_permute", route_permute_impls(), stages.route_permute()));
  }
  if (explanations.empty() || explanations.front().chosen.empty()) {
    explanations.push_back(explain_candidates("route", route_impls(), stages.route()));
    explanations.push_back(explain_candidates("permute", permute_impls(), stages.permute()));
    if (extents.input != RowFormat::kBf16) {
      explanations.push_back(
          explain_candidates("code_rows", code_rows_impls(), stages.code_input()));
    }
  }
  explanations.push_back(explain_candidates("grouped_gemm", gemms, stages.first_gemm()));
  if (extents.double_quantize_fc1) {
    explanations.push_back(explain_candidates("code_rows", code_rows_impls(), stages.code_fc1()));
  }
  Explanation activation =
      explain_candidates("activation", activation_impls(), stages.activation());
  if (extents.fuses_activation) activation = fused_into_gemm(std::move(activation));
  explanations.push_back(std::move(activation));
  if (codes_fused_rows(extents)) {
    explanations.push_back(
        explain_candidates("code_rows", code_rows_impls(), stages.code_intermediate()));
  }
  explanations.push_back(explain_candidates("grouped_gemm", gemms, stages.second_gemm()));
  explanations.push_back(explain_candidates("combine", combine_impls(), stages.combine()));
  return explanations;
}

}  // namespace narrowfloat
