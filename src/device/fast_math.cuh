// `fast` mode on the GPU: the policy of arithmetic (formats/math_policy.h) built from the
// instructions whose CPU model FastMath is.
#pragma once

#include "device/ptx/float_ops.cuh"
#include "formats/math_policy.h"

namespace narrowfloat {

struct DeviceFastMath {
  static constexpr MathMode kMode = MathMode::kFast;
  __device__ static float flush(float a) {
    return is_denormal_or_zero(a) ? bits_float(float_bits(a) & 0x80000000U) : a;
  }
  __device__ static float mul(float a, float b) { return mul_ftz(a, b); }
  __device__ static float add(float a, float b) { return add_ftz(a, b); }
  __device__ static float div(float a, float b) { return div_ftz(a, b); }
  __device__ static float rcp(float a) { return rcp_approx(a); }
};

}  // namespace narrowfloat
