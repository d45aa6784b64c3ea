// Single fp32 instructions with flush-to-zero and the approximate ones, one per function.
#pragma once

#include "base/host_device.h"

namespace narrowfloat {

// mul.rn.ftz.f32: denormal operands count as zeros of their sign; tininess is detected after
// rounding.
__device__ inline float mul_ftz(float a, float b) {
  float result;
  asm("mul.rn.ftz.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// add.rn.ftz.f32
__device__ inline float add_ftz(float a, float b) {
  float result;
  asm("add.rn.ftz.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// div.rn.ftz.f32: a correctly rounded quotient of flushed operands.
__device__ inline float div_ftz(float a, float b) {
  float result;
  asm("div.rn.ftz.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// min.NaN.f32: NaN, the canonical one, wins over a number.
__device__ inline float min_nan(float a, float b) {
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// rcp.approx.ftz.f32: within 1 ulp; `fast` mode is defined by Hopper's (spec 4.3). Never apply it
// to another reciprocal's result: ptxas replaces the pair by its operand.
__device__ inline float rcp_approx(float a) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(a));
  return result;
}

// rcp.approx.ftz.f64: about 20 bits, from the upper half of the operand.
__device__ inline double rcp_approx(double a) {
  double result;
  asm("rcp.approx.ftz.f64 %0, %1;" : "=d"(result) : "d"(a));
  return result;
}

// One Newton step from rcp.approx: the correctly rounded reciprocal for every significand, where
// neither a nor 1 / a is near the ends of the range (2^-110 to 2^110 are far from them). Portable
// code divides, since that is known of Hopper's approximation alone.
__device__ inline float newton_reciprocal(float a) {
  if constexpr (kHasHopperInstructions) {
    const float y = rcp_approx(a);
    return __fmaf_rn(y, __fmaf_rn(-a, y, 1.0F), y);
  } else {
    return __frcp_rn(a);
  }
}

// ex2.approx.ftz.f32: 2^a within 2 ulp.
__device__ inline float exp2_approx(float a) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(a));
  return result;
}

}  // namespace narrowfloat
