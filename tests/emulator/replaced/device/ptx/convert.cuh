// Emulated: src/device/ptx/convert.cuh.
#pragma once

#include "base/host_device.h"
#include "formats/float16.h"
#include "formats/minifloat.h"

namespace narrowfloat {

inline uint16_t to_e4m3x2(float low, float high) {
  // A sign of NaN is not kept.
  const auto code = [](float a) { return a != a ? E4M3::kNanCode : E4M3::encode(a); };
  return static_cast<uint16_t>(code(high) << 8 | code(low));
}
inline uint8_t to_e4m3(float a) { return static_cast<uint8_t>(to_e4m3x2(a, 0.0F)); }
inline uint32_t to_e4m3x4(float a, float b, float c, float d) {
  return to_e4m3x2(a, b) | static_cast<uint32_t>(to_e4m3x2(c, d)) << 16;
}
inline uint32_t to_e2m1x8(const float (&v)[8]) {
  uint32_t result = 0;
  for (int i = 0; i < 8; ++i) result |= static_cast<uint32_t>(E2M1::encode(v[i])) << (4 * i);
  return result;
}
inline uint32_t e4m3x2_to_f16x2(uint16_t codes) {
  const auto half = [](uint32_t code) {
    return static_cast<uint32_t>(float_to_f16(E4M3::decode(static_cast<uint8_t>(code))));
  };
  return half(codes >> 8) << 16 | half(codes & 0xFFU);
}
inline uint32_t e4m3x4_low_to_f16x2(uint32_t codes) {
  return e4m3x2_to_f16x2(static_cast<uint16_t>(codes));
}
inline uint32_t e4m3x4_high_to_f16x2(uint32_t codes) {
  return e4m3x2_to_f16x2(static_cast<uint16_t>(codes >> 16));
}
inline uint32_t to_bf16x2(float low, float high) {
  return static_cast<uint32_t>(float_to_bf16(high)) << 16 | float_to_bf16(low);
}
inline uint32_t to_f16x2(float low, float high) {
  return static_cast<uint32_t>(float_to_f16(high)) << 16 | float_to_f16(low);
}
inline float f16_low_to_float(uint32_t pair) { return f16_to_float(static_cast<uint16_t>(pair)); }
inline float f16_high_to_float(uint32_t pair) {
  return f16_to_float(static_cast<uint16_t>(pair >> 16));
}

}  // namespace narrowfloat
