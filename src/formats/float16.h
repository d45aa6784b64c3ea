// bf16 and fp16 as 16-bit patterns: exact widening to fp32, and rounding to nearest even with
// overflow to infinity (RN16 of the spec). Every NaN narrows to 0x7FFF (spec 4.6).
#pragma once

#include <cstdint>

#include "base/host_device.h"

namespace narrowfloat {

NF_HOST_DEVICE constexpr float bf16_to_float(uint16_t value) {
  return bits_float(static_cast<uint32_t>(value) << 16);
}

NF_HOST_DEVICE constexpr uint16_t float_to_bf16(float value) {
  const uint32_t input = float_bits(value);
  const uint32_t rounded = (input + 0x7FFFU + ((input >> 16) & 1U)) >> 16;
  const bool is_nan = (input & 0x7FFFFFFFU) > 0x7F800000U;
  return static_cast<uint16_t>(is_nan ? 0x7FFFU : rounded);
}

// Rounds once: the first step truncates to fp32 and sets the last bit if anything was lost, so that
// the second step sees the side of a tie that the value is on.
NF_HOST_DEVICE constexpr uint16_t double_to_bf16(double value) {
  const auto nearest = static_cast<float>(value);
  const auto back = static_cast<double>(nearest);
  if (value != value || back == value) return float_to_bf16(nearest);
  const bool is_above = value < 0.0 ? back < value : back > value;
  const uint32_t truncated = float_bits(nearest) - (is_above ? 1U : 0U);
  return float_to_bf16(bits_float(truncated | 1U));
}

NF_HOST_DEVICE constexpr float f16_to_float(uint16_t value) {
  const uint32_t sign = (value & 0x8000U) << 16;
  const uint32_t magnitude = value & 0x7FFFU;
  // Denormals count units of 2^-24, exactly representable as normal fp32 numbers.
  const float denormal = static_cast<float>(magnitude) * 0x1p-24F;
  uint32_t bits = (magnitude << 13) + ((127U - 15U) << 23);
  if (magnitude >= 0x7C00U) bits += (255U - 31U - (127U - 15U)) << 23;
  if (magnitude < 0x0400U) bits = float_bits(denormal);
  return bits_float(sign | bits);
}

NF_HOST_DEVICE constexpr uint16_t float_to_f16(float value) {
  const uint32_t input = float_bits(value);
  const uint32_t sign = (input >> 16) & 0x8000U;
  const uint32_t magnitude = input & 0x7FFFFFFFU;
  // Like MiniFloat::encode, but overflow gives infinity instead of the largest number.
  const uint32_t normal = ((magnitude + 0xFFFU + ((magnitude >> 13) & 1U)) >> 13) - (112U << 10);
  const uint32_t denormal = float_bits(bits_float(magnitude) + 0.5F) - float_bits(0.5F);
  uint32_t code = magnitude < 0x38800000U ? denormal : normal;
  if (magnitude >= 0x477FF000U) code = 0x7C00U;  // 65520 and above round to infinity.
  return static_cast<uint16_t>(magnitude > 0x7F800000U ? 0x7FFFU : sign | code);
}

}  // namespace narrowfloat
