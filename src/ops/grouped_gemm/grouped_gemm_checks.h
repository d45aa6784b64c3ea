// Checks a call and lowers it to plain pointers.
#pragma once

#include "ops/grouped_gemm/grouped_gemm_problem.h"

namespace narrowfloat {

// Checks everything that the host can decide, and the permutation's contents where it is on the
// CPU. Throws kInvalidArgument; allocates nothing otherwise.
GemmCall checked_call(const GroupedGemmArgs& args, const GroupedWeights& weights,
                      const TensorView& workspace);

}  // namespace narrowfloat
