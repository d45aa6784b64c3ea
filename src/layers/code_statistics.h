// Counts codes and block scales of quantized weights, range by range, for `check` and `report`.
#pragma once

#include <cstdint>
#include <vector>

#include "layers/quantized_weight.h"
#include "narrowfloat/check.h"

namespace narrowfloat {

class StatisticsCounter {
 public:
  // `rows`, `cols`: of the whole code matrix.
  StatisticsCounter(const ConventionSpec& spec, int64_t rows, int64_t cols);

  // Adds the rows that are in `coded`; ranges come in order and split no block.
  void add(QuantizedWeight& coded);
  [[nodiscard]] CodeStatistics result() const;

 private:
  // Largest magnitude code of each block of a range, 0xFF for one with a NaN.
  [[nodiscard]] std::vector<uint8_t> count_codes(QuantizedWeight& coded);
  void count_scales(QuantizedWeight& coded, const std::vector<uint8_t>& block_maxima);

  const FormatInfo& format_;
  int64_t rows_;
  int64_t cols_;
  int64_t rows_seen_ = 0;
  int64_t last_nonzero_row_ = -1;
  std::vector<uint8_t> is_col_block_used_;  // Index: block of columns.
  CodeStatistics statistics_;
};

// Counts the block scales alone, as QuantizedWeight holds them.
void count_block_scales(ScaleType type, std::span<const std::byte> scales,
                        CodeStatistics& statistics);

// Number of codes, and of scales, that differ between two buffers of one size.
int64_t count_different_codes(const FormatInfo& format, std::span<const std::byte> a,
                              std::span<const std::byte> b);
int64_t count_different_scales(const FormatInfo& format, std::span<const std::byte> a,
                               std::span<const std::byte> b);

}  // namespace narrowfloat
