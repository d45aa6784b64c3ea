// The division of a matrix into blocks of a format.
#pragma once

#include "base/int_math.h"
#include "narrowfloat/format.h"
#include "tensor/layouts/scale_extents.h"

namespace narrowfloat {

// K must be a multiple of this: the block for FP4 and MX, 16 for FP8, whose last block may be
// partial (spec 9.1).
constexpr int64_t column_multiple(const FormatInfo& info) {
  return info.scale_type == ScaleType::kF32 ? 16 : info.block_cols;
}

// Logical rows and scales per row of the scales of a rows x cols matrix. A block extent of 0 means
// the whole extent; an empty matrix still has one per-tensor scale.
constexpr ScaleExtents scale_extents(const FormatInfo& info, int64_t rows, int64_t cols) {
  if (info.block_rows == 0) return {1, 1};
  return {ceil_div(rows, info.block_rows), ceil_div(cols, info.block_cols)};
}

}  // namespace narrowfloat
