// See row_buffers.h.
#include "layers/moe/row_buffers.h"

#include "base/bad_enumerator.h"
#include "base/int_math.h"

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

RowBuffers row_buffers(RowFormat format, int64_t rows, int64_t cols) {
  RowBuffers buffers;
  buffers.format = format;
  buffers.rows = rows;
  buffers.cols = cols;
  buffers.values_bytes = rows * value_cols(format, cols) * bits(value_dtype(format)) / 8;
  buffers.scales_bytes = rows * scale_blocks(format, cols) * bits(scale_dtype(format)) / 8;
  if (format == RowFormat::kNvfp4PerToken) buffers.row_scale_bytes = rows * 4;
  return buffers;
}

int64_t RowBuffers::bytes() const {
  return round_up(values_bytes, kWorkspaceAlignment) + round_up(scales_bytes, kWorkspaceAlignment) +
         round_up(row_scale_bytes, kWorkspaceAlignment);
}

CodedRows RowBuffers::bind(std::byte* buffer, int64_t used, Device device) const {
  CodedRows view;
  view.values =
      TensorView::contiguous(buffer, value_dtype(format), {used, value_cols(format, cols)}, device);
  buffer += round_up(values_bytes, kWorkspaceAlignment);
  if (const int64_t blocks = scale_blocks(format, cols); blocks > 0) {
    view.scales = TensorView::contiguous(buffer, scale_dtype(format), {used, blocks}, device);
  }
  buffer += round_up(scales_bytes, kWorkspaceAlignment);
  if (row_scale_bytes > 0) {
    view.row_scale = TensorView::contiguous(buffer, DType::kF32, {used}, device);
  }
  return view;
}

}  // namespace narrowfloat
