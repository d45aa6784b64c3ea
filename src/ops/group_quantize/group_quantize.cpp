// The public group quantization: checks, selects an implementation, runs it.
#include <array>
#include <cmath>
#include <limits>

#include <fmt/ranges.h>

#include "base/int_math.h"
#include "base/throw_error.h"
#include "ops/group_quantize/group_quantize_problem.h"
#include "runtime/dispatch.h"
#include "tensor/view_checks.h"

namespace narrowfloat {

std::span<const GroupQuantizeImpl> group_quantize_impls() {
  static const std::array kImpls {
#if defined(NARROWFLOAT_CUDA)
    kGroupQuantizeSm90, kGroupQuantizeSm80,
#endif
        kGroupQuantizeCpuBaseline, kGroupQuantizeCpuReference
  };
  return kImpls;
}

std::string to_string(const GroupQuantizeProblem& problem) {
  return fmt::format("{} {}x{} to {} in groups of {} on {}", name(problem.input), problem.rows,
                     problem.cols, name(problem.output), problem.group_size,
                     to_string(problem.device));
}

namespace {

void check_options(const GroupQuantizeOptions& options, int64_t cols) {
  constexpr float kLeastEps = 0x1p-100F;
  if (options.group_size < 1 || cols % options.group_size != 0) {
    throw_invalid("group_size: expected a divisor of the {} columns, got {}", cols,
                  options.group_size);
  }
  if (!std::isfinite(options.eps) || options.eps < kLeastEps) {
    throw_invalid("eps: expected a finite number of at least 2^-100, got {}", options.eps);
  }
  const auto order = static_cast<int>(options.scale_order);
  if (order < 0 || order > static_cast<int>(GroupScaleOrder::kColumnMajorAligned)) {
    throw_invalid("scale_order: expected an order from kRowMajor to kColumnMajorAligned, got {}",
                  order);
  }
  if (options.power_of_two_scales && options.scale_order == GroupScaleOrder::kRowMajor) {
    throw_invalid("power_of_two_scales: expected column-major scales with it, got kRowMajor");
  }
}

// Step from a group to the next in column-major scales.
int64_t padded_rows(GroupScaleOrder order, int64_t rows) {
  if (order != GroupScaleOrder::kColumnMajorAligned) return rows;
  constexpr int64_t kMostRows = std::numeric_limits<int64_t>::max() / 4 * 4;
  if (rows > kMostRows) {
    throw_invalid("input: expected at most {} rows for kColumnMajorAligned, got {}", kMostRows,
                  rows);
  }
  return round_up(rows, 4);
}

void check_scales(const TensorView& scales, const TensorView& input,
                  const GroupQuantizeOptions& options, int64_t rows) {
  const auto last = static_cast<size_t>(input.rank - 1);
  const int64_t groups = input.shape[last] / options.group_size;
  if (options.scale_order != GroupScaleOrder::kRowMajor) {
    if (input.rank != 2) {
      throw_invalid("input: expected [rows, cols] for column-major scales, got {}",
                    to_string(input));
    }
    return require_tensor("scales", scales, {DType::kF32},
                          {groups, padded_rows(options.scale_order, rows)}, input.device);
  }
  TensorView expected = input;
  expected.shape[last] = groups;
  require_view("scales", scales);
  require_dtype("scales", scales, {DType::kF32});
  require_device("scales", scales.device, input.device);
  if (scales.rank != input.rank || scales.shape != expected.shape) {
    throw_invalid("scales: expected shape [{}], got {}",
                  fmt::join(std::span(expected.shape).first(last + 1), ", "), to_string(scales));
  }
  require_dense("scales", scales);
  require_data("scales", scales);
}

}  // namespace

void quantize_group_8bit(const TensorView& input, const TensorView& values,
                         const TensorView& scales, const GroupQuantizeOptions& options,
                         Stream stream) {
  require_dtype("input", input, {DType::kF32, DType::kF16, DType::kBF16});
  require_view("input", input);
  if (input.rank < 1) throw_invalid("input: expected at least one axis, got a scalar");
  const int64_t cols = input.shape[static_cast<size_t>(input.rank - 1)];
  const RowMatrix rows = require_rows("input", input, cols);
  check_options(options, cols);
  // A single row has no following row.
  const int64_t row_bytes = rows.rows > 1 ? rows.stride * (bits(input.dtype) / 8) : 0;
  require_cuda_rows("input", input.data, row_bytes, input.device);
  require_view("values", values);
  require_dtype("values", values, {DType::kF8E4M3, DType::kF8E5M2, DType::kI8});
  require_device("values", values.device, input.device);
  if (values.rank != input.rank || values.shape != input.shape) {
    throw_invalid("values: expected the shape of the input, {}, got {}", to_string(input),
                  to_string(values));
  }
  require_dense("values", values);
  require_data("values", values);
  require_cuda_alignment("values", values.data, values.device);
  check_scales(scales, input, options, rows.rows);
  const std::array outputs{byte_range("values", values), byte_range("scales", scales)};
  const std::array inputs{byte_range("input", input)};
  require_disjoint(outputs, inputs);
  const GroupQuantizeProblem problem{.input = input.dtype,
                                     .output = values.dtype,
                                     .device = input.device,
                                     .rows = rows.rows,
                                     .cols = cols,
                                     .group_size = options.group_size,
                                     .scale_order = options.scale_order,
                                     .power_of_two_scales = options.power_of_two_scales};
  const GroupQuantizeArgs args{.input = input.data,
                               .input_stride = rows.stride,
                               .values = static_cast<uint8_t*>(values.data),
                               .scales = static_cast<float*>(scales.data),
                               .scale_rows = padded_rows(options.scale_order, rows.rows),
                               .eps = options.eps};
  // Rows without columns may be any number, too many to go over.
  if (cols == 0) return;
  select("group_quantize", group_quantize_impls(), problem).run(problem, args, stream);
}

}  // namespace narrowfloat
