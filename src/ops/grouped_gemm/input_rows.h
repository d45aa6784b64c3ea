// Activation rows dequantized to Real in the workspace, once per row of `a` however many experts
// read it: [rows][cols values, then one factor per group where the mode has them, padded to 64
// bytes]. Rows that the mode rounds to int8 are, and factors are those of int8_rows.h.
#pragma once

#include "base/function_ref.h"
#include "ops/grouped_gemm/gemm_shape.h"

namespace narrowfloat {

template <typename Real>
class InputRows {
 public:
  InputRows(const GemmShape& shape, uint8_t* storage)
      : cols_(shape.cols), stride_(row_bytes(shape)), storage_(storage) {}
  // With `stride` bytes from row to row, for other contents.
  InputRows(const GemmShape& shape, uint8_t* storage, int64_t stride)
      : cols_(shape.cols), stride_(stride), storage_(storage) {}

  // Bytes of the columns and factors of one row in the workspace.
  static int64_t row_bytes(const GemmShape& shape) {
    const int64_t factors = shape.mode.row_scale == ScaleUse::kGroup ? shape.groups : 0;
    return round_up((shape.cols + factors) * static_cast<int64_t>(sizeof(Real)), 64);
  }

  [[nodiscard]] Real* values(int64_t row) const {
    return reinterpret_cast<Real*>(storage_ + row * stride_);
  }
  [[nodiscard]] Real* factors(int64_t row) const { return values(row) + cols_; }

 private:
  int64_t cols_;
  int64_t stride_;
  uint8_t* storage_;
};

template <typename Real>
void dequantize_row(const GemmShape& shape, const GemmRows& rows, int64_t row,
                    const InputRows<Real>& out);

// Calls body(row) for the rows that the call reads, on all cores. Where rows are gathered, these
// need not be all, since the experts of a shard read those of their tokens alone. body() writes the
// row's storage: before, its first number says whether the row is read.
template <typename Real>
void for_each_input_row(const GemmShape& shape, const GemmCall& call, const InputRows<Real>& out,
                        FunctionRef<void(int64_t row)> body);

// Dequantizes these rows.
template <typename Real>
void dequantize_input_rows(const GemmShape& shape, const GemmCall& call,
                           const InputRows<Real>& out);

}  // namespace narrowfloat
