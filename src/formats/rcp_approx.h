// `rcp.approx.ftz.f32` on the CPU: the GPU's approximate reciprocal, bit for bit (spec 4.3).
//
// The instruction differs from the correctly rounded reciprocal by -1, 0 or +1 unit in the last
// place, depending on the mantissa only. The table of all 2^23 differences comes from measurements
// on an H100; the build packs it into two bits an entry (2 MiB) from
// data/rcp_approx_ftz_delta_h100.i8.gz.
#pragma once

#include <cstdint>

#include "base/host_device.h"
#include "formats/rcp_table.h"

namespace narrowfloat {

inline float rcp_approx_ftz(float x) {
  const uint32_t input = float_bits(x);
  const uint32_t sign = input & 0x80000000U;
  const uint32_t magnitude = input & 0x7FFFFFFFU;
  if (magnitude > 0x7F800000U) return bits_float(0x7FFFFFFFU);
  if (magnitude == 0x7F800000U) return bits_float(sign);
  if (magnitude < 0x00800000U) return bits_float(sign | 0x7F800000U);
  const uint32_t mantissa = magnitude & 0x7FFFFFU;
  const uint32_t code = (narrowfloat_rcp_delta_table[mantissa >> 2] >> (2 * (mantissa & 3U))) & 3U;
  const uint32_t quotient = float_bits(1.0F / bits_float(0x3F800000U | mantissa)) +
                            (code == 1 ? 1U : 0U) - (code == 2 ? 1U : 0U);
  // The exponent of 1 / 1.m, minus the input's own exponent; results below 2^-126 are flushed.
  const int exponent = static_cast<int>(quotient >> 23) - (static_cast<int>(magnitude >> 23) - 127);
  if (exponent <= 0) return bits_float(sign);
  return bits_float(sign | static_cast<uint32_t>(exponent) << 23 | (quotient & 0x7FFFFFU));
}

}  // namespace narrowfloat
