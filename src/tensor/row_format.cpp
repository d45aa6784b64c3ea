// See row_format.h.
#include "tensor/row_format.h"

#include "base/bad_enumerator.h"

namespace narrowfloat {

DType value_dtype(RowFormat format) {
  switch (format) {
    case RowFormat::kBf16:
      return DType::kBF16;
    case RowFormat::kFp32:
      return DType::kF32;
    case RowFormat::kFp8Static:
    case RowFormat::kFp8Group:
    case RowFormat::kMxfp8:
    case RowFormat::kFp8Token:
      return DType::kF8E4M3;
    case RowFormat::kNvfp4:
    case RowFormat::kNvfp4PerToken:
      return DType::kU8;
  }
  throw_bad_enumerator("row format", static_cast<int>(format));
}

DType scale_dtype(RowFormat format) {
  if (format == RowFormat::kMxfp8) return DType::kF8E8M0;
  const bool is_nvfp4 = format == RowFormat::kNvfp4 || format == RowFormat::kNvfp4PerToken;
  return is_nvfp4 ? DType::kF8E4M3 : DType::kF32;
}

int64_t value_cols(RowFormat format, int64_t cols) {
  return value_dtype(format) == DType::kU8 ? cols / 2 : cols;
}

int64_t row_bytes(RowFormat format, int64_t cols) {
  return value_cols(format, cols) * bits(value_dtype(format)) / 8;
}

int64_t column_multiple(RowFormat format) {
  if (format == RowFormat::kMxfp8) return 32;
  return value_dtype(format) == DType::kU8 ? 16 : 1;
}

}  // namespace narrowfloat
