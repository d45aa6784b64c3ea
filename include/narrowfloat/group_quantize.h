// 8-bit quantization with one F32 scale for each group of columns (spec 6.9): E4M3, E5M2 or int8.
//
//   A = max(group maximum, eps)     a NaN does not count
//   S = A / max8                    448, 57344 or 127; stored
//   code = x * (1 / S)              scales row by row
//   code = x / S                    scales column by column
//
// with one rounding each; codes saturate. E4M3 and E5M2 round to nearest even, int8 to
// floor(x + 0.5). A NaN becomes the type's NaN, in int8 zero. There is one arithmetic, that of
// exact mode.
#pragma once

#include <cstdint>

#include "narrowfloat/export.h"
#include "narrowfloat/tensor.h"

namespace narrowfloat {

enum class GroupScaleOrder : int {
  kRowMajor = 0,            // [..., cols / group_size]
  kColumnMajor = 1,         // [cols / group_size, rows]; input [rows, cols] only.
  kColumnMajorAligned = 2,  // [cols / group_size, rows rounded up to 4], 0 after the last row.
};

struct GroupQuantizeOptions {
  int64_t group_size = 128;  // Divides the columns.
  float eps = 1e-10F;        // Floor of a group maximum, at least 2^-100.
  GroupScaleOrder scale_order = GroupScaleOrder::kRowMajor;
  // Column-major orders only: S becomes the power of two at or above max(S, 1e-10), still F32.
  bool power_of_two_scales = false;
};

// input: F32, F16 or BF16 [..., cols] of one row stride. values: F8_E4M3, F8_E5M2 or I8 of the same
// shape, dense; its type chooses the code. scales: F32, dense, of the shape that the order gives.
// On CUDA input and values start at 16 bytes, and rows of the input lie multiples of 16 bytes
// apart. Checks come before anything is written (narrowfloat::Error); buffers must not overlap.
NARROWFLOAT_API void quantize_group_8bit(const TensorView& input, const TensorView& values,
                                         const TensorView& scales,
                                         const GroupQuantizeOptions& options = {},
                                         Stream stream = {});

}  // namespace narrowfloat
