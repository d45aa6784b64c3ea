// Ends of the exponent range of UE8M0 scales (moe spec 11.2): bf16 has values times 2^(byte - 127)
// exactly and as normal numbers for bytes of 10 to 246 (E4M3) or 2 to 252 (E2M1). Scales of a
// weight row beyond these are moved by a power of two, which the GEMM gives back to the row's sums.
// kMxfp4Near has bytes of 2 to 128, moves what kMxfp4 moves and nothing else, and so gives its
// bits. Weights that become E4M3 are moved for that format's range, nearly all of them.
#pragma once

#include "ops/grouped_gemm/sm90/unit_source.cuh"

namespace narrowfloat {

inline constexpr uint32_t kUe8m0Nan = 0xFF;
inline constexpr int kLargestScale = 0xFE;
inline constexpr int kLargestNearScale = kLargestScale - kNearScaleOffset;
// Powers of two between scales of a row that E4M3 has 0.5 to 6 times of as normal numbers.
inline constexpr int kMostMxfp4Fp8Spread = 11;

// The least r with 6 * scale <= 448 * 2^r of an E4M3 scale's magnitude; 0 for 0.
__device__ inline int rounding_exponent(uint32_t magnitude) {
  int exponent = magnitude == 0 ? 0 : -16;
  const float scale = E4M3::decode(static_cast<uint8_t>(magnitude));
  while (6.0F * scale > 448.0F * power_of_two(exponent)) ++exponent;
  return exponent;
}

// False where all codes of a block of 32 columns mean zero: its scale does not count unless NaN.
template <WeightCoding kCoding>
__device__ inline bool has_values(const UnitSource<kCoding>& source, int64_t row, int64_t block) {
  constexpr uint32_t kMagnitudes = code_bits_of(kCoding) == 4 ? 0x7777U : 0x7F7F7F7FU;
  uint32_t magnitudes = 0;
  for (int i = 0; i < 32; i += 4) {
    magnitudes |= source.load_four(row, block * 32 + i) & kMagnitudes;
  }
  return magnitudes != 0;
}

// Blocks of zeros may have a scale that the shift moves out of the range of bytes.
__device__ inline uint32_t shifted_scale(uint32_t scale, int shift) {
  if (scale == kUe8m0Nan || shift == 0) return scale;
  return static_cast<uint32_t>(min(max(static_cast<int>(scale) - shift, 0), kLargestScale));
}

// Bytes that a coding takes as they are.
struct ScaleRange {
  int least;
  int most;
};
NF_HOST_DEVICE constexpr ScaleRange scale_range(WeightCoding coding) {
  if (coding == WeightCoding::kMxfp4Near) return {2, kLargestNearScale};
  return code_bits_of(coding) == 4 ? ScaleRange{2, 252} : ScaleRange{10, 246};
}

// r of a row whose largest scale times 6 is E4M3's largest with that exponent, 384 * 2^r (moe spec
// 11.2). Scales of blocks of zeros count where all are near each other: then it does not matter.
__device__ inline int find_row_shift(const UnitSource<WeightCoding::kMxfp4Fp8>& source, int64_t row,
                                     int64_t blocks) {
  int least = kLargestScale;
  int most = 0;
  for (int64_t block = 0; block < blocks; ++block) {
    const auto scale = static_cast<int>(source.load_scale(row, block, 127));
    least = min(least, scale);
    most = max(most, scale);
  }
  if (most - least > kMostMxfp4Fp8Spread || most > kLargestScale) {
    most = 0;
    for (int64_t block = 0; block < blocks; ++block) {
      const auto scale = static_cast<int>(source.load_scale(row, block, 127));
      if (scale <= kLargestScale && has_values(source, row, block)) most = max(most, scale);
    }
    if (most == 0) most = 127;
  }
  if (most <= 6 || most > 246) source.flags().misfits = 1;  // 2^r would be no normal number.
  const int shift = min(max(most, 7), 246) - 6 - 127;
  if (shift != 0) source.flags().shifts = 1;
  return shift;
}

// r of a row: the least with 6 * largest <= 448 * 2^r (moe spec 11.3), 0 if all scales are.
__device__ inline int find_row_shift(const UnitSource<WeightCoding::kNvfp4Fp8>& source, int64_t row,
                                     int64_t blocks) {
  uint32_t largest = 0;
  for (int64_t block = 0; block < blocks; ++block) {
    const uint32_t magnitude = source.load_scale(row, block, 0) & 0x7FU;
    if (magnitude != kE4m3Nan) largest = max(largest, magnitude);
  }
  const int shift = rounding_exponent(largest);
  if (shift != 0) source.flags().shifts = 1;
  return shift;
}

// What is subtracted from the scales of a row, almost always 0.
template <WeightCoding kCoding>
__device__ inline int find_row_shift(const UnitSource<kCoding>& source, int64_t row,
                                     int64_t blocks) {
  constexpr int kLeast = scale_range(kCoding).least;
  constexpr int kMost = scale_range(kCoding).most;
  bool is_inside = true;
  for (int64_t block = 0; block < blocks; ++block) {
    const auto scale = static_cast<int>(source.load_scale(row, block, 127));
    is_inside = is_inside && scale >= kLeast && scale <= kMost;
  }
  if (is_inside) return 0;
  int least = kMost;
  int most = kLeast;
  for (int64_t block = 0; block < blocks; ++block) {
    const auto scale = static_cast<int>(source.load_scale(row, block, 127));
    if (kCoding == WeightCoding::kMxfp4Near && scale > kLargestScale) source.flags().misfits = 1;
    if (scale > kLargestScale || !has_values(source, row, block)) continue;
    least = min(least, scale);
    most = max(most, scale);
  }
  const bool is_too_large = kCoding == WeightCoding::kMxfp4Near && most > kMost;
  if (is_too_large || most - least > kMost - kLeast) {
    (may_not_fit(kCoding) ? source.flags().misfits : source.flags().spreads) = 1;
  }
  const int shift = most > kMost ? most - kMost : min(least - kLeast, 0);
  if (shift != 0) source.flags().shifts = 1;
  return shift;
}

}  // namespace narrowfloat
