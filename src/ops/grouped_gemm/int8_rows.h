// Rows of activations as int8 with a scale per 32 columns, which the modes with `has_int8_rows`
// make of bf16 or fp32 rows as they multiply (moe spec 2.1).
//
// Weights are doubled, so that the codes of E2M1 are integers, and scales are halved.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "base/float_ops.h"

namespace narrowfloat {

// Columns that share a scale; a row's last block may be shorter.
inline constexpr int64_t kInt8BlockCols = 32;
inline constexpr float kMostInt8 = 127.0F;
// Smaller magnitudes of a block count as this one, so that no multiplier overflows.
inline constexpr float kLeastInt8Maximum = 0x1p-100F;

// A value of a block is multiplied by `multiplier` and rounded to the nearest integer, ties to
// even; `half_scale` is half the reciprocal. A block with an infinity or a NaN has the multiplier 0
// and the scale NaN.
struct Int8Block {
  float multiplier;
  float half_scale;
};

// values: the `count` of a block.
template <typename Real>
Int8Block int8_block(const Real* values, int64_t count) {
  float largest = kLeastInt8Maximum;
  bool is_finite = true;
  for (int64_t k = 0; k < count; ++k) {
    const float magnitude = std::fabs(static_cast<float>(values[k]));
    is_finite = is_finite && magnitude <= kFloatMax;
    largest = std::max(largest, magnitude);
  }
  if (!is_finite) return {0.0F, std::numeric_limits<float>::quiet_NaN()};
  const float multiplier = div_rn(kMostInt8, largest);
  return {multiplier, mul_rn(0.5F, div_rn(1.0F, multiplier))};
}

// A code: an integer of at most 127 in magnitude. fp32 has no fractions at the size of the sum.
inline float int8_code(float value, const Int8Block& block) {
  if (block.multiplier == 0.0F) return 0.0F;
  constexpr float kMagic = 0x1.8p23F;
  return add_rn(add_rn(mul_rn(value, block.multiplier), kMagic), -kMagic);
}

}  // namespace narrowfloat
