// 4-over-6 (spec 6.3): an NVFP4 block tries the scale that maps its maximum to 6 and the one that
// maps it to 4, and keeps the one whose decoded elements are closer.
//
// The errors are summed in index order with one rounding per operation; another order flips ties.
#pragma once

#include <cstdint>

#include "formats/nvfp4.h"

namespace narrowfloat {

struct FourOverSixRules {
  FourOverSixError error = FourOverSixError::kMae;
  FourOverSixMath error_math = FourOverSixMath::kStrict;
  float code_range = 448.0F * 6.0F;  // e4m3_max * 6
  float row_amax = 0.0F;             // Per token with a nonzero row maximum; else 0.
};

struct FourOverSixBlock {
  static constexpr int kSize = static_cast<int>(Nvfp4::kBlockCols);
  uint8_t stored;
  uint8_t codes[kSize];
};

template <class Math>
struct FourOverSixSearch {
  static constexpr int kSize = FourOverSixBlock::kSize;

  NF_HOST_DEVICE static FourOverSixBlock encode(const float* x, float amax, const ScalePair& pair,
                                                const FourOverSixRules& rules) {
    // Zero blocks drop the sign of their zeros.
    if (Math::flush(amax) == 0.0F) return {};
    const float scale_six = Math::kMode == MathMode::kExact
                                ? mul_rn(div_rn(amax, 6.0F), pair.encode)
                                : Math::mul(pair.encode, Math::mul(amax, kOneSixth));
    const float scale_four = Math::mul(scale_six, 1.5F);
    const FourOverSixBlock six = candidate(x, scale_six, pair);
    const FourOverSixBlock four = candidate(x, scale_four, pair);
    // Ties and NaN keep 6.
    return error(x, four, pair, rules) < error(x, six, pair, rules) ? four : six;
  }

  // An element's term in the error of its block.
  NF_HOST_DEVICE static float error_term(float x, uint8_t code, float scale, const ScalePair& pair,
                                         const FourOverSixRules& rules) {
    const float e = element_error(x, Math::template decode<E2M1>(code), scale, pair, rules);
    return rules.error == FourOverSixError::kMae ? bits_float(float_bits(e) & 0x7FFFFFFFU)
                                                 : Math::mul(e, e);
  }

 private:
  NF_HOST_DEVICE static FourOverSixBlock candidate(const float* x, float scale,
                                                   const ScalePair& pair) {
    FourOverSixBlock block;
    block.stored = Math::template encode<E4M3>(scale);
    const float multiplier = Nvfp4::multiplier<Math>(block.stored, pair);
    for (int i = 0; i < kSize; ++i) block.codes[i] = Nvfp4::encode<Math>(x[i], multiplier);
    return block;
  }

  NF_HOST_DEVICE static float error(const float* x, const FourOverSixBlock& block,
                                    const ScalePair& pair, const FourOverSixRules& rules) {
    const float scale = Math::template decode<E4M3>(block.stored);
    float sum = 0.0F;
    for (int i = 0; i < kSize; ++i) {
      const float term = error_term(x[i], block.codes[i], scale, pair, rules);
      sum = Math::add(sum, term);
    }
    return sum;
  }

  NF_HOST_DEVICE static float element_error(float x, float code, float scale, const ScalePair& pair,
                                            const FourOverSixRules& rules) {
    const float scaled = Math::mul(code, scale);  // Exact: at most 6 significant bits.
    if (rules.error_math == FourOverSixMath::kFast) {
      return Math::add(scaled, -Math::mul(x, pair.encode));
    }
    if (rules.row_amax > 0.0F) {
      return Math::add(Math::div(Math::mul(scaled, rules.row_amax), rules.code_range), -x);
    }
    return Math::add(Math::mul(scaled, pair.decode), -x);
  }
};

}  // namespace narrowfloat
