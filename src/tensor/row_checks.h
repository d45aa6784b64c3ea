// Checks of the activation rows (CodedRows) that operations take; see view_checks.h. Nothing here
// allocates if the check passes.
#pragma once

#include <string_view>

#include "narrowfloat/moe_types.h"

namespace narrowfloat {

// The names of the views of a CodedRows in messages.
struct RowNames {
  std::string_view values;
  std::string_view scales;
  std::string_view row_scale;
};

// The requirements on a CodedRows.
struct RowShape {
  RowFormat format = RowFormat::kBf16;
  int64_t rows = 0;
  int64_t cols = 0;
  Device device;
  bool reads_scale_strides = true;  // False where the caller takes the strides from elsewhere.
  bool is_written = false;          // If true, no two scales may share a place.
};

// Requires that values, scales and row scales have the format's types and the shape's extents, and
// are absent where the format has none.
void require_quantized_rows(const RowNames& names, const CodedRows& view, const RowShape& shape);
// Requires the same of the scales alone.
void require_row_scales(std::string_view argument, const TensorView& scales, const RowShape& shape);

}  // namespace narrowfloat
