// From a public call to a problem and its arguments, with every check on the way.
#pragma once

#include "ops/quantize/quantize_problem.h"

namespace narrowfloat {

// A public call of any of the fused forms; absent views where a form has no such operand.
struct QuantizeCall {
  RowSourceKind source = RowSourceKind::kPlain;
  TensorView input;
  TensorView vector;  // smooth or weight
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
