// The packed weights of cpu_baseline: strips of 16 weight rows, so that the lanes of a vector are
// rows and a dot product runs along k in every lane by itself.
//
//   codes   [strips][cols][16]; 4-bit codes stay packed: 8 bytes per k, byte j holds rows 2j (low
//           nibble) and 2j + 1
//   scales  [strips][blocks][16]; the 128x128 grid of kFp8Block is unchanged
//
// Strips are those of all experts, in the order of StripPlaces (strip_loop.h). Beside rows in int8
// (int8_rows.h) they are in pairs, so that two are read as one stream; without a partner the last
// strip of an expert stands alone, as a pair of one:
//
//   codes   [pairs][cols / 8][2][16][4]; byte j of a row holds columns j (low nibble) and j + 4 of
//           eight
//   scales  [pairs][blocks][2][16]
//
// The packed weights have as many bytes as the caller's weights and linear scales. Rows keep their
// order.
#pragma once

#include <algorithm>

#include "ops/grouped_gemm/gemm_shape.h"
#include "ops/grouped_gemm/strip_loop.h"

namespace narrowfloat {

inline constexpr int64_t kStripRows = 16;
// Strips of a pair, and the columns of a step of its codes and its bytes for each strip.
inline constexpr int64_t kPairStrips = 2;
inline constexpr int64_t kPairStepCols = 8;
inline constexpr int64_t kPairStepBytes = 64;

inline StripPlaces strip_places(const GemmShape& shape) {
  return {shape.experts, shape.rows / kStripRows};
}

// Places of a strip's codes and scales, each from the first ones on, beside rows in int8.
class StripPair {
 public:
  StripPair(const GemmShape& shape, int64_t expert, int64_t strip)
      : index_(strip % kPairStrips),
        count_(std::min(kPairStrips, shape.rows / kStripRows - (strip - index_))),
        first_(strip_places(shape).of(expert, strip - index_)),
        cols_(shape.cols),
        blocks_(shape.weight_scales.blocks) {}

  [[nodiscard]] int64_t count() const { return count_; }
  // k is a multiple of a step's columns.
  [[nodiscard]] int64_t codes(int64_t k) const {
    const int64_t steps = first_ * cols_ / kPairStepCols + k / kPairStepCols * count_ + index_;
    return steps * kPairStepBytes;
  }
  [[nodiscard]] int64_t scales(int64_t block) const {
    return (first_ * blocks_ + block * count_ + index_) * kStripRows;
  }

 private:
  int64_t index_;
  int64_t count_;
  int64_t first_;  // The place of the pair's first strip.
  int64_t cols_;
  int64_t blocks_;
};

class StripWeights {
 public:
  StripWeights(const GemmShape& shape, const uint8_t* weights)
      : shape_(shape), places_(strip_places(shape)), weights_(weights) {}

  [[nodiscard]] int64_t strips() const { return shape_.rows / kStripRows; }
  // Bytes of the codes of 16 rows at one k.
  [[nodiscard]] int64_t step_bytes() const {
    return kStripRows * code_bits(shape_.weights.dtype) / 8;
  }
  [[nodiscard]] const uint8_t* codes(int64_t expert, int64_t strip, int64_t k) const {
    if (shape_.mode.has_int8_rows) {
      return weights_ + StripPair(shape_, expert, strip).codes(k);
    }
    return weights_ + (places_.of(expert, strip) * shape_.cols + k) * step_bytes();
  }
  // The 16 byte scales of one block column.
  [[nodiscard]] const uint8_t* scales(int64_t expert, int64_t strip, int64_t block) const {
    const uint8_t* all = weights_ + shape_.code_bytes();
    if (shape_.mode.has_int8_rows) return all + StripPair(shape_, expert, strip).scales(block);
    const int64_t blocks = shape_.weight_scales.blocks;
    return all + (places_.of(expert, strip) * blocks + block) * kStripRows;
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
  StripPlaces places_;
  const uint8_t* weights_;
};

}  // namespace narrowfloat
