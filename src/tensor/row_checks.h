// Checks of activation rows (CodedRows) at the door of the operations; see view_checks.h. Nothing
// here allocates where the check passes.
#pragma once

#include <string_view>

#include "narrowfloat/moe_types.h"

namespace narrowfloat {

// What the views of a CodedRows are called in messages.
struct RowNames {
  std::string_view values;
  std::string_view scales;
  std::string_view row_scale;
};

// What a CodedRows must be.
struct RowShape {
  RowFormat format = RowFormat::kBf16;
  int64_t rows = 0;
  int64_t cols = 0;
  Device device;
  bool reads_scale_strides = true;  // False where the caller takes the strides from elsewhere.
  bool is_written = false;          // Then no two scales may share a place.
};

// Values, scales and row scales have the format's types and the shape's extents, and are absent
// where the format has none.
void require_coded_rows(const RowNames& names, const CodedRows& view, const RowShape& shape);
// The scales alone.
void require_row_scales(std::string_view argument, const TensorView& scales, const RowShape& shape);

}  // namespace narrowfloat
