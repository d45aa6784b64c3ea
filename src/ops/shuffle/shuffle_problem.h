// A shuffle of rows or of scales as data (see quantize_problem.h), and the permutation itself.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "base/host_device.h"
#include "narrowfloat/shuffle.h"
#include "runtime/support.h"

namespace narrowfloat {

struct ShuffleProblem {
  bool is_scales = false;   // True: from linear to swizzled scales, or the reverse.
  bool is_inverse = false;  // From shuffled to unshuffled.
  Device device;
  int64_t rows = 0;  // All leading axes; whole groups, for scales whole tiles of 128.
  int64_t row_bytes = 0;
  int64_t group_rows = 0;
};
std::string to_string(const ShuffleProblem& problem);

struct ShuffleArgs {
  const void* input = nullptr;
  int64_t input_row_bytes = 0;  // From a row to the next; scales are dense.
  void* output = nullptr;       // Dense.
};

struct ShuffleImpl {
  std::string_view name;
  Support (*supports)(const ShuffleProblem& problem);
  void (*run)(const ShuffleProblem& problem, const ShuffleArgs& args, Stream stream);
};

// Ordered, fastest first, the oracle last.
std::span<const ShuffleImpl> shuffle_impls();
extern const ShuffleImpl kShuffleCpuReference;
extern const ShuffleImpl kShuffleCpuBaseline;
extern const ShuffleImpl kShuffleSm90;  // Only in builds with CUDA, like the next.
extern const ShuffleImpl kShuffleSm80;

// The destination of a row, and the row at a place of the shuffled matrix (spec 8.7).
// group_rows: 16 or 32.
NF_HOST_DEVICE constexpr int64_t shuffled_row(int64_t row, int64_t group_rows) {
  const int64_t in_group = row & (group_rows - 1);
  const int64_t step = group_rows / 8;
  return row - in_group + (in_group & (step - 1)) * 8 + in_group / step;
}
NF_HOST_DEVICE constexpr int64_t plain_row(int64_t row, int64_t group_rows) {
  const int64_t in_group = row & (group_rows - 1);
  return row - in_group + in_group % 8 * (group_rows / 8) + in_group / 8;
}

}  // namespace narrowfloat
