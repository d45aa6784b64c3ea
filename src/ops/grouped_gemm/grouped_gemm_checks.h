// Checks of a call, and its lowering to plain pointers.
#pragma once

#include "ops/grouped_gemm/grouped_gemm_problem.h"

namespace narrowfloat {

// Everything that can be decided on the host; the permutation's contents only where it is on the
// CPU. Throws kInvalidArgument; allocates nothing otherwise.
GemmCall checked_call(const GroupedGemmArgs& args, const GroupedWeights& weights,
                      const TensorView& workspace);

}  // namespace narrowfloat
