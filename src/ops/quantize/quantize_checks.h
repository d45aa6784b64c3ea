// Checks a public call and lowers it to a problem and its arguments.
#pragma once

#include "ops/quantize/quantize_problem.h"

namespace narrowfloat {

// A public call of any of the fused forms; operands that a form does not have are absent views.
struct QuantizeCall {
  RowSourceKind source = RowSourceKind::kPlain;
  TensorView input;
  TensorView vector;  // Smoothing factors or norm weight.
  TensorView residual;
  QuantizedView output;
  RmsNormOptions norm;
  QuantizeOptions options;
};

struct LoweredQuantize {
  QuantizeProblem problem;
  QuantizeArgs args;
};

LoweredQuantize lower(const QuantizeCall& call);

}  // namespace narrowfloat
