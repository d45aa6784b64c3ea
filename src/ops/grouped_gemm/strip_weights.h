// The packed weights of cpu_baseline: strips of 16 weight rows, so that the lanes of a vector are
// rows and a dot product runs along k in every lane by itself.
//
//   codes   [experts][rows / 16][cols][16]; 4-bit codes stay packed: 8 bytes per k, byte j holds
//           rows 2j (low nibble) and 2j + 1
//           Beside rows in int8 (int8_rows.h) a step of 8 columns is [16 rows][4] bytes, byte j of
//           which holds columns j (low nibble) and j + 4
//   scales  [experts][rows / 16][blocks][16]; the 128x128 grid of kFp8Block is unchanged
//
// The packed weights have as many bytes as the caller's weights and linear scales. Rows keep their
// order.
#pragma once

#include "ops/grouped_gemm/gemm_shape.h"

namespace narrowfloat {

inline constexpr int64_t kStripRows = 16;
// Columns of a step of codes beside rows in int8.
inline constexpr int64_t kQuadStepCols = 8;

class StripWeights {
 public:
  StripWeights(const GemmShape& shape, const uint8_t* weights) : shape_(shape), weights_(weights) {}

  [[nodiscard]] int64_t strips() const { return shape_.rows / kStripRows; }
  // Bytes of the codes of 16 rows at one k.
  [[nodiscard]] int64_t step_bytes() const {
    return kStripRows * code_bits(shape_.weights.dtype) / 8;
  }
  [[nodiscard]] const uint8_t* codes(int64_t expert, int64_t strip, int64_t k) const {
    return weights_ + ((expert * strips() + strip) * shape_.cols + k) * step_bytes();
  }
  // The 16 byte scales of one block column.
  [[nodiscard]] const uint8_t* scales(int64_t expert, int64_t strip, int64_t block) const {
    const int64_t row = (expert * strips() + strip) * shape_.weight_scales.blocks + block;
    return weights_ + shape_.code_bytes() + row * kStripRows;
  }
  // The scale that all rows of a strip share (kFp8Block).
  [[nodiscard]] float grid_scale(int64_t expert, int64_t strip, int64_t block) const {
    const ScaleGrid& grid = shape_.weight_scales;
    const int64_t row = expert * grid.rows + strip * kStripRows / grid.block_rows;
    const auto* scales = reinterpret_cast<const float*>(weights_ + shape_.code_bytes());
    return scales[row * grid.blocks + block];
  }

 private:
  const GemmShape& shape_;
  const uint8_t* weights_;
};

}  // namespace narrowfloat
