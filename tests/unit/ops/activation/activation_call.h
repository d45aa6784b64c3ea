// A call of activate() with buffers of its own, for tests to change.
#pragma once

#include <numeric>
#include <vector>

#include "narrowfloat/activation.h"
#include "support/rows_tensor.h"
#include "support/tensors.h"

namespace narrowfloat::testing {

inline constexpr BufferStyle kPoisoned{.poison = 0xFF};

inline Vector all_rows(int64_t rows) {
  std::vector<int32_t> map(static_cast<size_t>(rows));
  std::iota(map.begin(), map.end(), 0);
  return Vector::of(DType::kI32, map);
}

inline Matrix random_input(DType dtype, int64_t rows, int64_t cols, uint64_t seed) {
  return Matrix::filled({.dtype = dtype, .rows = rows, .cols = cols}, Fill::kNormalRows, seed);
}

// A call on F32 input [rows, 2 * inter] that works on all rows.
struct ActivationCall {
  Matrix input;
  Vector slot_to_row;
  RowsTensor output;
  ActivateArgs args;

  ActivationCall(RowFormat format, int64_t rows, int64_t inter, uint64_t seed = 1)
      : input(random_input(DType::kF32, rows, 2 * inter, seed)),
        slot_to_row(all_rows(rows)),
        output(format, rows, inter, kPoisoned) {
    args.input.values = input.view();
    args.slot_to_row = slot_to_row.view();
    args.format = format;
    args.output = output.view;
  }
};

}  // namespace narrowfloat::testing
