// Inner loops of the CPU activation as a table of functions, one for each level of x86 vector
// instructions. docs/architecture.md has the rules for the sources of a level.
//
// A lane does the operations of activation_math.h and portable_math.h in their order, so it has
// their bits; only a NaN may be another one.
#pragma once

#include <cstdint>

namespace narrowfloat {

// The elements of a call are padded to a multiple of this with any numbers.
inline constexpr int64_t kActivationLanes = 16;

struct SwigluParams {
  float alpha;
  float beta;
  float limit_gate;
  float limit_up;
};

struct ActivationKernels {
  using Swiglu = void (*)(const float* u, const float* g, int64_t count, const SwigluParams& params,
                          float* h);
  Swiglu swiglu;
};

extern const ActivationKernels kActivationKernelsAvx2;
extern const ActivationKernels kActivationKernelsAvx512;

}  // namespace narrowfloat
