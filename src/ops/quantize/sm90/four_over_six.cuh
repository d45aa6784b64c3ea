// 4-over-6 (spec 6.3) of a block of 16 elements that one thread holds: FourOverSixSearch of
// formats/four_over_six.h with the same bits and about 25 instructions per element.
//
// Rounding an element to the E2M1 grid (device/encode_e2m1.cuh) gives the value its code decodes
// to, so the errors of both candidates come without decoding:
//
//   e = code * scale * factor / divisor - x * target
//
// with constants of the row that cover every kind of error. Errors are taken of magnitudes: the
// sign of x, which its code has too, cancels in |e| and e * e. The sums run in index order with one
// rounding per operation, which is part of the contract. Blocks with NaN, infinities, scale zero or
// products near E2M1's limit take the general formula out of line.
#pragma once

#include "device/encode_block.cuh"
#include "device/encode_e2m1.cuh"
#include "formats/four_over_six.h"

namespace narrowfloat {

// Constants that all blocks of a row share.
struct FourOverSixRow {
  ScalePair pair;
  FourOverSixRules rules;
  float factor;
  float target;
  float divisor;
  float reciprocal;      // RN(1 / divisor)
  bool takes_fast_path;  // The shortcuts below are exact.
};

// `row_amax` is 0 unless scales are per token.
__device__ inline FourOverSixRow four_over_six_row(const FourOverSix& options,
                                                   const ScalePair& pair, float row_amax) {
  FourOverSixRow row{pair, {}, pair.decode, 1.0F, 1.0F, 1.0F, true};
  const float code_range = static_cast<float>(options.e4m3_max) * 6.0F;
  row.rules = {options.error, options.error_math, code_range, row_amax};
  row.takes_fast_path = pair.encode >= 0x1p-100F && pair.encode <= 0x1p100F;
  if (options.error_math == FourOverSixMath::kFast) {
    row.factor = 1.0F;
    row.target = pair.encode;
  } else if (row_amax > 0.0F) {
    row.factor = row_amax;
    row.divisor = code_range;
    row.reciprocal = div_rn(1.0F, code_range);
    row.takes_fast_path &= row_amax >= 0x1p-60F && row_amax <= 0x1p100F;
  }
  return row;
}

struct FourOverSixScale {
  uint8_t stored;
  float prescaled;  // The multiplier times kE2m1Prescale.
  float decoded;    // The scale over kE2m1Prescale.
};

// s6 of the formula; takes_fast_path selects the shortcut.
template <class Math>
__device__ inline float scale_of_six(float amax, float encode, bool takes_fast_path) {
  if constexpr (Math::kMode == MathMode::kFast) {
    return Math::mul(encode, Math::mul(amax, kOneSixth));
  }
  return mul_rn(takes_fast_path ? divide_by_known(amax, 6.0F, kOneSixth) : div_rn(amax, 6.0F),
                encode);
}

// A stored scale of zero gives a multiplier that is out of range, or NaN.
template <class Math>
__device__ inline FourOverSixScale four_over_six_scale(float scale, const ScalePair& pair) {
  const uint8_t stored = Math::template encode<E4M3>(scale);
  const float decoded = Math::template decode<E4M3>(stored);
  const float product = Math::mul(decoded, pair.decode);
  const float multiplier =
      Math::kMode == MathMode::kExact ? newton_reciprocal(product) : Math::rcp(product);
  // The product is not flushed: a least multiplier that became zero would look like that of a zero
  // block.
  return {stored, mul_rn(multiplier, kE2m1Prescale), mul_rn(decoded, 1.0F / kE2m1Prescale)};
}

// A candidate: the sum of its errors so far, and its codes of eight elements without their signs.
struct FourOverSixCandidate {
  float error = 0.0F;
  uint32_t codes = 0;
};

template <class Math, bool kDivides, FourOverSixError kError, class Elements>
__device__ inline void add_eight(const Elements& elements, int first, const FourOverSixScale& scale,
                                 const FourOverSixRow& row, FourOverSixCandidate* candidate) {
  float q[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float x = fabsf(elements[first + i]);
    q[i] = round_to_e2m1_grid(Math::mul(x, scale.prescaled));
    float decoded = Math::mul(Math::mul(q[i], scale.decoded), row.factor);
    if constexpr (kDivides) decoded = divide_by_known(decoded, row.divisor, row.reciprocal);
    const float e = Math::add(decoded, -Math::mul(x, row.target));
    const float term = kError == FourOverSixError::kMae ? fabsf(e) : Math::mul(e, e);
    candidate->error = Math::add(candidate->error, term);
  }
  const uint32_t even = grid_codes(q[0], q[2], q[4], q[6]);
  const uint32_t odd = grid_codes(q[1], q[3], q[5], q[7]);
  candidate->codes = (even >> 2) + (odd << 2);
}

struct FourOverSixCodes {
  Codes<E2M1, FourOverSixBlock::kSize> codes;
  uint8_t stored;
};

template <class Math, bool kDivides, FourOverSixError kError, class Elements>
__device__ inline FourOverSixCodes better_candidate(const Elements& elements,
                                                    const FourOverSixScale& scale_six,
                                                    const FourOverSixScale& scale_four,
                                                    const FourOverSixRow& row) {
  FourOverSixCandidate six[2];
  FourOverSixCandidate four[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (half == 1) {
      six[1].error = six[0].error;
      four[1].error = four[0].error;
    }
    add_eight<Math, kDivides, kError>(elements, 8 * half, scale_six, row, &six[half]);
    add_eight<Math, kDivides, kError>(elements, 8 * half, scale_four, row, &four[half]);
  }
  // Ties keep 6.
  const bool takes_four = four[1].error < six[1].error;
  FourOverSixCodes result;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    result.codes.words[half] =
        (takes_four ? four[half].codes : six[half].codes) | nibble_signs(elements, 8 * half);
  }
  result.stored = takes_four ? scale_four.stored : scale_six.stored;
  return result;
}

// The general formula as a loop: it may be slow, but its registers count for the whole kernel.
template <class Math, class Elements>
__device__ __noinline__ FourOverSixCodes encode_four_over_six_any(Elements elements, float amax,
                                                                  ScalePair pair,
                                                                  FourOverSixRules rules) {
  FourOverSixCodes result{};
  const float scale_six = scale_of_six<Math>(amax, pair.encode, false);
  float least = 0.0F;
#pragma unroll 1
  for (int k = 0; k < 2; ++k) {
    const uint8_t stored =
        Math::template encode<E4M3>(k == 0 ? scale_six : Math::mul(scale_six, 1.5F));
    const float scale = Math::template decode<E4M3>(stored);
    const float multiplier = Nvfp4::multiplier<Math>(stored, pair);
    uint32_t codes[2] = {0, 0};
    float error = 0.0F;
#pragma unroll 1
    for (int i = 0; i < FourOverSixBlock::kSize; ++i) {
      const float x = elements[i];
      const uint8_t code = Nvfp4::encode<Math>(x, multiplier);
      error = Math::add(error, FourOverSixSearch<Math>::error_term(x, code, scale, pair, rules));
      codes[i / 8] |= static_cast<uint32_t>(code) << (i % 8 * 4);
    }
    // Ties and NaN keep 6.
    if (k == 0 || error < least) {
      result = {{{codes[0], codes[1]}}, stored};
      least = error;
    }
  }
  return result;
}

// kDivides: the format's errors may need the division.
template <class Math, bool kDivides, class Elements>
__device__ inline FourOverSixCodes encode_four_over_six(const Elements& elements,
                                                        const FourOverSixRow& row) {
  const float largest = bits_float(elements.max_or_nan());
  const float amax = is_nan(largest) ? block_amax<Nvfp4, 1>(elements, kFullWarp) : largest;
  // Zero blocks drop the sign of their zeros.
  if (Math::flush(amax) == 0.0F) return {};
  const float s6 = scale_of_six<Math>(amax, row.pair.encode, true);
  const FourOverSixScale six = four_over_six_scale<Math>(s6, row.pair);
  const FourOverSixScale four = four_over_six_scale<Math>(Math::mul(s6, 1.5F), row.pair);
  const bool in_range = row.takes_fast_path && largest >= 0x1p-90F &&
                        is_in_e2m1_range<Math>(largest, six.prescaled) &&
                        is_in_e2m1_range<Math>(largest, four.prescaled);
  if (!in_range) {
    return encode_four_over_six_any<Math>(elements, amax, row.pair, row.rules);
  }
  if (row.rules.error == FourOverSixError::kMae) {
    return better_candidate<Math, kDivides, FourOverSixError::kMae>(elements, six, four, row);
  }
  return better_candidate<Math, kDivides, FourOverSixError::kMse>(elements, six, four, row);
}

}  // namespace narrowfloat
