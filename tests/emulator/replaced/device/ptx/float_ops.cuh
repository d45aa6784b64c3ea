// Emulated: src/device/ptx/float_ops.cuh. 2^a is correctly rounded here, on a GPU within 2 ulp; so
// is the reciprocal of a double, of which a GPU makes about 20 bits.
#pragma once

#include <cmath>

#include "base/float_ops.h"
#include "formats/math_policy.h"
#include "formats/rcp_approx.h"

namespace narrowfloat {

inline float emulated_flush(float a) {
  if (is_nan(a)) return bits_float(0x7FFFFFFFU);
  return is_denormal_or_zero(a) ? bits_float(float_bits(a) & 0x80000000U) : a;
}
// Not by the IEEE product, which is 2^-126 for some that are tiny after rounding to 24 bits.
inline float mul_ftz(float a, float b) { return emulated_flush(FastMath::mul(a, b)); }
inline float add_ftz(float a, float b) {
  return emulated_flush(emulated_flush(a) + emulated_flush(b));
}
inline float div_ftz(float a, float b) {
  return emulated_flush(emulated_flush(a) / emulated_flush(b));
}
inline float min_nan(float a, float b) {
  if (is_nan(a) || is_nan(b)) return bits_float(0x7FFFFFFFU);
  return a < b || (a == b && std::signbit(a)) ? a : b;
}
inline float rcp_approx(float a) { return rcp_approx_ftz(a); }
inline double rcp_approx(double a) { return 1.0 / a; }
inline float newton_reciprocal(float a) {
  const float y = rcp_approx(a);
  return std::fma(y, std::fma(-a, y, 1.0F), y);
}
inline float exp2_approx(float a) {
  return emulated_flush(static_cast<float>(std::exp2(static_cast<double>(emulated_flush(a)))));
}

}  // namespace narrowfloat
