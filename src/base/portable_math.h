// Exponential, hyperbolic tangent and the like with the same bits on every device. They are built
// from single IEEE operations: library functions differ in the last bit between hosts and devices
// and would break near-ties of a router differently (moe spec 1.6). Every NaN becomes the canonical
// one.
//
//   exp_portable     at most 0.94 ulp from the true value
//   tanh_portable    correctly rounded for every fp32 number (evaluated in double, rounded once)
//   sigmoid_by_tanh  the router's definition
//   normal_cdf       at most 4.2 ulp, also far in the lower tail
#pragma once

#include "base/float_ops.h"

namespace narrowfloat {

NF_HOST_DEVICE inline float exp_portable(float x) {
  if (is_nan(x)) return bits_float(0x7FFFFFFFU);
  if (x > 89.0F) return __builtin_inff();
  if (x < -104.0F) return 0.0F;
  // n = nearest integer of x / ln 2, ties to even: adding 1.5 * 2^23 rounds in place.
  constexpr float kRound = 0x1.8p23F;
  const float n = add_rn(add_rn(mul_rn(x, bits_float(0x3FB8AA3BU)), kRound), -kRound);
  // ln 2 in two parts, so that n * ln 2 is subtracted without losing bits.
  float r = fma_rn(n, -0x1.62e400p-1F, x);
  r = fma_rn(n, -0x1.7f7d1cp-20F, r);
  float p = 1.0F / 5040.0F;
  p = fma_rn(p, r, 1.0F / 720.0F);
  p = fma_rn(p, r, 1.0F / 120.0F);
  p = fma_rn(p, r, 1.0F / 24.0F);
  p = fma_rn(p, r, 1.0F / 6.0F);
  p = fma_rn(p, r, 0.5F);
  p = fma_rn(p, r, 1.0F);
  p = fma_rn(p, r, 1.0F);
  // 2^n in two halves: n reaches 128 and -150, beyond one fp32 exponent.
  const int exponent = static_cast<int>(n);
  const int half = exponent >> 1;
  return mul_rn(mul_rn(p, power_of_two(half)), power_of_two(exponent - half));
}

namespace portable_math_detail {

// p * x + c with two roundings: an fma would be slow where a host lacks the instruction.
NF_HOST_DEVICE inline double horner_step(double p, double x, double c) {
  return add_rn(mul_rn(p, x), c);
}

// exp(x) - 1 in double for -30 <= x <= 0, within a few ulp of double also where it is tiny.
NF_HOST_DEVICE inline double expm1_of_negative(double x) {
  constexpr double kRound = 0x1.8p52;
  const double n = add_rn(add_rn(mul_rn(x, 0x1.71547652b82fep0), kRound), -kRound);
  // ln 2 in two parts; the first has 33 bits, so its product with n is exact.
  double r = add_rn(x, mul_rn(n, -0x1.62e42feep-1));
  r = add_rn(r, mul_rn(n, -0x1.a39ef35793c76p-33));
  // The Taylor series of (exp(r) - 1) / r. As |r| <= ln 2 / 2, the omitted terms are below 5e-18.
  double p = 1.0 / 6227020800.0;
  p = horner_step(p, r, 1.0 / 479001600.0);
  p = horner_step(p, r, 1.0 / 39916800.0);
  p = horner_step(p, r, 1.0 / 3628800.0);
  p = horner_step(p, r, 1.0 / 362880.0);
  p = horner_step(p, r, 1.0 / 40320.0);
  p = horner_step(p, r, 1.0 / 5040.0);
  p = horner_step(p, r, 1.0 / 720.0);
  p = horner_step(p, r, 1.0 / 120.0);
  p = horner_step(p, r, 1.0 / 24.0);
  p = horner_step(p, r, 1.0 / 6.0);
  p = horner_step(p, r, 0.5);
  p = horner_step(p, r, 1.0);
  // exp(x) - 1 = 2^n (exp(r) - 1) + (2^n - 1); the first term stands alone for n = 0.
  const auto exponent = static_cast<int64_t>(n);
  const auto power = bit_cast<double>(static_cast<uint64_t>(exponent + 1023) << 52);
  return add_rn(mul_rn(power, mul_rn(p, r)), add_rn(power, -1.0));
}

}  // namespace portable_math_detail

// The function is odd, also for -0, and exactly +-1 from 9.02 on.
NF_HOST_DEVICE inline float tanh_portable(float x) {
  if (is_nan(x)) return bits_float(0x7FFFFFFFU);
  const uint32_t sign = float_bits(x) & 0x80000000U;
  const float magnitude = bits_float(float_bits(x) ^ sign);
  if (magnitude >= 10.0F) return bits_float(sign | float_bits(1.0F));
  // tanh(a) = -t / (2 + t) with t = exp(-2 a) - 1.
  const double t =
      portable_math_detail::expm1_of_negative(mul_rn(static_cast<double>(magnitude), -2.0));
  const auto quotient = static_cast<float>(div_rn(-t, add_rn(t, 2.0)));
  // The quotient of a zero has either sign.
  return bits_float(sign | (float_bits(quotient) & 0x7FFFFFFFU));
}

// The router's sigmoid (moe spec 4.1): exactly 1 above about 16.9 and exactly 0 below about -18.0,
// which 1 / (1 + exp(-z)) is not.
NF_HOST_DEVICE inline float sigmoid_by_tanh(float z) {
  return add_rn(mul_rn(0.5F, tanh_portable(mul_rn(0.5F, z))), 0.5F);
}

// (1 + erf(x / sqrt 2)) / 2, the distribution function of the normal distribution. As the erf form
// cancels for negative x, the lower tail is exp(-x^2 / 2) times a smooth function instead.
NF_HOST_DEVICE inline float normal_cdf(float x) {
  if (is_nan(x)) return bits_float(0x7FFFFFFFU);
  const float t = bits_float(float_bits(x) & 0x7FFFFFFFU);
  // The tail is below the least fp32 number from this magnitude on.
  if (t > 14.5F) return x > 0.0F ? 1.0F : 0.0F;
  // exp(t^2 / 2) * tail(t) * (1 + t / 2) by a minimax polynomial of degree 9 in q, which maps
  // [0, 15] to [-1, 0.62]; its relative error is 2.2e-8.
  const float q = div_rn(add_rn(t, -3.5F), add_rn(t, 3.5F));
  float p = 0x1.1ea0ecp-14F;
  p = fma_rn(p, q, 0x1.e58b3ap-14F);
  p = fma_rn(p, q, -0x1.0ed69ep-11F);
  p = fma_rn(p, q, -0x1.2004d8p-11F);
  p = fma_rn(p, q, 0x1.21079cp-8F);
  p = fma_rn(p, q, -0x1.6ecc9cp-8F);
  p = fma_rn(p, q, -0x1.82886ap-7F);
  p = fma_rn(p, q, 0x1.035d0ap-4F);
  p = fma_rn(p, q, -0x1.23b050p-3F);
  p = fma_rn(p, q, 0x1.2b77ccp-2F);
  // The rounding error of t^2 enters as a factor 1 - error / 2.
  const float square = mul_rn(t, t);
  const float error = fma_rn(t, t, -square);
  float e = exp_portable(mul_rn(-0.5F, square));
  e = fma_rn(e, mul_rn(-0.5F, error), e);
  const float tail = mul_rn(e, div_rn(p, fma_rn(0.5F, t, 1.0F)));
  return x > 0.0F ? add_rn(1.0F, -tail) : tail;
}

}  // namespace narrowfloat
