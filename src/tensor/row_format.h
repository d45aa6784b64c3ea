// Storage of the formats of activation rows: element types and sizes.
#pragma once

#include "base/host_device.h"
#include "narrowfloat/moe_types.h"

namespace narrowfloat {

// Type of the elements, and of the block scales (F32 for formats without).
DType value_dtype(RowFormat format);
DType scale_dtype(RowFormat format);
// Columns of the values tensor: two elements share a byte in 4-bit formats.
int64_t value_cols(RowFormat format, int64_t cols);
// Bytes of one row of values.
int64_t row_bytes(RowFormat format, int64_t cols);
// Columns of a row must be a multiple of this, so that blocks are whole; 1x128 groups may be short.
int64_t column_multiple(RowFormat format);

// True for formats with a scale per row, from the row's maximum (CodedRows::row_scale).
NF_HOST_DEVICE constexpr bool has_row_scale(RowFormat format) {
  return format == RowFormat::kNvfp4PerToken || format == RowFormat::kFp8Token;
}

// True for formats whose multiplier is fixed before the values are known.
constexpr bool has_static_multiplier(RowFormat format) {
  return format == RowFormat::kFp8Static || format == RowFormat::kNvfp4;
}

}  // namespace narrowfloat
