// From the values of a QuantizeProblem to the types that kernels are made of.
#pragma once

#include "ops/quantize/sm90/row_sources.cuh"

namespace narrowfloat {

// Calls visitor.template operator()<Math>() with the policy of `mode`.
template <typename Visitor>
void visit_device_math(MathMode mode, Visitor&& visitor) {
  if (mode == MathMode::kExact) {
    visitor.template operator()<DeviceExactMath>();
  } else {
    visitor.template operator()<DeviceFastMath>();
  }
}

template <typename Visitor>
void visit_half(DType dtype, Visitor&& visitor) {
  if (dtype == DType::kBF16) {
    visitor.template operator()<PackedBf16>();
  } else {
    visitor.template operator()<PackedF16>();
  }
}

// Calls visitor.template operator()<Source>() with the source of the problem's rows, which is no
// norm. kTakesE4m3: the format has rules for E4M3 input.
template <bool kTakesE4m3, typename Visitor>
void visit_source(const QuantizeProblem& problem, Visitor&& visitor) {
  if (problem.source == RowSourceKind::kSmooth) return visitor.template operator()<SmoothRows>();
  if (problem.source == RowSourceKind::kSiluMul) {
    return visit_half(problem.input, [&]<class Half>() {
      visit_device_math(problem.math,
                        [&]<class Math>() { visitor.template operator()<SiluRows<Half, Math>>(); });
    });
  }
  if (problem.input == DType::kF32) return visitor.template operator()<FloatRows>();
  if constexpr (kTakesE4m3) {
    if (problem.input == DType::kF8E4M3) {
      return visit_device_math(
          problem.math, [&]<class Math>() { visitor.template operator()<E4m3Rows<Math>>(); });
    }
  }
  visit_half(problem.input, [&]<class Half>() { visitor.template operator()<PlainRows<Half>>(); });
}

}  // namespace narrowfloat
