// See coded_rows.h.
#include "support/coded_rows.h"

#include "tensor/element_io.h"

namespace narrowfloat::testing {
namespace {

DType value_type(RowFormat format) {
  if (format == RowFormat::kBf16) return DType::kBF16;
  if (format == RowFormat::kFp32) return DType::kF32;
  const bool packed = format == RowFormat::kNvfp4 || format == RowFormat::kNvfp4PerToken;
  return packed ? DType::kU8 : DType::kF8E4M3;
}

DType scale_type(RowFormat format) {
  if (format == RowFormat::kFp8Group) return DType::kF32;
  return format == RowFormat::kMxfp8 ? DType::kF8E8M0 : DType::kF8E4M3;
}

}  // namespace

RowsTensor::RowsTensor(RowFormat format, int64_t rows, int64_t cols, const BufferStyle& style,
                       ScaleOrder order) {
  const DType values_dtype = value_type(format);
  const int64_t stored_cols = values_dtype == DType::kU8 ? cols / 2 : cols;
  values = GuardedBuffer(rows * stored_cols * element_bytes(values_dtype), style);
  view.values = TensorView::contiguous(values.data(), values_dtype, {rows, stored_cols});
  const int64_t blocks = scale_blocks(format, cols);
  if (blocks > 0) {
    const DType dtype = scale_type(format);
    scales = GuardedBuffer(rows * blocks * element_bytes(dtype), style);
    view.scales = TensorView::contiguous(scales.data(), dtype, {rows, blocks});
    if (order == ScaleOrder::kBlocksFirst) view.scales.strides = {1, rows};
  }
  if (format == RowFormat::kNvfp4PerToken) {
    row_scale = GuardedBuffer(rows * 4, style);
    view.row_scale = TensorView::contiguous(row_scale.data(), DType::kF32, {rows});
  }
}

std::vector<uint8_t> RowsTensor::bytes() const {
  std::vector<uint8_t> all = values.copy();
  for (const GuardedBuffer* buffer : {&scales, &row_scale}) {
    const std::vector<uint8_t> more = buffer->copy();
    all.insert(all.end(), more.begin(), more.end());
  }
  return all;
}

RowBytes row_bytes_of(const RowsTensor& tensor, int64_t row) {
  const auto append = [](std::vector<uint8_t>& to, const TensorView& view, int64_t index,
                         int64_t count) {
    const auto* first = static_cast<const uint8_t*>(element_pointer(view.data, view.dtype, index));
    to.insert(to.end(), first, first + count * element_bytes(view.dtype));
  };
  RowBytes bytes;
  const CodedRows& view = tensor.view;
  append(bytes.values, view.values, row * view.values.shape[1], view.values.shape[1]);
  if (!view.scales.is_absent()) {
    for (int64_t block = 0; block < view.scales.shape[1]; ++block) {
      append(bytes.scales, view.scales,
             row * view.scales.strides[0] + block * view.scales.strides[1], 1);
    }
  }
  if (!view.row_scale.is_absent()) append(bytes.row_scale, view.row_scale, row, 1);
  return bytes;
}

}  // namespace narrowfloat::testing
