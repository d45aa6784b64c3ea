// SiLU with the same bits on every device (spec 6.12): an exponential built from fused
// multiply-adds, at most 0.94 ulp from the true value, and gate * sigmoid(gate) * up on top of it.
#pragma once

#include "formats/math_policy.h"

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

// silu(gate) * up before its rounding to 16 bits.
template <class Math>
NF_HOST_DEVICE float silu_mul(float gate, float up) {
  const float e = exp_portable(-gate);
  if constexpr (Math::kMode == MathMode::kExact) {
    return mul_rn(div_rn(gate, add_rn(1.0F, e)), up);
  } else {
    return Math::mul(Math::mul(gate, Math::rcp(Math::add(1.0F, e))), up);
  }
}

}  // namespace narrowfloat
