// Checks of an all-reduce before anything is launched, and its lowering to
// plain pointers.
#pragma once

#include "ops/allreduce/allreduce_problem.h"

namespace narrowfloat {

// Checks the problem alone. Throws kInvalidArgument.
void check_allreduce_problem(const AllReduceProblem& problem);

// Checks the problem, and the arguments against it, and lowers them; `memory` of the result is left
// to the caller. Throws kInvalidArgument with the argument, what was expected and what came.
RankArgs lower_allreduce(const AllReduceProblem& problem, const AllReduceArgs& args, Device device);

}  // namespace narrowfloat
