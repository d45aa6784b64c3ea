// E4M3 codes by one addition, for GPUs without the conversion.
//
// Let e be the power of two of a magnitude, but 2^-6 at least. E4M3's numbers are e / 8 apart
// there, and so are the floats from e * 2^20 on: adding that number rounds the magnitude to the
// grid, ties to the even code, and leaves the steps from 0 in the mantissa. Below 2^-6 they are the
// code; from there on they count from 8, and each further binade has 8 codes.
#pragma once

#include <cmath>

#include "base/float_ops.h"
#include "formats/minifloat.h"

namespace narrowfloat {

// E4M3::encode(value).
NF_HOST_DEVICE inline uint8_t encode_e4m3_by_addition(float value) {
  constexpr uint32_t kLeast = E4M3::kMinNormalBits;
  const float magnitude = fminf(fabsf(value), E4M3::kMaxFinite);  // That of NaN is the latter.
  const uint32_t exponent = float_bits(magnitude) & 0x7F800000U;
  const uint32_t binade = exponent > kLeast ? exponent : kLeast;
  const uint32_t base = binade + (20U << 23);
  const uint32_t steps = float_bits(add_rn(magnitude, bits_float(base))) - base;
  const uint32_t sign = float_bits(value) >> 24 & 0x80U;
  const uint32_t code = sign | (steps + (binade >> 20) - (kLeast >> 20));
  return value != value ? E4M3::kNanCode : static_cast<uint8_t>(code);
}

}  // namespace narrowfloat
