// Where a unit of the weight image (weight_units.h) comes from: the caller's codes and scales in
// checkpoint order, zeros outside.
#pragma once

#include "device/vector_io.cuh"
#include "ops/grouped_gemm/sm90/weight_units.h"
#include "tensor/layouts/registry.h"

namespace narrowfloat {

inline constexpr int kPrepareThreads = 128;
inline constexpr uint32_t kE4m3Nan = 0x7F;

// 1 where something was found.
struct ExpertFlags {
  int32_t misfits = 0;  // Weights that the coding cannot have.
  int32_t shifts = 0;   // Rows whose scales were moved.
  int32_t spreads = 0;  // Rows whose scales are too far apart for bf16.
};

struct PrepareParams {
  const uint8_t* codes = nullptr;  // [experts][rows][cols]
  uint8_t* image = nullptr;
  ImageRows rows;
  int64_t cols = 0;
  int64_t blocks = 0;  // Of an expert.
  int64_t units = 0;   // Of a block.
  int64_t num_units = 0;
  int64_t expert_bytes = 0;  // Of the image, from an expert to the next.
  // Null without block scales.
  const uint8_t* scales = nullptr;
  ScaleLayoutId layout = ScaleLayoutId::kLinear;
  ScaleExtents scale_extents{0, 0};  // Of an expert.
  int64_t scale_image = 0;           // Scales from an expert to the next.
  // UE8M0 scales: what is subtracted from the bytes of a row of an expert.
  int8_t* row_shifts = nullptr;
  ExpertFlags* flags = nullptr;  // Of each expert.
};

// Of one unit: where it comes from and goes to.
template <WeightCoding kCoding>
class UnitSource {
 public:
  static constexpr int kBits = code_bits_of(kCoding);
  static constexpr int kUnitCols = unit_cols(kCoding);

  __device__ UnitSource(const PrepareParams& params, int64_t index) : params_(params) {
    const int64_t block = index / params.units;
    expert_ = block / params.blocks;
    block_ = block - expert_ * params.blocks;
    first_col_ = (index - block * params.units) * kUnitCols;
    unit_ = params.image + expert_ * params.expert_bytes +
            (index - expert_ * params.blocks * params.units) * unit_stride(kCoding);
  }

  [[nodiscard]] __device__ uint8_t* unit() const { return unit_; }
  // Row `half` of the thread's two.
  [[nodiscard]] __device__ int64_t row(int half) const {
    const auto thread = static_cast<int>(threadIdx.x);
    return params_.rows.source(block_, thread / 32 * 16 + thread % 32 / 4 * 2 + half);
  }
  // Row `place` of a panel.
  [[nodiscard]] __device__ int64_t panel_row(int place) const {
    return params_.rows.source(block_, place / 16 * 16 + place % 8 * 2 + place / 8 % 2);
  }
  // First column of register `index` of the fragment of step `step`.
  [[nodiscard]] __device__ int64_t col(int step, int index) const {
    constexpr int kCols = kUnitCols / 32;  // Of a register.
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
  int64_t block_;  // Of the expert.
  int64_t first_col_;
  uint8_t* unit_;
};

}  // namespace narrowfloat
