// From a public call to a problem and its arguments, with every check on the way.
#pragma once

#include "ops/activation/activation_problem.h"

namespace narrowfloat {

struct LoweredActivation {
  ActivationProblem problem;
  ActivationArgs args;
};

LoweredActivation lower(const ActivateArgs& call);

}  // namespace narrowfloat
