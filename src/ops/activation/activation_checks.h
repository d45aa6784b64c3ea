// Turns a public call into a problem and its arguments, and checks all of it.
#pragma once

#include "ops/activation/activation_problem.h"

namespace narrowfloat {

struct LoweredActivation {
  ActivationProblem problem;
  ActivationArgs args;
};

LoweredActivation lower(const ActivateArgs& call);

}  // namespace narrowfloat
