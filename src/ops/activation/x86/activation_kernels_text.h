// The kernels of activation_kernels.h, written against a level of vector instructions.
//
// Level is a type of an unnamed namespace with kLanes, vectors of fp32 (Floats), of 32-bit integers
// (Ints) and of decisions (Mask), and elementary operations. is_greater() and is_less() are false
// for NaN.
#pragma once

#include "ops/activation/x86/activation_kernels.h"

namespace narrowfloat::activation_kernels {

// exp_portable().
template <class Level>
typename Level::Floats exponential(typename Level::Floats x) {
  using Floats = typename Level::Floats;
  const auto constant = [](float value) { return Level::floats(value); };
  const Floats round = constant(0x1.8p23F);
  const Floats scaled = Level::mul(x, constant(0x1.715476p+0F));
  const Floats n = Level::sub(Level::add(scaled, round), round);
  Floats r = Level::fma(n, constant(-0x1.62e400p-1F), x);
  r = Level::fma(n, constant(-0x1.7f7d1cp-20F), r);
  Floats p = constant(1.0F / 5040.0F);
  p = Level::fma(p, r, constant(1.0F / 720.0F));
  p = Level::fma(p, r, constant(1.0F / 120.0F));
  p = Level::fma(p, r, constant(1.0F / 24.0F));
  p = Level::fma(p, r, constant(1.0F / 6.0F));
  p = Level::fma(p, r, constant(0.5F));
  p = Level::fma(p, r, constant(1.0F));
  p = Level::fma(p, r, constant(1.0F));
  const auto exponent = Level::to_ints(n);
  const auto half = Level::halved(exponent);
  const Floats power = Level::mul(Level::mul(p, Level::power_of_two(half)),
                                  Level::power_of_two(Level::sub(exponent, half)));
  const Floats below = Level::select(Level::is_less(x, constant(-104.0F)), constant(0.0F), power);
  const Floats above =
      Level::select(Level::is_greater(x, constant(89.0F)), constant(__builtin_inff()), below);
  return Level::select(Level::is_nan(x), x, above);
}

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
    const Floats one_plus = Level::add(Level::floats(1.0F), exponential<Level>(Level::negated(t)));
    Level::store(h + i, Level::mul(Level::div(gate, one_plus), up));
  }
}

template <class Level>
constexpr ActivationKernels activation_kernels_of() {
  return {.swiglu = swiglu<Level>};
}

}  // namespace narrowfloat::activation_kernels
