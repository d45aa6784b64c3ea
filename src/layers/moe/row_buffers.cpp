// See row_buffers.h.
#include "layers/moe/row_buffers.h"

#include "base/int_math.h"

namespace narrowfloat {

RowBuffers row_buffers(RowFormat format, int64_t rows, int64_t cols) {
  RowBuffers buffers;
  buffers.format = format;
  buffers.rows = rows;
  buffers.cols = cols;
  buffers.values_bytes = rows * row_bytes(format, cols);
  buffers.scales_bytes = rows * scale_blocks(format, cols) * bits(scale_dtype(format)) / 8;
  if (has_row_scale(format)) buffers.row_scale_bytes = rows * 4;
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
  if (has_row_scale(format)) {
    view.row_scale = TensorView::contiguous(buffer, DType::kF32, {used}, device);
  }
  return view;
}

}  // namespace narrowfloat
