// See view_checks.h. Every message has the argument, what was expected, what came, and the remedy
// if it is not obvious.
#include "tensor/view_checks.h"

#include <algorithm>
#include <optional>
#include <vector>

#include <fmt/ranges.h>

#include "base/int_math.h"
#include "base/throw_error.h"
#include "tensor/block_math.h"

namespace narrowfloat {

void require_dtype(std::string_view argument, const TensorView& view,
                   std::initializer_list<DType> allowed) {
  if (std::find(allowed.begin(), allowed.end(), view.dtype) != allowed.end()) return;
  std::vector<std::string_view> names;
  for (const DType dtype : allowed) names.push_back(name(dtype));
  throw_invalid("{}: expected dtype {}, got {}; convert it first", argument,
                fmt::join(names, " or "), name(view.dtype));
}

void require_device(std::string_view argument, Device device, Device expected) {
  // A CPU device has no index.
  if (device.type == expected.type &&
      (device.type == DeviceType::kCpu || device.index == expected.index)) {
    return;
  }
  throw_invalid("{}: expected device {} as the input, got {}", argument, to_string(expected),
                to_string(device));
}

void require_view(std::string_view argument, const TensorView& view) {
  if (view.rank < 0 || view.rank > TensorView::kMaxRank) {
    throw_invalid("{}: expected a rank of 0 to {}, got {}", argument, TensorView::kMaxRank,
                  view.rank);
  }
  for (const int64_t extent : std::span(view.shape).first(static_cast<size_t>(view.rank))) {
    if (extent < 0) throw_invalid("{}: expected extents >= 0, got {}", argument, to_string(view));
  }
}

void require_data(std::string_view argument, const TensorView& view) {
  if (view.num_elements() == 0) return;
  if (view.data == nullptr) {
    throw_invalid("{}: data is null for {}", argument, to_string(view));
  }
  const auto alignment = static_cast<uintptr_t>(std::max(1, bits(view.dtype) / 8));
  const auto address = reinterpret_cast<uintptr_t>(view.data);
  if (address % alignment != 0) {
    throw_invalid("{}: expected an address aligned to {} bytes, got {:#x}", argument, alignment,
                  address);
  }
}

void require_cuda_alignment(std::string_view argument, const void* data, Device device) {
  const auto address = reinterpret_cast<uintptr_t>(data);
  if (device.type != DeviceType::kCuda || address % kCudaAlignment == 0) return;
  throw_invalid("{}: expected an address aligned to {} bytes on {}, got {:#x}; copy the tensor",
                argument, kCudaAlignment, to_string(device), address);
}

void require_cuda_rows(std::string_view argument, const void* data, int64_t row_bytes,
                       Device device) {
  require_cuda_alignment(argument, data, device);
  if (device.type != DeviceType::kCuda || row_bytes % kCudaAlignment == 0) return;
  throw_invalid("{}: expected rows a multiple of {} bytes apart on {}, got {}; copy the tensor",
                argument, kCudaAlignment, to_string(device), row_bytes);
}

void require_dense(std::string_view argument, const TensorView& view) {
  int64_t expected = 1;
  for (int axis = view.rank - 1; axis >= 0; --axis) {
    const auto i = static_cast<size_t>(axis);
    if (view.shape[i] != 1 && view.strides[i] != expected && view.num_elements() > 0) {
      throw_invalid("{}: expected a dense row-major tensor, got stride {} on axis {} (dense: {})",
                    argument, view.strides[i], axis, expected);
    }
    expected = checked_mul(expected, view.shape[i]).value_or(0);
  }
}

void require_vector(std::string_view argument, const TensorView& view, DType dtype, int64_t count,
                    Device device) {
  require_view(argument, view);
  require_dtype(argument, view, {dtype});
  require_device(argument, view.device, device);
  if (view.num_elements() != count) {
    throw_invalid("{}: expected {} values, got {}", argument, count, to_string(view));
  }
  require_dense(argument, view);
  require_data(argument, view);
}

void require_tensor(std::string_view argument, const TensorView& view,
                    std::initializer_list<DType> allowed, std::initializer_list<int64_t> shape,
                    Device device) {
  require_view(argument, view);
  require_dtype(argument, view, allowed);
  require_device(argument, view.device, device);
  if (!std::equal(shape.begin(), shape.end(), view.shape.begin(), view.shape.begin() + view.rank)) {
    throw_invalid("{}: expected shape [{}], got {}", argument, fmt::join(shape, ", "),
                  to_string(view));
  }
  require_dense(argument, view);
  require_data(argument, view);
}

RowMatrix require_rows(std::string_view argument, const TensorView& view, int64_t cols) {
  require_view(argument, view);
  if (view.rank < 1) throw_invalid("{}: expected at least one axis, got a scalar", argument);
  const auto last = static_cast<size_t>(view.rank - 1);
  if (view.shape[last] != cols) {
    throw_invalid("{}: expected {} columns in the last axis, got {}", argument, cols,
                  to_string(view));
  }
  require_data(argument, view);
  int64_t rows = 1;
  for (size_t axis = 0; axis < last; ++axis) {
    const auto product = checked_mul(rows, view.shape[axis]);
    if (!product) throw_invalid("{}: more than 2^63 rows", argument);
    rows = *product;
  }
  RowMatrix matrix{.rows = rows, .stride = cols};
  if (rows == 0 || cols == 0) return matrix;
  if (view.strides[last] != 1) {
    throw_invalid("{}: expected stride 1 in the last axis, got {}; make it contiguous", argument,
                  view.strides[last]);
  }
  // The innermost leading axis with more than one entry sets the row stride; outer ones must step
  // over whole multiples of it.
  int64_t expected = 0;
  for (size_t axis = last; axis-- > 0;) {
    if (view.shape[axis] == 1) continue;
    const int64_t stride = view.strides[axis];
    if (expected == 0) {
      matrix.stride = stride;
      if (stride < cols) {
        throw_invalid("{}: expected a row stride of at least {}, got {}", argument, cols, stride);
      }
    } else if (stride != expected) {
      throw_invalid(
          "{}: leading axes do not form rows of one stride: expected {} on axis {}, got {}",
          argument, expected, axis, stride);
    }
    const auto next = checked_mul(stride, view.shape[axis]);
    if (!next) {
      throw_invalid("{}: extents and strides of {} span more than 2^63 elements", argument,
                    to_string(view));
    }
    expected = *next;
  }
  return matrix;
}

BatchedRows require_batched_rows(std::string_view argument, const TensorView& view, int64_t batch,
                                 int64_t rows, int64_t cols) {
  require_view(argument, view);
  // Rows without columns may have any strides, of which none is used.
  const bool has_own_strides = cols > 0 && view.rank == 3 && view.shape[0] == batch &&
                               view.shape[1] == rows && view.shape[2] == cols &&
                               view.strides[2] == 1 && (batch <= 1 || view.strides[0] >= cols) &&
                               (rows <= 1 || view.strides[1] >= cols);
  if (has_own_strides) {
    require_data(argument, view);
    // The stride of an axis of one entry is never used and may be anything: the other axis' stride
    // replaces it.
    const int64_t outer = batch > 1 ? view.strides[0] : cols;
    const int64_t row_stride = rows > 1 ? view.strides[1] : outer;
    return {.batch_stride = batch > 1 ? outer : row_stride, .row_stride = row_stride};
  }
  const RowMatrix matrix = require_rows(argument, view, cols);
  if (matrix.rows != batch * rows) {
    throw_invalid("{}: expected {} rows in all ({} x {} of the output), got {}", argument,
                  batch * rows, batch, rows, to_string(view));
  }
  // It overflows only where there is no second batch.
  const int64_t batch_stride = checked_mul(rows, matrix.stride).value_or(0);
  return {.batch_stride = batch_stride, .row_stride = matrix.stride};
}

ByteRange byte_range(std::string_view argument, const TensorView& view) {
  require_view(argument, view);
  if (view.is_absent() || view.num_elements() == 0) return {argument, nullptr, 0};
  std::optional<int64_t> size = 1;
  for (size_t axis = 0; axis < static_cast<size_t>(view.rank) && size; ++axis) {
    const auto span = checked_mul(view.shape[axis] - 1, view.strides[axis]);
    size = span ? checked_add(*size, *span) : std::nullopt;
  }
  if (size) size = checked_mul(*size, bits(view.dtype));
  if (!size) {
    throw_invalid("{}: extents and strides of {} span more than 2^63 bits", argument,
                  to_string(view));
  }
  return {argument, view.data, *size / 8};
}

ByteRange byte_range(std::string_view argument, const ScaleView& view) {
  return {argument, view.data, view.data == nullptr ? 0 : view.capacity * bytes(view.type)};
}

void require_disjoint(std::span<const ByteRange> outputs, std::span<const ByteRange> inputs) {
  const auto check = [](const ByteRange& a, const ByteRange& b) {
    const auto a_begin = reinterpret_cast<uintptr_t>(a.data);
    const auto b_begin = reinterpret_cast<uintptr_t>(b.data);
    if (a.size_bytes == 0 || b.size_bytes == 0) return;
    if (a_begin < b_begin + static_cast<uintptr_t>(b.size_bytes) &&
        b_begin < a_begin + static_cast<uintptr_t>(a.size_bytes)) {
      throw_invalid("{}: overlaps {} in memory; give it a buffer of its own", a.argument,
                    b.argument);
    }
  };
  for (size_t i = 0; i < outputs.size(); ++i) {
    for (const ByteRange& other : outputs.subspan(i + 1)) check(outputs[i], other);
    for (const ByteRange& input : inputs) check(outputs[i], input);
  }
}

void require_scales(std::string_view argument, const ScaleView& view, FormatId format) {
  const FormatInfo& info = format_info(format);
  if (view.type != info.scale_type) {
    throw_invalid("{}: {} has {} scales, got {}", argument, info.name, name(info.scale_type),
                  name(view.type));
  }
  if (!info.allows(view.layout)) {
    throw_invalid("{}: {} does not allow layout {}; its default is {}", argument, info.name,
                  name(view.layout), name(info.default_layout));
  }
  if (view.batch < 0) throw_invalid("{}: expected batch >= 0, got {}", argument, view.batch);
  const auto size = checked_mul(view.batch, scale_image_size(view.layout, view.rows, view.blocks));
  if (!size || !checked_mul(*size, bytes(view.type))) {
    throw_invalid("{}: more than 2^63 bytes of scales", argument);
  }
  if (view.capacity != *size) {
    throw_invalid(
        "{}: expected a buffer of {} scales ({} x {} x {} in {}, padding included), got {}",
        argument, *size, view.batch, view.rows, view.blocks, name(view.layout), view.capacity);
  }
  if (*size > 0 && view.data == nullptr) throw_invalid("{}: data is null", argument);
  if (reinterpret_cast<uintptr_t>(view.data) % static_cast<uintptr_t>(bytes(view.type)) != 0) {
    throw_invalid("{}: expected an address aligned to {} bytes", argument, bytes(view.type));
  }
}

void require_quantized(std::string_view argument, const QuantizedView& view, int64_t scale_rows) {
  const FormatInfo& info = format_info(view.format);
  const int64_t multiple = column_multiple(info);
  if (view.batch < 0 || view.rows < 0 || view.cols < 0) {
    throw_invalid("{}: expected extents >= 0, got {} x {} x {}", argument, view.batch, view.rows,
                  view.cols);
  }
  if (view.cols % multiple != 0) {
    throw_invalid("{}: {} needs columns in multiples of {}, got {}", argument, info.name, multiple,
                  view.cols);
  }
  const std::string values = fmt::format("{}.values", argument);
  require_view(values, view.values);
  const bool is_packed = info.element_bits == 4;
  require_dtype(values, view.values, {is_packed ? DType::kU8 : DType::kF8E4M3});
  if (view.values.rank < 1) throw_invalid("{}: expected at least one axis", values);
  const int64_t value_cols = view.values.shape[static_cast<size_t>(view.values.rank - 1)];
  const bool is_padded =
      info.id == FormatId::kMxfp8 && value_cols >= view.cols && value_cols % 32 == 0;
  const int64_t expected_cols = is_packed ? view.cols / 2 : is_padded ? value_cols : view.cols;
  const RowMatrix rows = require_rows(values, view.values, expected_cols);
  if (rows.rows != checked_mul(view.batch, view.rows)) {
    throw_invalid("{}: expected {} x {} rows, got {}", values, view.batch, view.rows,
                  to_string(view.values));
  }
  require_dense(values, view.values);
  const std::string scales = fmt::format("{}.scales", argument);
  require_scales(scales, view.scales, view.format);
  const int64_t blocks =
      scale_extents(info, view.rows, is_packed ? view.cols : expected_cols).blocks;
  if (view.scales.batch != view.batch || view.scales.rows != scale_rows ||
      view.scales.blocks != blocks) {
    throw_invalid("{}: expected {} x {} x {} (batch x rows x blocks), got {} x {} x {}", scales,
                  view.batch, scale_rows, blocks, view.scales.batch, view.scales.rows,
                  view.scales.blocks);
  }
  require_device(values, view.values.device, view.scales.device);
}

void require_row_offsets(const TensorView& offsets, int64_t rows, Device device) {
  if (offsets.rank != 1 || offsets.shape[0] < 2) {
    throw_invalid("row_offsets: expected I64 [groups + 1] with at least one group, got {}",
                  to_string(offsets));
  }
  require_vector("row_offsets", offsets, DType::kI64, offsets.shape[0], device);
  // The implementation on the device checks values in device memory.
  if (device.type != DeviceType::kCpu) return;
  const auto* values = static_cast<const int64_t*>(offsets.data);
  const int64_t last = offsets.shape[0] - 1;
  if (values[0] != 0 || values[last] != rows) {
    throw_invalid("row_offsets: expected to run from 0 to {}, got {} to {}", rows, values[0],
                  values[last]);
  }
  for (int64_t i = 0; i < last; ++i) {
    if (values[i + 1] < values[i]) {
      throw_invalid("row_offsets: expected ascending values, got {} before {} at {}", values[i],
                    values[i + 1], i);
    }
  }
}

}  // namespace narrowfloat
