// Small floating-point types, derived from their bit counts.
//
// A code is (sign, exponent field, mantissa field) from the most significant bit down. With bias
// B = 2^(exponent_bits - 1) - 1 and m mantissa bits
//     exponent field e > 0:  (-1)^s * 2^(e - B) * (1 + mantissa / 2^m)
//     exponent field 0:      (-1)^s * 2^(1 - B) * (mantissa / 2^m)          (denormals)
// Conversions round to nearest, ties to the even code, saturate, and map every NaN to one code
// (spec 4.6, 5).
#pragma once

#include <cstdint>

#include "base/host_device.h"

namespace narrowfloat {

// The codes that are not numbers: none (E2M1), only all ones (E4M3 "fn"), or the top exponent as in
// IEEE 754 (E5M2).
enum class Special { kNone, kNanOnly, kIeee };

struct FloatSpec {
  int exponent_bits;
  int mantissa_bits;
  Special special;
};

template <FloatSpec kSpec>
struct MiniFloat {
  static constexpr int kMantissaBits = kSpec.mantissa_bits;
  static constexpr int kBits = 1 + kSpec.exponent_bits + kSpec.mantissa_bits;
  static constexpr int kBias = (1 << (kSpec.exponent_bits - 1)) - 1;
  static constexpr uint32_t kSignBit = 1U << (kBits - 1);
  static constexpr uint32_t kMagnitudeMask = kSignBit - 1;
  // Largest finite magnitude as a code, and the code of NaN. A type without NaN uses the largest.
  static constexpr uint32_t kMaxCode = kSpec.special == Special::kNone ? kMagnitudeMask
                                       : kSpec.special == Special::kNanOnly
                                           ? kMagnitudeMask - 1
                                           : kMagnitudeMask - (1U << kMantissaBits);
  static constexpr uint8_t kNanCode = static_cast<uint8_t>(kMagnitudeMask);

  static constexpr uint32_t kMaxFiniteBits =
      (kMaxCode << (23 - kMantissaBits)) + ((127U - kBias) << 23);
  static constexpr float kMaxFinite = bits_float(kMaxFiniteBits);
  static constexpr int kMaxExponent = static_cast<int>(kMaxFiniteBits >> 23) - 127;
  static constexpr uint32_t kMinNormalBits = float_bits(power_of_two(1 - kBias));
  static constexpr float kDenormalStep = power_of_two(1 - kBias - kMantissaBits);
  static constexpr float kDenormalMagic = power_of_two(1 - kBias - kMantissaBits + 23);

  // The result is exact. The sign of zero is kept; every NaN becomes the canonical NaN.
  NF_HOST_DEVICE static constexpr float decode(uint8_t code) {
    constexpr int kShift = 23 - kMantissaBits;
    const uint32_t magnitude = code & kMagnitudeMask;
    const uint32_t sign = (code & kSignBit) != 0 ? 0x80000000U : 0U;
    if (kSpec.special != Special::kNone && magnitude > kMaxCode) {
      const bool is_infinity = kSpec.special == Special::kIeee && magnitude == kMaxCode + 1;
      return bits_float(is_infinity ? sign | 0x7F800000U : 0x7FFFFFFFU);
    }
    if (magnitude < (1U << kMantissaBits)) {
      const float value = static_cast<float>(magnitude) * kDenormalStep;
      return bits_float(sign | float_bits(value));
    }
    return bits_float(sign | ((magnitude << kShift) + ((127U - kBias) << 23)));
  }

  // Rounds to nearest even and saturates to the largest finite value, also for infinities.
  NF_HOST_DEVICE static constexpr uint8_t encode(float value) {
    constexpr int kShift = 23 - kMantissaBits;
    const uint32_t input = float_bits(value);
    const uint32_t magnitude = input & 0x7FFFFFFFU;
    const uint32_t sign = (input >> (32 - kBits)) & kSignBit;
    // Normal results: round the fp32 mantissa in place, then rebias the exponent.
    const uint32_t half_minus_one = (1U << (kShift - 1)) - 1;
    const uint32_t odd = (magnitude >> kShift) & 1U;
    const uint32_t normal =
        ((magnitude + half_minus_one + odd) >> kShift) - ((127U - kBias) << kMantissaBits);
    // Denormal results: adding 2^23 denormal steps makes the fp32 unit exactly one step, so the
    // addition itself rounds.
    const float shifted = bits_float(magnitude) + kDenormalMagic;
    const uint32_t denormal = float_bits(shifted) - float_bits(kDenormalMagic);
    uint32_t code = magnitude < kMinNormalBits ? denormal : normal;
    code = magnitude > kMaxFiniteBits ? kMaxCode : code;
    // The canonical NaN has no sign.
    return static_cast<uint8_t>(magnitude > 0x7F800000U ? kNanCode : sign | code);
  }
};

using E2M1 = MiniFloat<FloatSpec{2, 1, Special::kNone}>;
using E4M3 = MiniFloat<FloatSpec{4, 3, Special::kNanOnly}>;
// Only the group quantizer writes E5M2.
using E5M2 = MiniFloat<FloatSpec{5, 2, Special::kIeee}>;

// The published maxima (OCP MX 1.0 and OCP FP8).
static_assert(E2M1::kBits == 4 && E2M1::kMaxFinite == 6.0F && E2M1::kNanCode == 0x7);
static_assert(E4M3::kBits == 8 && E4M3::kMaxFinite == 448.0F && E4M3::kNanCode == 0x7F);
static_assert(E5M2::kBits == 8 && E5M2::kMaxFinite == 57344.0F && E5M2::decode(0x7C) > 1e38F);

}  // namespace narrowfloat
