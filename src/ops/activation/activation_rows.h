// The common part of both CPU implementations for a row: the parameters of its expert, and the
// rounding of h before it is encoded.
#pragma once

#include "formats/float16.h"
#include "ops/activation/activation_math.h"
#include "ops/activation/activation_problem.h"
#include "tensor/element_io.h"
#include "tensor/row_encoder.h"

namespace narrowfloat {

template <typename Real>
class RowActivation {
 public:
  RowActivation(const ActivationProblem& problem, const ActivationArgs& args, int64_t row)
      : kind_(problem.kind), format_(problem.format) {
    const int64_t expert = problem.per_expert ? args.tile_to_expert[row / args.token_tile] : 0;
    const Activation& activation = args.activation;
    params_ = {.alpha = value(activation.alpha, expert),
               .beta = value(activation.beta, expert),
               .limit_gate = value(activation.limit_gate, expert),
               .limit_up = value(activation.limit_up, expert)};
    multiplier_ = value(args.multiplier, expert);
  }

  [[nodiscard]] RowRules rules() const {
    const float input_max = largest_finite(is_from_bf16() ? DType::kBF16 : DType::kF32);
    return {.format = format_, .multiplier = multiplier_, .input_max = input_max};
  }

  [[nodiscard]] const ActivationParams<Real>& params() const { return params_; }

  // h of one element, rounded.
  [[nodiscard]] float result(Real u, Real g) const {
    return rounded(activated(kind_, u, g, params_));
  }
  // Rounds once from double, and to bf16 where the row format starts from bf16 (moe spec 6.4).
  [[nodiscard]] float rounded(Real h) const {
    if constexpr (sizeof(Real) == sizeof(double)) {
      const bool is_bf16 = format_ == RowFormat::kBf16 || is_from_bf16();
      return is_bf16 ? bf16_to_float(double_to_bf16(h)) : static_cast<float>(h);
    } else {
      return is_from_bf16() ? bf16_to_float(float_to_bf16(h)) : h;
    }
  }

 private:
  // Scales of whole rows are those of h rounded to bf16.
  [[nodiscard]] bool is_from_bf16() const { return has_row_scale(format_); }

  static float value(const PerExpert& given, int64_t expert) {
    if (given.values.is_absent()) return given.value;
    return static_cast<const float*>(given.values.data)[expert];
  }

  ActivationKind kind_;
  RowFormat format_;
  ActivationParams<Real> params_;
  float multiplier_;
};

// Calls visitor.template operator()<Real>() with the type that the problem is computed in.
template <typename Visitor>
void visit_real(const ActivationProblem& problem, Visitor&& visitor) {
  if (problem.input == DType::kF64) return visitor.template operator()<double>();
  visitor.template operator()<float>();
}

}  // namespace narrowfloat
