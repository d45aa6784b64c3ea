// explain_moe(): the stages of a layer as problems without data, each put to its implementations.
#include "base/throw_error.h"
#include "layers/moe/moe_checks.h"
#include "narrowfloat/moe.h"
#include "ops/activation/activation_problem.h"
#include "ops/combine/combine_problem.h"
#include "ops/grouped_gemm/grouped_gemm_problem.h"
#include "ops/permute/permute_problem.h"
#include "ops/route/route_problem.h"
#include "runtime/dispatch.h"

namespace narrowfloat {
namespace {

class StageProblems {
 public:
  StageProblems(const MoeConfig& config, int64_t tokens, Device device)
      : config_(config), extents_(moe_extents(config)), tokens_(tokens), device_(device) {
    const int32_t tile = config.token_tile.value_or(
        default_token_tile(tokens, extents_.slots, extents_.local_experts));
    permutation_ = permutation_layout(tokens, extents_.slots, extents_.local_experts, tile);
  }

  [[nodiscard]] RouteProblem route() const {
    RouteProblem problem;
    problem.config = config_.routing;
    problem.device = device_;
    problem.tokens = tokens_;
    return problem;
  }
  [[nodiscard]] PermuteProblem permute() const {
    return {.layout = permutation_, .expert_offset = config_.expert_offset, .device = device_};
  }
  [[nodiscard]] GroupedGemmProblem gemm(int64_t rows, int64_t cols) const {
    return {.mode = config_.mode,
            .device = device_,
            .experts = extents_.local_experts,
            .rows = rows,
            .cols = cols};
  }
  [[nodiscard]] ActivationProblem activation() const {
    ActivationProblem problem;
    problem.kind = config_.activation.kind;
    problem.gate_order = config_.gate_order;
    problem.input = extents_.fc1_dtype;
    problem.format = extents_.intermediate;
    problem.device = device_;
    problem.slots = tokens_ * extents_.slots;
    problem.rows = permutation_.max_rows;
    problem.inter = extents_.inter;
    problem.input_cols = extents_.fc1_rows;
    return problem;
  }
  [[nodiscard]] CombineProblem combine() const {
    CombineProblem problem;
    problem.slot_rows = config_.slot_dtype;
    problem.has_weights = !config_.weight_on_input;
    problem.output = config_.out_dtype;
    problem.device = device_;
    problem.tokens = tokens_;
    problem.slots = extents_.slots;
    problem.hidden = extents_.hidden;
    problem.cols = extents_.hidden;
    return problem;
  }

 private:
  const MoeConfig& config_;
  MoeExtents extents_;
  int64_t tokens_;
  Device device_;
  PermutationLayout permutation_{};
};

}  // namespace

std::vector<Explanation> explain_moe(const MoeConfig& config, int64_t tokens, Device device) {
  check_moe_config(config, device);
  if (tokens < 0) throw_invalid("tokens: expected >= 0, got {}", tokens);
  const StageProblems stages(config, tokens, device);
  const auto gemms = grouped_gemm_impls();
  return {explain_candidates("route", route_impls(), stages.route()),
          explain_candidates("permute", permute_impls(), stages.permute()),
          explain_candidates("grouped_gemm", gemms, stages.gemm(fc1_rows(config), config.hidden)),
          explain_candidates("activation", activation_impls(), stages.activation()),
          explain_candidates("grouped_gemm", gemms, stages.gemm(config.hidden, config.inter)),
          explain_candidates("combine", combine_impls(), stages.combine())};
}

}  // namespace narrowfloat
