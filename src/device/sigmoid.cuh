// The router's sigmoid (base/portable_math.h) in half the operations, with the same bits for every
// argument. A test on the GPU compares all of them.
//
//   sigmoid(z) = 0.5 * tanh(0.5 * z) + 0.5;   tanh(|z| / 2) = -t / (2 + t),  t = exp(-|z|) - 1
//
// Computed in double with fused operations and short chains; the portable function is restricted to
// operations that every host does fast. Both round the quotient to fp32 once, and both are within a
// few units of double of it, so close that none of the 2^32 arguments rounds differently.
#pragma once

#include "base/float_ops.h"
#include "device/ptx/float_ops.cuh"

namespace narrowfloat {

namespace sigmoid_detail {

// (exp(r) - 1) / r for |r| <= ln 2 / 2: the Taylor series to r^11, evaluated in pairs.
__device__ inline double expm1_series(double r) {
  const double r2 = __dmul_rn(r, r);
  const double r4 = __dmul_rn(r2, r2);
  const double r8 = __dmul_rn(r4, r4);
  const double p01 = __fma_rn(1.0 / 2, r, 1.0);
  const double p23 = __fma_rn(1.0 / 24, r, 1.0 / 6);
  const double p45 = __fma_rn(1.0 / 720, r, 1.0 / 120);
  const double p67 = __fma_rn(1.0 / 40320, r, 1.0 / 5040);
  const double p89 = __fma_rn(1.0 / 3628800, r, 1.0 / 362880);
  const double p1011 = __fma_rn(1.0 / 479001600, r, 1.0 / 39916800);
  const double p03 = __fma_rn(p23, r2, p01);
  const double p47 = __fma_rn(p67, r2, p45);
  const double p811 = __fma_rn(p1011, r2, p89);
  return __fma_rn(p811, r8, __fma_rn(p47, r4, p03));
}

// exp(x) - 1 for -30 < x <= 0.
__device__ inline double expm1_of_negative(double x) {
  // Adding 1.5 * 2^52 rounds to an integer n, which the low word then holds.
  constexpr double kRound = 0x1.8p52;
  const double shifted = __fma_rn(x, 0x1.71547652b82fep0, kRound);
  const double n = __dadd_rn(shifted, -kRound);
  // ln 2 in two parts.
  double r = __fma_rn(n, -0x1.62e42fefa39efp-1, x);
  r = __fma_rn(n, -0x1.abc9e3b39803fp-56, r);
  const double power = __hiloint2double((__double2loint(shifted) + 1023) << 20, 0);
  return __fma_rn(power, __dmul_rn(expm1_series(r), r), __dadd_rn(power, -1.0));
}

// a / b for 1 <= b <= 2, within a unit in the last place.
__device__ inline double quotient(double a, double b) {
  if constexpr (kHasHopperInstructions) {
    double y = rcp_approx(b);
    y = __fma_rn(y, __fma_rn(-b, y, 1.0), y);
    const double q = __dmul_rn(a, y);
    return __fma_rn(__fma_rn(-b, q, a), y, q);
  } else {
    return __ddiv_rn(a, b);
  }
}

}  // namespace sigmoid_detail

__device__ inline float router_sigmoid(float z) {
  // tanh is 1 in fp32 from this magnitude on.
  constexpr float kLimit = 20.0F;
  const float magnitude = bits_float(float_bits(z) & 0x7FFFFFFFU);
  const double t = sigmoid_detail::expm1_of_negative(-static_cast<double>(magnitude));
  auto tanh = static_cast<float>(sigmoid_detail::quotient(-t, __dadd_rn(t, 2.0)));
  if (magnitude >= kLimit) tanh = 1.0F;
  if (is_nan(z)) tanh = z;
  tanh = bits_float(float_bits(tanh) | (float_bits(z) & 0x80000000U));
  return add_rn(mul_rn(0.5F, tanh), 0.5F);
}

}  // namespace narrowfloat
