// How the CPU quantizers cut rows for all cores.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/int_math.h"
#include "ops/quantize/quantize_problem.h"
#include "runtime/parallel.h"

namespace narrowfloat {

// The most columns that are widened to fp32 at once.
inline constexpr int64_t kSegmentCols = 2048;
// Tasks of fewer elements are not split further.
inline constexpr int64_t kQuantizeTask = 16384;

// Columns [col, col + count) of a row.
struct RowChunk {
  int64_t row;
  int64_t col;
  int64_t count;
};

// Cuts rows into chunks for all cores. An empty row is one empty chunk, so that it gets its
// statistics.
class RowChunks {
 public:
  RowChunks(const QuantizeProblem& problem, bool needs_whole_rows) : cols_(problem.cols) {
    const bool whole = needs_whole_rows || is_norm(problem.source);
    length_ = whole ? std::max<int64_t>(cols_, 1) : kSegmentCols;
    per_row_ = std::max<int64_t>(1, ceil_div(cols_, length_));
    const int64_t usual = std::max<int64_t>(1, std::min(length_, cols_));
    grain_ = row_grain(kQuantizeTask, usual);
  }

  // Calls body(chunk) for all chunks of `rows` rows, numbered from 0, and done() at the end of each
  // task.
  template <typename Body, typename Done>
  void for_each(int64_t rows, const Body& body, const Done& done) const {
    parallel_for(rows * per_row_, grain_, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) body(chunk(i));
      done();
    });
  }

  // Returns the largest value of body(chunk).
  template <typename Body>
  uint32_t max(int64_t rows, const Body& body) const {
    return parallel_max(rows * per_row_, grain_, [&](int64_t begin, int64_t end) {
      uint32_t largest = 0;
      for (int64_t i = begin; i < end; ++i) largest = std::max(largest, body(chunk(i)));
      return largest;
    });
  }

 private:
  [[nodiscard]] RowChunk chunk(int64_t index) const {
    const int64_t col = index % per_row_ * length_;
    return {index / per_row_, col, std::min(length_, cols_ - col)};
  }

  int64_t cols_;
  int64_t length_;   // Columns per chunk.
  int64_t per_row_;  // Chunks per row.
  int64_t grain_;
};

}  // namespace narrowfloat
