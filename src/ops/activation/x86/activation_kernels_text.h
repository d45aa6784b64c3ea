// The kernels of activation_kernels.h, written against a level of vector instructions.
//
// Level is a type of an unnamed namespace with kLanes, vectors of fp32 (Floats), of 32-bit integers
// (Ints) and of decisions (Mask), and elementary operations. is_greater() and is_less() are false
// for NaN.
#pragma once

#include "ops/activation/x86/activation_kernels.h"
#include "tensor/x86/exponential_text.h"

namespace narrowfloat::activation_kernels {

template <class Level>
typename Level::Floats clamp_above(typename Level::Floats x, float limit) {
  const auto limits = Level::floats(limit);
  return Level::select(Level::is_greater(x, limits), limits, x);
}

template <class Level>
void swiglu(const float* u, const float* g, int64_t count, const SwigluParams& params, float* h) {
  using Floats = typename Level::Floats;
  const Floats lowest = Level::floats(-params.limit_up);
  for (int64_t i = 0; i < count; i += Level::kLanes) {
    const Floats gate = clamp_above<Level>(Level::load(g + i), params.limit_gate);
    const Floats below = clamp_above<Level>(Level::load(u + i), params.limit_up);
    Floats up = Level::select(Level::is_less(below, lowest), lowest, below);
    // A beta of 0 would turn -0 into +0.
    if (params.beta != 0.0F) up = Level::add(up, Level::floats(params.beta));
    const Floats t = Level::mul(Level::floats(params.alpha), gate);
    const Floats e = exponential_text::exponential<Level>(Level::negated(t));
    const Floats one_plus = Level::add(Level::floats(1.0F), e);
    Level::store(h + i, Level::mul(Level::div(gate, one_plus), up));
  }
}

template <class Level>
constexpr ActivationKernels activation_kernels_of() {
  return {.swiglu = swiglu<Level>};
}

}  // namespace narrowfloat::activation_kernels
