// UE8M0: an unsigned power of two, byte b is 2^(b - 127), 255 is NaN. There is no zero and no
// infinity; byte 0 is 2^-127, an fp32 denormal (spec 5, 6.6).
#pragma once

#include <cstdint>

#include "base/host_device.h"
#include "narrowfloat/format.h"

namespace narrowfloat {

struct UE8M0 {
  static constexpr int kBits = 8;
  static constexpr int kBias = 127;
  static constexpr uint8_t kNanCode = 0xFF;
  static constexpr uint8_t kMaxCode = 0xFE;

  NF_HOST_DEVICE static constexpr float decode(uint8_t code) {
    if (code == kNanCode) return bits_float(0x7FFFFFFFU);
    return bits_float(code == 0 ? 0x00400000U : static_cast<uint32_t>(code) << 23);
  }

  // 2^(127 - b), the reciprocal of decode(b); NaN for 255. Never a division: 2^-127 is denormal.
  NF_HOST_DEVICE static constexpr float reciprocal(uint8_t code) {
    return code == kNanCode ? bits_float(0x7FFFFFFFU)
                            : decode(static_cast<uint8_t>(kMaxCode - code));
  }

  // The least power of two at or above |value|; the sign is ignored.
  NF_HOST_DEVICE static constexpr uint8_t encode_up(float value) {
    const uint32_t magnitude = float_bits(value) & 0x7FFFFFFFU;
    if (magnitude > 0x7F800000U) return kNanCode;
    if (magnitude == 0x7F800000U) return kMaxCode;
    const uint32_t exponent = magnitude >> 23;
    const uint32_t mantissa = magnitude & 0x7FFFFFU;
    // Values up to 2^-127, the smallest scale, are denormals with the top mantissa bit at most.
    const bool stays = exponent == kMaxCode || (exponent == 0 && mantissa <= 0x400000U);
    return static_cast<uint8_t>(exponent + (mantissa != 0 && !stays ? 1U : 0U));
  }

  // Scale of a block with maximum `amax` by the rules that look at the maximum's bits alone.
  // max_exponent: exponent of the element type's largest value (2 for E2M1, 8 for E4M3).
  // mantissa_bits: of the element type. Not for kUp, which divides first.
  NF_HOST_DEVICE static constexpr uint8_t encode_amax(float amax, Ue8m0Rounding rounding,
                                                      int max_exponent, int mantissa_bits) {
    uint32_t magnitude = float_bits(amax) & 0x7FFFFFFFU;
    if (magnitude > 0x7F800000U) return kNanCode;
    if (magnitude == 0x7F800000U) return kMaxCode;
    // kEven: half a unit of the element's mantissa; a carry raises the exponent.
    if (rounding == Ue8m0Rounding::kEven) magnitude += 1U << (22 - mantissa_bits);
    const int exponent = static_cast<int>(magnitude >> 23) - max_exponent;
    return static_cast<uint8_t>(exponent < 0 ? 0 : exponent);
  }
};

static_assert(UE8M0::decode(127) == 1.0F && UE8M0::decode(254) == 0x1p127F);
static_assert(UE8M0::decode(0) == 0x1p-127F && UE8M0::reciprocal(254) == 0x1p-127F);

}  // namespace narrowfloat
