// The stages of a layer as problems without data, which select their implementations.
#pragma once

#include "layers/moe/plan.h"
#include "moe_shared/quantize_activations_problem.h"
#include "narrowfloat/moe.h"
#include "ops/activation/activation_problem.h"
#include "ops/combine/combine_problem.h"
#include "ops/grouped_gemm/grouped_gemm_problem.h"
#include "ops/permute/permute_problem.h"
#include "ops/route/route_permute.h"
#include "ops/route/route_problem.h"

namespace narrowfloat {

// Problems of a run from logits with unquantized rows of bf16. The configuration outlives this
// object.
class StageProblems {
 public:
  StageProblems(const MoeConfig& config, const MoeExtents& extents,
                const PermutationLayout& permutation, Device device)
      : config_(config), extents_(extents), permutation_(permutation), device_(device) {}

  // The fused prologue, for a small batch on a GPU.
  [[nodiscard]] RoutePermuteProblem route_permute() const;
  [[nodiscard]] RouteProblem route() const;
  [[nodiscard]] PermuteProblem permute() const;
  // Only where the mode's rows are quantized.
  [[nodiscard]] QuantizeActivationsProblem quantize_input() const;
  [[nodiscard]] GroupedGemmProblem first_gemm() const;
  // Only with double_quantize_fc1.
  [[nodiscard]] QuantizeActivationsProblem quantize_fc1() const;
  // Whether the first GEMM fuses the activation: if its implementation can, unless
  // NARROWFLOAT_FORCE pins an activation implementation.
  [[nodiscard]] bool fuses_activation() const;
  [[nodiscard]] ActivationProblem activation() const;
  // Only where a fused activation stores bf16 rows that are quantized as a whole.
  [[nodiscard]] QuantizeActivationsProblem quantize_intermediate() const;
  [[nodiscard]] GroupedGemmProblem second_gemm() const;
  [[nodiscard]] CombineProblem combine() const;

 private:
  [[nodiscard]] GroupedGemmProblem gemm(int64_t rows, int64_t cols) const;

  const MoeConfig& config_;
  MoeExtents extents_;
  PermutationLayout permutation_;
  Device device_;
};

}  // namespace narrowfloat
