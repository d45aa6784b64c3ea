// The distance of a tensor y from its reference x: the figures of the report (spec checkpoints
// 11.1).
//
// Sums are doubles and their order is fixed: one block per row, its elements in order in eight
// alternating lanes (x86/error_kernels.h), and blocks added pairwise by their number. The figures
// therefore depend on the data alone, not on threads, on the processor or on the number of rows in
// memory at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "layers/x86/error_kernels.h"
#include "narrowfloat/checkpoint.h"

namespace narrowfloat {

// Sums over some elements. Elements that are not finite on either side are counted and omitted.
struct ErrorSums {
  int64_t elements = 0;  // All elements, non-finite ones included.
  int64_t nonfinite = 0;
  int64_t limited = 0;  // Finite elements in a block whose largest value is known.
  int64_t clipped = 0;  // Elements of `limited` with |x| above that value.
  int64_t flushed = 0;  // x != 0 and y == 0.
  double error_squares = 0;
  double x_squares = 0;
  double y_squares = 0;
  double products = 0;
  double max_abs = 0;
  // Index of the first maximum in the tensor, where no other part has a larger one.
  int64_t max_abs_index = 0;
};

// `later` comes after `earlier` in the tensor.
ErrorSums merged(const ErrorSums& earlier, const ErrorSums& later);

ErrorFigures figures_of(const ErrorSums& sums);

// Adds blocks in order as a binary tree over their numbers.
class ErrorAccumulator {
 public:
  void add(const ErrorSums& block);
  [[nodiscard]] ErrorSums total() const;

 private:
  std::vector<ErrorSums> levels_;  // Level i has a block of 2^i where bit i of num_blocks_ is set.
  uint64_t num_blocks_ = 0;
};

// Dense rows of F64, F32, F16 or BF16.
struct FloatRows {
  DType dtype = DType::kF32;
  const std::byte* data = nullptr;
};
bool is_float(DType dtype);
// Widens the elements from number `first` on, exactly.
void widen(const FloatRows& rows, int64_t first, std::span<double> out);

// Largest magnitude that each block of a row can hold: `of_blocks` fills one entry for each block
// from `first_block` on.
struct ClipLimits {
  int64_t block_cols = 1;
  std::function<void(int64_t row, int64_t first_block, std::span<double> limits)> of_blocks;
};

struct RowRange {
  int64_t first = 0;  // Number of the first row in the tensor.
  int64_t count = 0;
  int64_t cols = 0;
};

// nullptr if this processor has none.
const ErrorKernels* fastest_error_kernels();

// Adds the rows of a range, which must follow those added before. `limits`: nullptr if y is not
// quantized. The figures are the same for all `kernels`.
void add_errors(ErrorAccumulator& accumulator, const RowRange& range, const FloatRows& x,
                const FloatRows& y, const ClipLimits* limits,
                const ErrorKernels* kernels = fastest_error_kernels());

// Bytes that add_errors allocates for `rows` rows, of any length.
uint64_t error_buffer_bytes(int64_t rows);

}  // namespace narrowfloat
