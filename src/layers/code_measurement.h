// The errors of a weight's codes, measured while it is quantized in ranges of rows.
//
// A range is divided again, so that a wide weight never exists as a whole in fp32. The sums do not
// depend on that: they are by row.
#pragma once

#include <memory>
#include <optional>

#include "layers/error_figures.h"
#include "layers/quantized_weight.h"

namespace narrowfloat {

class CodeMeasurement {
 public:
  // Takes ranges in `coded`, which outlives this, of up to `rows` rows.
  CodeMeasurement(QuantizedWeight& coded, int64_t rows);

  // Adds the range that is in `coded` now; its rows before quantizing are `x`.
  void add(int64_t first, const FloatRows& x);
  [[nodiscard]] ErrorSums total() const { return errors_.total(); }

  static uint64_t buffer_bytes(const ConventionSpec& spec, int64_t rows, int64_t cols);

 private:
  QuantizedWeight& copy_piece(int64_t row, int64_t count);

  QuantizedWeight& coded_;
  int64_t piece_rows_;
  std::optional<QuantizedWeight> piece_;
  size_t decoded_elements_;
  std::unique_ptr<float[]> decoded_;  // NOLINT(modernize-avoid-c-arrays): a vector writes zeros.
  ErrorAccumulator errors_;
};

}  // namespace narrowfloat
