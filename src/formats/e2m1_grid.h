// Rounding to the numbers of E2M1 in four instructions, without its codes.
//
// Let v >= 0 be an element times its multiplier, t = max(v, 1 + 2^-21) and e the power of two of t.
// The E2M1 grid is e / 2 apart at v, and so are the numbers around t * 2^22 - v, of which t * 2^22
// is one. Hence
//
//   r = fma(t, 2^22, -v)   rounds v to the grid, ties to the even code: the only rounding
//   q = fma(t, 2^22, -r)   is the rounded value, exact
//
// A tie has v = t with three significant bits, so that t * 2^22 is an even multiple of e / 2 and
// does not disturb the choice. Just above t = e the difference falls below e * 2^22, where numbers
// are e / 4 apart, but there v is next to e; t is a little more than 1 so that this does not happen
// to smaller v. (t * 2^22 + v would not do: it leaves the binade for v just below 2e.) The result
// equals MiniFloat's general formula for all floats in range.
//
// All values carry a factor 2^-6, which the conversion to codes needs (device/encode_e2m1.cuh).
// Valid for v < 7: larger values round outside E2M1's range.
#pragma once

#include <cmath>

#include "base/float_ops.h"

namespace narrowfloat {

inline constexpr float kE2m1Prescale = 0x1p-6F;
inline constexpr float kE2m1FastLimit = 7.0F * kE2m1Prescale;

// v: magnitude * multiplier * kE2m1Prescale, a number below kE2m1FastLimit. Returns the rounded
// value, with the factor.
NF_HOST_DEVICE inline float round_to_e2m1_grid(float v) {
  const float t = fmaxf(v, 0x1.000008p0F * kE2m1Prescale);
  const float r = fma_rn(t, 0x1p22F, -v);
  return fma_rn(t, 0x1p22F, -r);
}

// The code of a rounded value, with the factor, moved left by 22 bits: times 2^-120 the value has
// fp32's denormals and first normals where E2M1 has its own.
NF_HOST_DEVICE inline uint32_t e2m1_grid_code(float q) {
  return float_bits(mul_rn(q, 0x1p-126F / kE2m1Prescale));
}

}  // namespace narrowfloat
