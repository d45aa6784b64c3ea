// The source of packed weights (packed_weights.h): the caller's codes and scales in checkpoint
// order, zeros outside, and the powers of two by which weight rows are moved.
#pragma once

#include "device/vector_io.cuh"
#include "ops/grouped_gemm/packed/packed_weights.h"
#include "tensor/layouts/registry.h"

namespace narrowfloat {

inline constexpr int kPrepareThreads = 128;
inline constexpr uint32_t kE4m3Nan = 0x7F;

// 1 where something was found.
struct ExpertFlags {
  int32_t misfits = 0;  // Weights that the encoding cannot have.
  int32_t shifts = 0;   // Rows whose scales were moved.
  int32_t spreads = 0;  // Rows whose scales are too far apart for bf16.
};

struct PrepareParams {
  const uint8_t* codes = nullptr;  // [experts][rows][cols]
  uint8_t* image = nullptr;
  ImageRows rows;
  int64_t cols = 0;
  int64_t blocks = 0;   // n sub-tiles of an expert.
  int64_t k_tiles = 0;  // k tiles of an n sub-tile.
  int64_t num_k_tiles = 0;
  int64_t expert_bytes = 0;  // From an expert's packed weights to the next's.
  // Null without block scales.
  const uint8_t* scales = nullptr;
  ScaleLayoutId layout = ScaleLayoutId::kLinear;
  ScaleExtents scale_extents{0, 0};  // An expert's.
  int64_t scale_image = 0;           // Scales from an expert to the next.
  // UE8M0 scales: subtracted from the bytes of a row of an expert.
  int8_t* row_shifts = nullptr;
  ExpertFlags* flags = nullptr;  // One an expert.
};

// It says where one k tile of packed weights comes from and where it goes.
template <WeightEncoding kEncoding>
class KTileSource {
 public:
  static constexpr int kBits = code_bits_of(kEncoding);
  static constexpr int kKTileCols = k_tile_cols(kEncoding);

  __device__ KTileSource(const PrepareParams& params, int64_t index) : params_(params) {
    const int64_t block = index / params.k_tiles;
    expert_ = block / params.blocks;
    block_ = block - expert_ * params.blocks;
    first_col_ = (index - block * params.k_tiles) * kKTileCols;
    k_tile_ = params.image + expert_ * params.expert_bytes +
              (index - expert_ * params.blocks * params.k_tiles) * k_tile_stride(kEncoding);
  }

  [[nodiscard]] __device__ uint8_t* k_tile() const { return k_tile_; }
  // Row `half` of the thread's two.
  [[nodiscard]] __device__ int64_t row(int half) const {
    const auto thread = static_cast<int>(threadIdx.x);
    return params_.rows.source(block_, thread / 32 * 16 + thread % 32 / 4 * 2 + half);
  }
  // Row `place` of a subtile.
  [[nodiscard]] __device__ int64_t fp8_row(int place) const {
    return params_.rows.source(block_, place / 16 * 16 + place % 8 * 2 + place / 8 % 2);
  }
  // First column of register `index` of the fragment of step `step`.
  [[nodiscard]] __device__ int64_t col(int step, int index) const {
    constexpr int kCols = kKTileCols / 32;  // A register's.
    return first_col_ + 8 * kCols * step + kCols * (threadIdx.x % 4) + 4 * kCols * (index / 2);
  }
  [[nodiscard]] __device__ int64_t first_col() const { return first_col_; }

  // Two codes, the even column in the lower bits; zeros outside.
  [[nodiscard]] __device__ uint32_t load_pair(int64_t row, int64_t col) const {
    if (row >= params_.rows.rows || col >= params_.cols) return 0;
    const int64_t at = (expert_ * params_.rows.rows + row) * params_.cols + col;
    const uint8_t* codes = params_.codes + at * kBits / 8;
    if constexpr (kBits == 4) return *codes;
    if constexpr (kBits == 8) return *reinterpret_cast<const uint16_t*>(codes);
    if constexpr (kBits == 16) return *reinterpret_cast<const uint32_t*>(codes);
  }
  // Four codes likewise.
  [[nodiscard]] __device__ uint32_t load_four(int64_t row, int64_t col) const {
    return load_pair(row, col) | load_pair(row, col + 2) << (2 * kBits);
  }

  // A block scale's byte, or `outside`.
  [[nodiscard]] __device__ uint32_t load_scale(int64_t row, int64_t block, uint32_t outside) const {
    if (row >= params_.scale_extents.rows || block >= params_.scale_extents.blocks) return outside;
    return params_.scales[scale_index(row, block)];
  }
  [[nodiscard]] __device__ int row_shift(int64_t row) const {
    return row < params_.rows.rows ? params_.row_shifts[expert_ * params_.rows.rows + row] : 0;
  }
  [[nodiscard]] __device__ ExpertFlags& flags() const { return params_.flags[expert_]; }
  // The scale of 128 x 128; 1 where there are none.
  [[nodiscard]] __device__ float load_grid_scale() const {
    if (params_.scales == nullptr) return 1.0F;
    const auto* scales = reinterpret_cast<const float*>(params_.scales);
    return scales[scale_index(params_.rows.source(block_, 0) / 128, first_col_ / 128)];
  }

 private:
  [[nodiscard]] __device__ int64_t scale_index(int64_t row, int64_t block) const {
    return expert_ * params_.scale_image +
           AllLayouts::offset(params_.layout, row, block, params_.scale_extents);
  }

  const PrepareParams& params_;
  int64_t expert_;
  int64_t block_;  // Counted in the expert.
  int64_t first_col_;
  uint8_t* k_tile_;
};

// Ends of the exponent range of UE8M0 scales (moe spec 11.2): bf16 has values times 2^(byte - 127)
// exactly and as normal numbers for bytes of 10 to 246 (E4M3) or 2 to 252 (E2M1). Scales of a
// weight row beyond these are moved by a power of two, which the GEMM gives back to the row's sums.
// kMxfp4Near has bytes of 2 to 128, moves what kMxfp4 moves and nothing else, and so gives its
// bits. Weights that become E4M3 are moved for that format's range, nearly all of them.

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
template <WeightEncoding kEncoding>
__device__ inline bool has_values(const KTileSource<kEncoding>& source, int64_t row,
                                  int64_t block) {
  constexpr uint32_t kMagnitudes = code_bits_of(kEncoding) == 4 ? 0x7777U : 0x7F7F7F7FU;
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

// Bytes that an encoding takes as they are.
struct ScaleRange {
  int least;
  int most;
};
NF_HOST_DEVICE constexpr ScaleRange scale_range(WeightEncoding encoding) {
  if (encoding == WeightEncoding::kMxfp4Near) return {2, kLargestNearScale};
  return code_bits_of(encoding) == 4 ? ScaleRange{2, 252} : ScaleRange{10, 246};
}

// r of a row whose largest scale times 6 is E4M3's largest with that exponent, 384 * 2^r (moe spec
// 11.2). Scales of blocks of zeros count where all are near each other: then it does not matter.
__device__ inline int find_row_shift(const KTileSource<WeightEncoding::kMxfp4Fp8>& source,
                                     int64_t row, int64_t blocks) {
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
__device__ inline int find_row_shift(const KTileSource<WeightEncoding::kNvfp4Fp8>& source,
                                     int64_t row, int64_t blocks) {
  uint32_t largest = 0;
  for (int64_t block = 0; block < blocks; ++block) {
    const uint32_t magnitude = source.load_scale(row, block, 0) & 0x7FU;
    if (magnitude != kE4m3Nan) largest = max(largest, magnitude);
  }
  const int shift = rounding_exponent(largest);
  if (shift != 0) source.flags().shifts = 1;
  return shift;
}

// Subtracted from the scales of a row; almost always 0.
template <WeightEncoding kEncoding>
__device__ inline int find_row_shift(const KTileSource<kEncoding>& source, int64_t row,
                                     int64_t blocks) {
  constexpr int kLeast = scale_range(kEncoding).least;
  constexpr int kMost = scale_range(kEncoding).most;
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
    if (kEncoding == WeightEncoding::kMxfp4Near && scale > kLargestScale)
      source.flags().misfits = 1;
    if (scale > kLargestScale || !has_values(source, row, block)) continue;
    least = min(least, scale);
    most = max(most, scale);
  }
  const bool is_too_large = kEncoding == WeightEncoding::kMxfp4Near && most > kMost;
  if (is_too_large || most - least > kMost - kLeast) {
    (may_not_fit(kEncoding) ? source.flags().misfits : source.flags().spreads) = 1;
  }
  const int shift = most > kMost ? most - kMost : min(least - kLeast, 0);
  if (shift != 0) source.flags().shifts = 1;
  return shift;
}

}  // namespace narrowfloat
