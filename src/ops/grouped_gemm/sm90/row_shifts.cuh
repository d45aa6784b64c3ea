// Ends of the exponent range of UE8M0 scales (moe spec 11.2): bf16 has values times 2^(byte - 127)
// exactly and as normal numbers for bytes of 10 to 246 (E4M3) or 2 to 252 (E2M1). Scales of a
// weight row beyond these are moved by a power of two, which the GEMM gives back to the row's sums.
// kMxfp4Near has bytes of 2 to 128, moves what kMxfp4 moves and nothing else, and so gives its
// bits.
#pragma once

#include "ops/grouped_gemm/sm90/unit_source.cuh"

namespace narrowfloat {

inline constexpr uint32_t kUe8m0Nan = 0xFF;
inline constexpr int kLargestScale = 0xFE;
inline constexpr int kLargestNearScale = kLargestScale - kNearScaleOffset;

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
