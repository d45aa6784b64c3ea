// See stage_problems.h.
#include "layers/moe/stage_problems.h"

#include <algorithm>

#include "runtime/dispatch.h"

namespace narrowfloat {

RoutePermuteProblem StageProblems::route_permute() const {
  RoutePermuteProblem problem{.route = route(), .layout = permutation_};
  problem.route.config.n_group = std::max(1, problem.route.config.n_group);
  if (extents_.input != RowFormat::kBf16 && !extents_.input_per_expert) {
    problem.quantized = extents_.input;
    problem.cols = extents_.hidden;
  }
  return problem;
}

RouteProblem StageProblems::route() const {
  RouteProblem problem;
  problem.config = config_.routing;
  problem.device = device_;
  problem.tokens = permutation_.tokens;
  return problem;
}

PermuteProblem StageProblems::permute() const {
  return {.layout = permutation_, .expert_offset = config_.expert_offset, .device = device_};
}

QuantizeActivationsProblem StageProblems::quantize_input() const {
  const bool per_expert = extents_.input_per_expert;
  return {.input = DType::kBF16,
          .format = extents_.input,
          .choice = per_expert ? RowChoice::kGathered : RowChoice::kAll,
          .device = device_,
          .input_rows = permutation_.tokens,
          .rows = per_expert ? permutation_.max_rows : permutation_.tokens,
          .cols = extents_.hidden,
          .per_expert = per_expert};
}

GroupedGemmProblem StageProblems::gemm(int64_t rows, int64_t cols) const {
  return {.mode = config_.mode,
          .device = device_,
          .experts = extents_.local_experts,
          .rows = rows,
          .cols = cols};
}

GroupedGemmProblem StageProblems::first_gemm() const {
  GroupedGemmProblem problem = gemm(extents_.fc1_rows, extents_.hidden);
  if (activation_info(config_.activation.kind).is_gated) problem.gate_order = config_.gate_order;
  return problem;
}

bool StageProblems::fuses_activation() const {
  if (extents_.double_quantize_fc1 || !forced_implementation("activation").empty()) return false;
  const GroupedGemmProblem problem = first_gemm();
  const GroupedGemmImpl* impl = find_implementation("grouped_gemm", grouped_gemm_impls(), problem);
  return impl != nullptr && impl->supports_activation(problem, config_.activation.kind,
                                                      fused_rows(extents_), permutation_.token_tile)
                                .ok();
}

QuantizeActivationsProblem StageProblems::quantize_intermediate() const {
  return {.input = DType::kBF16,
          .format = extents_.intermediate,
          .choice = RowChoice::kListed,
          .device = device_,
          .input_rows = permutation_.max_rows,
          .rows = permutation_.max_rows,
          .cols = extents_.inter};
}

QuantizeActivationsProblem StageProblems::quantize_fc1() const {
  return {.input = extents_.fc1_dtype(),
          .format = RowFormat::kFp8Group,
          .choice = RowChoice::kListed,
          .device = device_,
          .input_rows = permutation_.max_rows,
          .rows = permutation_.max_rows,
          .cols = extents_.fc1_rows};
}

ActivationProblem StageProblems::activation() const {
  const Activation& activation = config_.activation;
  ActivationProblem problem;
  problem.kind = activation.kind;
  problem.gate_order = config_.gate_order;
  problem.input = extents_.double_quantize_fc1 ? DType::kF8E4M3 : extents_.fc1_dtype();
  problem.format = extents_.intermediate;
  problem.device = device_;
  problem.slots = permutation_.tokens * extents_.slots;
  problem.rows = permutation_.max_rows;
  problem.inter = extents_.inter;
  problem.input_cols = extents_.fc1_rows;
  for (const PerExpert* parameter :
       {&activation.alpha, &activation.beta, &activation.limit_gate, &activation.limit_up}) {
    problem.per_expert = problem.per_expert || !parameter->values.is_absent();
  }
  return problem;
}

GroupedGemmProblem StageProblems::second_gemm() const {
  return gemm(extents_.hidden, extents_.inter);
}

CombineProblem StageProblems::combine() const {
  CombineProblem problem;
  problem.slot_rows = config_.slot_dtype;
  problem.has_weights = !config_.weight_on_input;
  problem.output = config_.out_dtype;
  problem.device = device_;
  problem.tokens = permutation_.tokens;
  problem.slots = extents_.slots;
  problem.hidden = extents_.hidden;
  problem.cols = extents_.hidden;
  return problem;
}

}  // namespace narrowfloat
