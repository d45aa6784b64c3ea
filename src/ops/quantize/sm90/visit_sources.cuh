// Maps the values of a QuantizeProblem to the types that kernels are compiled for.
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

}  // namespace narrowfloat
