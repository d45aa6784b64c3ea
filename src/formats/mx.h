// MXFP4 and MXFP8: 32 elements share a power-of-two scale (UE8M0), OCP Microscaling 1.0.
//
//   value = code * 2^(b - 127)           MXFP4: E2M1, two a byte, 4.25 bits an element
//                                        MXFP8: E4M3, one a byte, 8.25 bits an element
//
// Rule (spec 6.4 to 6.6), a = block maximum, D = largest element (6 or 448):
//   up:     b = least power of two with a <= D * 2^(b - 127): nothing clips
//   floor:  exponent of a, minus that of D; the largest elements may clip
//   even:   as floor after rounding a to the element's mantissa
//   multiplier = 2^(127 - b), exact in fp32 for every byte in `exact`; `fast` flushes the two ends
#pragma once

#include "formats/block_format.h"
#include "formats/math_policy.h"
#include "formats/minifloat.h"
#include "formats/ue8m0.h"

namespace narrowfloat {

template <typename ElementType>
struct MxFormat {
  static constexpr int64_t kBlockRows = 1;
  static constexpr int64_t kBlockCols = 32;
  static constexpr ScaleType kScaleType = ScaleType::kUE8M0;
  static constexpr ScaleLayoutId kDefaultLayout = ScaleLayoutId::kSwizzled128x4;
  static constexpr bool kHasGlobalScale = false;
  static constexpr bool kHasRowScale = false;
  static constexpr bool kAmaxOfNanIsNan = true;
  using Element = ElementType;
  using Stored = uint8_t;

  template <class Math>
  NF_HOST_DEVICE static BlockScale<Stored> block_scale(float amax, const ScalePair& /*pair*/,
                                                       const BlockRules& rules) {
    const uint8_t stored = scale_byte<Math>(amax, rules.mx_rounding);
    return {stored, multiplier<Math>(stored)};
  }

  template <class Math>
  NF_HOST_DEVICE static uint8_t scale_byte(float amax, Ue8m0Rounding rounding) {
    if (rounding != Ue8m0Rounding::kUp) {
      return UE8M0::encode_amax(amax, rounding, Element::kMaxExponent, Element::kMantissaBits);
    }
    // A true division gives the same byte for every maximum (spec 6.6).
    return UE8M0::encode_up(Math::mul(amax, 1.0F / Element::kMaxFinite));
  }

  template <class Math>
  NF_HOST_DEVICE static float multiplier(uint8_t stored) {
    const bool flushed =
        Math::kMode == MathMode::kFast && (stored == 0 || stored == UE8M0::kMaxCode);
    return flushed ? 0.0F : UE8M0::reciprocal(stored);
  }

  NF_HOST_DEVICE static float decode_scale(Stored stored, float /*global_scale*/) {
    return UE8M0::decode(stored);
  }
};

struct Mxfp4 : MxFormat<E2M1> {
  static constexpr FormatId kId = FormatId::kMxfp4;
  static constexpr std::string_view kName = "mxfp4";
  static constexpr std::string_view kDescription = "E2M1, UE8M0 scale per 32 columns";

  template <class Math>
  NF_HOST_DEVICE static float scaled(float x, float multiplier) {
    return Math::mul(x, multiplier);
  }
  template <class Math>
  NF_HOST_DEVICE static uint8_t encode(float x, float multiplier) {
    return Math::template encode<Element>(scaled<Math>(x, multiplier));
  }
};

struct Mxfp8 : MxFormat<E4M3> {
  static constexpr FormatId kId = FormatId::kMxfp8;
  static constexpr std::string_view kName = "mxfp8";
  static constexpr std::string_view kDescription = "E4M3, UE8M0 scale per 32 columns";

  // The clamp of `fast` turns NaN into 448, like the kernels whose bits it reproduces.
  template <class Math>
  NF_HOST_DEVICE static float scaled(float x, float multiplier) {
    const float product = Math::mul(x, multiplier);
    if constexpr (Math::kMode == MathMode::kExact) return product;
    return max_number(min_number(product, E4M3::kMaxFinite), -E4M3::kMaxFinite);
  }
  template <class Math>
  NF_HOST_DEVICE static uint8_t encode(float x, float multiplier) {
    return Math::template encode<Element>(scaled<Math>(x, multiplier));
  }
};

}  // namespace narrowfloat
