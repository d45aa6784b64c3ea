// See rows_tensor.h.
#include "support/rows_tensor.h"

#include "tensor/element_io.h"
#include "tensor/row_format.h"

namespace narrowfloat::testing {
RowsTensor::RowsTensor(RowFormat format, int64_t rows, int64_t cols, const BufferStyle& style,
                       ScaleOrder order) {
  values = GuardedBuffer(rows * row_bytes(format, cols), style);
  view.values =
      TensorView::contiguous(values.data(), value_dtype(format), {rows, value_cols(format, cols)});
  const int64_t blocks = scale_blocks(format, cols);
  if (blocks > 0) {
    const DType dtype = scale_dtype(format);
    scales = GuardedBuffer(rows * blocks * element_bytes(dtype), style);
    view.scales = TensorView::contiguous(scales.data(), dtype, {rows, blocks});
    if (order == ScaleOrder::kBlocksFirst) view.scales.strides = {1, rows};
  }
  if (has_row_scale(format)) {
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
