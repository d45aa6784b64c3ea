// cpu_baseline's weight image: panels of 16 weight rows, so that the lanes of a vector are rows and
// a dot product runs down k in every lane by itself.
//
//   codes   [experts][rows / 16][cols][16]; 4-bit codes stay packed: 8 bytes a k, byte j holds rows
//           2j (low nibble) and 2j + 1
//   scales  [experts][rows / 16][blocks][16]; the 128x128 grid of kFp8Block as it came
//
// As many bytes as the caller's weights and linear scales. Rows keep their order.
#pragma once

#include "ops/grouped_gemm/gemm_shape.h"

namespace narrowfloat {

inline constexpr int64_t kPanelRows = 16;

class PanelImage {
 public:
  PanelImage(const GemmShape& shape, const uint8_t* image) : shape_(shape), image_(image) {}

  [[nodiscard]] int64_t panels() const { return shape_.rows / kPanelRows; }
  // Codes of 16 rows at one k.
  [[nodiscard]] int64_t step_bytes() const {
    return kPanelRows * code_bits(shape_.weights.dtype) / 8;
  }
  [[nodiscard]] const uint8_t* codes(int64_t expert, int64_t panel, int64_t k) const {
    return image_ + ((expert * panels() + panel) * shape_.cols + k) * step_bytes();
  }
  // 16 byte scales of one block column.
  [[nodiscard]] const uint8_t* scales(int64_t expert, int64_t panel, int64_t block) const {
    const int64_t row = (expert * panels() + panel) * shape_.weight_scales.blocks + block;
    return image_ + shape_.code_bytes() + row * kPanelRows;
  }
  // The scale that all rows of a panel share (kFp8Block).
  [[nodiscard]] float grid_scale(int64_t expert, int64_t panel, int64_t block) const {
    const ScaleGrid& grid = shape_.weight_scales;
    const int64_t row = expert * grid.rows + panel * kPanelRows / grid.block_rows;
    const auto* scales = reinterpret_cast<const float*>(image_ + shape_.code_bytes());
    return scales[row * grid.blocks + block];
  }

 private:
  const GemmShape& shape_;
  const uint8_t* image_;
};

}  // namespace narrowfloat
