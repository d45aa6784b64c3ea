// NVFP4: 16 elements of E2M1 share an E4M3 scale; a tensor (or a row) has an fp32 global scale that
// moves the block scales into E4M3's range.
//
//   value  = code * scale * global_scale                      range per block: 6 * 448 = 2688
//   codes    two a byte, even column in the low nibble          4 bits
//   scales   one E4M3 byte for 16 columns of a row              0.5 bits
//
// Rule (spec 6.1), a = block maximum, (g, d) = encode and decode factor of the tensor or row:
//   exact:  scale = E4M3(a * RN(g / 6)),   multiplier = 1 / (scale * d) clamped to FLT_MAX
//   fast:   scale = E4M3(g * (a / 6)),     multiplier = rcp(scale * d)
// The association of the scale product differs between the modes and shows in the bytes.
#pragma once

#include "formats/block_format.h"
#include "formats/math_policy.h"
#include "formats/minifloat.h"

namespace narrowfloat {

inline constexpr float kOneSixth = 1.0F / 6.0F;
static_assert(float_bits(kOneSixth) == 0x3E2AAAABU);

struct Nvfp4 {
  static constexpr FormatId kId = FormatId::kNvfp4;
  static constexpr std::string_view kName = "nvfp4";
  static constexpr std::string_view kDescription =
      "E2M1, E4M3 scale per 16 columns, F32 scale per tensor";
  static constexpr int64_t kBlockRows = 1;
  static constexpr int64_t kBlockCols = 16;
  static constexpr ScaleType kScaleType = ScaleType::kE4M3;
  static constexpr ScaleLayoutId kDefaultLayout = ScaleLayoutId::kSwizzled128x4;
  static constexpr bool kHasGlobalScale = true;
  static constexpr bool kHasRowScale = false;
  static constexpr bool kAmaxOfNanIsNan = true;
  using Element = E2M1;
  using Stored = uint8_t;

  template <class Math>
  NF_HOST_DEVICE static ScalePair scale_pair(float encode_scale) {
    return {encode_scale, Math::rcp(encode_scale)};
  }

  template <class Math>
  NF_HOST_DEVICE static BlockScale<Stored> block_scale(float amax, const ScalePair& pair,
                                                       const BlockRules& /*rules*/) {
    if constexpr (Math::kMode == MathMode::kExact) {
      if (amax == 0.0F) return {0, 0.0F};
      const uint8_t stored =
          Math::template encode<E4M3>(mul_rn(amax, mul_rn(pair.encode, kOneSixth)));
      return {stored, multiplier<Math>(stored, pair)};
    } else {
      const uint8_t stored =
          Math::template encode<E4M3>(Math::mul(pair.encode, Math::mul(amax, kOneSixth)));
      return {stored, Math::flush(amax) != 0.0F ? multiplier<Math>(stored, pair) : 0.0F};
    }
  }

  // 1 / (scale * d). A scale that rounded to zero gives FLT_MAX (exact) or infinity (fast): the
  // block decodes to zero whatever its codes are.
  template <class Math>
  NF_HOST_DEVICE static float multiplier(uint8_t stored, const ScalePair& pair) {
    const float reciprocal = Math::rcp(Math::mul(Math::template decode<E4M3>(stored), pair.decode));
    return Math::kMode == MathMode::kExact ? min_number(reciprocal, kFloatMax) : reciprocal;
  }

  // The scaled element that is rounded to a code.
  template <class Math>
  NF_HOST_DEVICE static float scaled(float x, float multiplier) {
    return Math::mul(x, multiplier);
  }
  template <class Math>
  NF_HOST_DEVICE static uint8_t encode(float x, float multiplier) {
    return Math::template encode<Element>(scaled<Math>(x, multiplier));
  }

  // The product takes the scale first, like the producers of checkpoints (spec 7).
  NF_HOST_DEVICE static float decode_scale(Stored stored, float global_scale) {
    return mul_rn(E4M3::decode(stored), global_scale);
  }
};

// NVFP4 with one decode scale per row, computed from the row's own maximum A (spec 6.2). Blocks are
// those of NVFP4 with the row's factors. b is the base decode scale, usually 1 / (448 * 6).
//   exact:  g = RN(1/b) / A, clamped to FLT_MAX;  row scale = 1 / g;   a zero row has row scale 0
//   fast:   row scale d = A * b, and d itself decodes: its reciprocal's reciprocal is never formed
struct Nvfp4PerToken : Nvfp4 {
  static constexpr FormatId kId = FormatId::kNvfp4PerToken;
  static constexpr std::string_view kName = "nvfp4_per_token";
  static constexpr std::string_view kDescription =
      "E2M1, E4M3 scale per 16 columns, F32 scale per row";
  static constexpr bool kHasRowScale = true;

  struct RowScale {
    float stored;
    ScalePair pair;
  };

  template <class Math>
  NF_HOST_DEVICE static RowScale row_scale(float row_amax, float base_decode_scale) {
    if constexpr (Math::kMode == MathMode::kFast) {
      const float decode = Math::mul(row_amax, base_decode_scale);
      return {decode, {Math::rcp(decode), decode}};
    }
    if (row_amax == 0.0F) return {0.0F, {kFloatMax, div_rn(1.0F, kFloatMax)}};
    float encode = min_number(div_rn(div_rn(1.0F, base_decode_scale), row_amax), kFloatMax);
    if (encode == 0.0F) encode = 1.0F;
    const float decode = div_rn(1.0F, encode);
    return {decode, {encode, decode}};
  }
};

}  // namespace narrowfloat
