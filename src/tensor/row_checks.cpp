// See row_checks.h.
#include "tensor/row_checks.h"

#include "base/int_math.h"
#include "base/throw_error.h"
#include "tensor/row_format.h"
#include "tensor/view_checks.h"

namespace narrowfloat {
namespace {

void require_matrix(std::string_view argument, const TensorView& view, int64_t rows, int64_t cols) {
  require_view(argument, view);
  if (view.rank != 2 || view.shape[0] != rows || view.shape[1] != cols) {
    throw_invalid("{}: expected [{}, {}], got {}", argument, rows, cols, to_string(view));
  }
}

void require_absent(std::string_view argument, const TensorView& view, RowFormat format) {
  if (!view.is_absent()) throw_invalid("{}: {} has none; leave it unset", argument, name(format));
}

void require_scale_dtype(std::string_view argument, const TensorView& view, RowFormat format) {
  const DType dtype = scale_dtype(format);
  if (dtype == DType::kF32) return require_dtype(argument, view, {dtype});
  require_dtype(argument, view, {dtype, DType::kU8});
}

// True if, in some order, each axis steps over all elements of the axes inside it.
bool are_places_distinct(const TensorView& view) {
  const auto [rows, blocks] = std::pair{view.shape[0], view.shape[1]};
  if (rows <= 1 && blocks <= 1) return true;
  const auto [row, block] = std::pair{view.strides[0], view.strides[1]};
  if (rows <= 1) return block > 0;
  if (blocks <= 1) return row > 0;
  return row > 0 && block > 0 && (row > (blocks - 1) * block || block > (rows - 1) * row);
}

}  // namespace

void require_row_scales(std::string_view argument, const TensorView& scales,
                        const RowShape& shape) {
  const int64_t blocks = scale_blocks(shape.format, shape.cols);
  if (blocks == 0) return require_absent(argument, scales, shape.format);
  require_matrix(argument, scales, shape.rows, blocks);
  require_scale_dtype(argument, scales, shape.format);
  require_device(argument, scales.device, shape.device);
  require_data(argument, scales);
  if (!shape.reads_scale_strides || scales.num_elements() == 0) return;
  const bool may_share = !shape.is_written;
  const bool is_negative = scales.strides[0] < 0 || scales.strides[1] < 0;
  if (is_negative || (!may_share && !are_places_distinct(scales))) {
    throw_invalid("{}: strides {} and {} of {} do not give every scale a place of its own",
                  argument, scales.strides[0], scales.strides[1], to_string(scales));
  }
}

void require_quantized_rows(const RowNames& names, const CodedRows& view, const RowShape& shape) {
  const int64_t multiple = column_multiple(shape.format);
  if (shape.cols % multiple != 0) {
    throw_invalid("{}: {} needs columns in multiples of {}, got {}", names.values,
                  name(shape.format), multiple, shape.cols);
  }
  require_tensor(names.values, view.values, {value_dtype(shape.format)},
                 {shape.rows, value_cols(shape.format, shape.cols)}, shape.device);
  require_row_scales(names.scales, view.scales, shape);
  if (!has_row_scale(shape.format)) {
    return require_absent(names.row_scale, view.row_scale, shape.format);
  }
  require_vector(names.row_scale, view.row_scale, DType::kF32, shape.rows, shape.device);
}

}  // namespace narrowfloat
