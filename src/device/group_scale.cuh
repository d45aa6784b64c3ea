// The scale of a group of FP8 1x128 from its maximum, with divisions and without.
#pragma once

#include "device/device_math.cuh"
#include "formats/registry.h"

namespace narrowfloat {

// Scale and multiplier of a group by the reciprocal rule.
__device__ inline BlockScale<float> group_scale(float amax, float input_max = kFloatMax) {
  return Fp8Block1x128::block_scale<DeviceExactMath>(amax, ScalePair{},
                                                     BlockRules{.input_max = input_max});
}

struct QuickGroupScale {
  BlockScale<float> scale;
  bool is_right;  // False: call group_scale instead.
};

// Same bits as group_scale with 8 instructions and no branch, for maxima from 2^-100 on: both
// quotients come from an approximate reciprocal and one correction. A test compares them with the
// divisions for all mantissas; exponents do not matter, as nothing is denormal in this range. A
// maximum of zero has the multiplier of 448, which is 1. Portable code divides.
__device__ inline QuickGroupScale quick_group_scale(float amax) {
  constexpr float kLeast = 0x1p-100F;
  constexpr float kMost = 0x1p100F;
  const float a = amax == 0.0F ? E4M3::kMaxFinite : amax;
  const bool is_right = a >= kLeast && a <= kMost;
  if constexpr (kHasHopperInstructions) {
    const float y = rcp_approx(a);
    const float near = __fmul_rn(E4M3::kMaxFinite, y);
    const float m = __fmaf_rn(__fmaf_rn(-a, near, E4M3::kMaxFinite), y, near);
    const float r = rcp_approx(m);
    return {{__fmaf_rn(r, __fmaf_rn(-m, r, 1.0F), r), m}, is_right};
  } else {
    const float m = __fdiv_rn(E4M3::kMaxFinite, a);
    return {{__frcp_rn(m), m}, is_right};
  }
}

}  // namespace narrowfloat
