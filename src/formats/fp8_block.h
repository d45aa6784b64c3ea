// FP8 (E4M3) with fp32 decode scales: one per 1x128 block (activations), 128x128 block (weights) or
// whole tensor.
//
//   value = code * scale        8.25, 8.002 and 8 bits an element; the last block of a row or
//                               column may be partial
//
// Rules (spec 6.7), a = block maximum:
//   reciprocal       m = 448 / a,             stored 1 / m      (a == 0 or infinite: m = 1)
//   reciprocal_pow2  m with cleared mantissa, stored 1 / m
//   amax_div         S = max(a, eps) / 448,   stored S, m = 1 / S
//   pow2_ceil        S raised to a power of two
// Only `reciprocal` has a `fast` variant; callers use ExactMath for the other rules.
#pragma once

#include "formats/block_format.h"
#include "formats/math_policy.h"
#include "formats/minifloat.h"

namespace narrowfloat {

template <int64_t kRows, int64_t kCols>
struct Fp8Block {
  static constexpr int64_t kBlockRows = kRows;
  static constexpr int64_t kBlockCols = kCols;
  static constexpr ScaleType kScaleType = ScaleType::kF32;
  static constexpr bool kHasGlobalScale = false;
  static constexpr bool kHasRowScale = false;
  static constexpr bool kAmaxOfNanIsNan = false;
  using Element = E4M3;
  using Stored = float;

  template <class Math>
  NF_HOST_DEVICE static BlockScale<Stored> block_scale(float amax, const ScalePair& /*pair*/,
                                                       const BlockRules& rules) {
    if constexpr (Math::kMode == MathMode::kFast) {
      // A zero is recognised before flushing: a denormal maximum gives an infinite multiplier.
      const float m = amax == 0.0F ? 1.0F : Math::mul(E4M3::kMaxFinite, Math::rcp(amax));
      return {Math::rcp(m), m};
    }
    switch (rules.fp8_rule) {
      case Fp8ScaleRule::kAmaxDiv:
        return from_scale(scale_of(amax, rules.fp8_eps));
      case Fp8ScaleRule::kPow2Ceil:
        return from_scale(raised_to_power_of_two(scale_of(amax, rules.fp8_eps)));
      case Fp8ScaleRule::kReciprocalPow2: {
        const float m = reciprocal_multiplier(amax, rules);
        return from_multiplier(bits_float(float_bits(m) & 0x7F800000U));
      }
      case Fp8ScaleRule::kReciprocal:
        break;
    }
    return from_multiplier(reciprocal_multiplier(amax, rules));
  }

  template <class Math>
  NF_HOST_DEVICE static float scaled(float x, float multiplier) {
    return Math::mul(x, multiplier);
  }
  template <class Math>
  NF_HOST_DEVICE static uint8_t encode(float x, float multiplier) {
    return Math::template encode<Element>(scaled<Math>(x, multiplier));
  }

  NF_HOST_DEVICE static float decode_scale(Stored stored, float /*global_scale*/) { return stored; }

 private:
  NF_HOST_DEVICE static float reciprocal_multiplier(float amax, const BlockRules& rules) {
    const float a = amax < rules.fp8_eps ? rules.fp8_eps : amax;
    constexpr float kInfinity = __builtin_inff();
    if (a == 0.0F || a == kInfinity) return 1.0F;
    const float m = div_rn(E4M3::kMaxFinite, a);
    return m == kInfinity ? rules.input_max : m;
  }
  NF_HOST_DEVICE static float scale_of(float amax, float eps) {
    return div_rn(amax < eps ? eps : amax, E4M3::kMaxFinite);
  }
  NF_HOST_DEVICE static float raised_to_power_of_two(float scale) {
    const uint32_t bits = float_bits(scale);
    uint32_t exponent = (bits >> 23) + ((bits & 0x7FFFFFU) != 0 ? 1U : 0U);
    exponent = exponent < 1 ? 1 : exponent;
    exponent = exponent > 254 ? 254 : exponent;
    return bits_float(exponent << 23);
  }
  NF_HOST_DEVICE static BlockScale<Stored> from_multiplier(float m) { return {div_rn(1.0F, m), m}; }
  NF_HOST_DEVICE static BlockScale<Stored> from_scale(float s) { return {s, div_rn(1.0F, s)}; }
};

struct Fp8Block1x128 : Fp8Block<1, 128> {
  static constexpr FormatId kId = FormatId::kFp8Block1x128;
  static constexpr std::string_view kName = "fp8_1x128";
  static constexpr std::string_view kDescription = "E4M3, F32 scale per 128 columns";
  static constexpr ScaleLayoutId kDefaultLayout = ScaleLayoutId::kMnMajor;
};

struct Fp8Block128x128 : Fp8Block<128, 128> {
  static constexpr FormatId kId = FormatId::kFp8Block128x128;
  static constexpr std::string_view kName = "fp8_128x128";
  static constexpr std::string_view kDescription = "E4M3, F32 scale per 128 rows x 128 columns";
  static constexpr ScaleLayoutId kDefaultLayout = ScaleLayoutId::kLinear;
};

// Block extents of 0 mean "all rows" and "all columns".
struct Fp8Tensor : Fp8Block<0, 0> {
  static constexpr FormatId kId = FormatId::kFp8Tensor;
  static constexpr std::string_view kName = "fp8_tensor";
  static constexpr std::string_view kDescription = "E4M3, one F32 scale";
  static constexpr ScaleLayoutId kDefaultLayout = ScaleLayoutId::kLinear;

  // The scale of a given decode scale D > 0 (spec 6.9). The clamp keeps a tiny D from making NaN of
  // zeros.
  NF_HOST_DEVICE static BlockScale<Stored> given_scale(float decode_scale) {
    return {decode_scale, min_number(div_rn(1.0F, decode_scale), kFloatMax)};
  }
};

}  // namespace narrowfloat
