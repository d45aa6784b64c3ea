// explain_moe(): the problem of each stage put to its implementations.
#include "base/throw_error.h"
#include "layers/moe/moe_checks.h"
#include "layers/moe/stage_problems.h"
#include "runtime/dispatch.h"

namespace narrowfloat {

std::vector<Explanation> explain_moe(const MoeConfig& config, int64_t tokens, Device device) {
  check_moe_config(config, device);
  if (tokens < 0) throw_invalid("tokens: expected >= 0, got {}", tokens);
  const MoeExtents extents = moe_extents(config);
  const int32_t tile =
      config.token_tile.value_or(default_token_tile(tokens, extents.slots, extents.local_experts));
  const StageProblems stages(config, extents,
                             permutation_layout(tokens, extents.slots, extents.local_experts, tile),
                             device);
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
  explanations.push_back(explain_candidates("activation", activation_impls(), stages.activation()));
  explanations.push_back(explain_candidates("grouped_gemm", gemms, stages.second_gemm()));
  explanations.push_back(explain_candidates("combine", combine_impls(), stages.combine()));
  return explanations;
}

}  // namespace narrowfloat
