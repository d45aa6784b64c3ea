// See kv_checks.h.
#include "ops/kv_cache/kv_checks.h"

#include <cmath>

#include <fmt/ranges.h>

#include "base/throw_error.h"

namespace narrowfloat {
namespace {

void require_stored(std::string_view argument, const TensorView& view,
                    std::initializer_list<DType> allowed, std::array<int64_t, 4> shape,
                    Device device) {
  require_view(argument, view);
  require_dtype(argument, view, allowed);
  require_device(argument, view.device, device);
  if (view.rank != 4 || view.shape != shape) {
    throw_invalid("{}: expected shape [{}], got {}", argument, fmt::join(shape, ", "),
                  to_string(view));
  }
  require_data(argument, view);
}

// Requires strides with which rows step over themselves and whose last axis is contiguous.
void require_strides(std::string_view argument, const TensorView& view) {
  if (view.num_elements() == 0) return;
  const auto last = static_cast<size_t>(view.rank - 1);
  if (view.shape[last] > 1 && view.strides[last] != 1) {
    throw_invalid("{}: expected stride 1 in the last axis, got {}; make it contiguous", argument,
                  view.strides[last]);
  }
  for (size_t axis = 0; axis < last; ++axis) {
    if (view.shape[axis] > 1 && view.strides[axis] < view.shape[last]) {
      throw_invalid("{}: expected a stride of at least {} on axis {}, got {}", argument,
                    view.shape[last], axis, view.strides[axis]);
    }
  }
}

void require_cuda_steps(std::string_view argument, const TensorView& view, int64_t alignment) {
  if (view.device.type != DeviceType::kCuda || view.num_elements() == 0) return;
  const int64_t width = bits(view.dtype) / 8;
  auto all = reinterpret_cast<uintptr_t>(view.data);
  for (size_t axis = 0; axis + 1 < static_cast<size_t>(view.rank); ++axis) {
    if (view.shape[axis] > 1) all |= static_cast<uintptr_t>(view.strides[axis] * width);
  }
  if (all % static_cast<uintptr_t>(alignment) == 0) return;
  throw_invalid(
      "{}: expected an address and strides of multiples of {} bytes on {}; copy the tensor",
      argument, alignment, to_string(view.device));
}

}  // namespace

void require_math(MathMode math) {
  if (math == MathMode::kExact || math == MathMode::kFast) return;
  throw_invalid("math: expected exact or fast, got {}", static_cast<int>(math));
}

void require_layout(KvLayout layout) {
  if (layout == KvLayout::kNhd || layout == KvLayout::kHnd) return;
  throw_invalid("layout: expected kNhd or kHnd, got {}", static_cast<int>(layout));
}

KvFactor require_scale(std::string_view argument, const KvScale& scale, Device device,
                       float default_value) {
  if (scale.value) {
    if (!scale.tensor.is_absent()) {
      throw_invalid("{}: expected a number or a tensor, got both", argument);
    }
    if (!std::isfinite(*scale.value) || *scale.value <= 0.0F) {
      throw_invalid("{}: expected a finite number above 0, got {}", argument, *scale.value);
    }
    return {.value = *scale.value};
  }
  if (scale.tensor.is_absent()) return {.value = default_value};
  require_vector(argument, scale.tensor, DType::kF32, 1, device);
  return {.device = static_cast<const float*>(scale.tensor.data)};
}

KvShape cache_shape(const PagedKvCache& cache, DType number, Device device) {
  require_layout(cache.layout);
  const TensorView& values = cache.k.values;
  require_view("cache.k.values", values);
  if (values.rank != 4) {
    throw_invalid(
        "cache.k.values: expected four axes (pages, page size and heads, head_dim / 2), got {}",
        to_string(values));
  }
  const bool is_nhd = cache.layout == KvLayout::kNhd;
  const KvShape shape{.number = number,
                      .device = device,
                      .pages = values.shape[0],
                      .page_size = values.shape[is_nhd ? 1 : 2],
                      .heads = values.shape[is_nhd ? 2 : 1]};
  if (shape.page_size < 1 && shape.pages > 0) {
    throw_invalid("cache.k.values: expected a page size of at least 1, got {}", to_string(values));
  }
  return shape;
}

void require_stored_scales(std::string_view argument, const TensorView& scales, Device device) {
  if (scales.rank != 4) {
    throw_invalid("{}: expected four axes (pages, page size and heads, scales), got {}", argument,
                  to_string(scales));
  }
  require_stored(argument, scales, {DType::kF8E4M3, DType::kU8}, scales.shape, device);
  require_strides(argument, scales);
}

KvSteps paged_steps(const TensorView& view, KvLayout layout) {
  const int64_t width = bits(view.dtype) / 8;
  const bool is_nhd = layout == KvLayout::kNhd;
  return {view.strides[0] * width, view.strides[is_nhd ? 1 : 2] * width,
          view.strides[is_nhd ? 2 : 1] * width};
}

KvCodeSteps require_codes(std::string_view argument, const KvCodes& codes, const KvShape& shape,
                          KvLayout layout, int64_t head_dim) {
  const bool is_nhd = layout == KvLayout::kNhd;
  const int64_t second = is_nhd ? shape.page_size : shape.heads;
  const int64_t third = is_nhd ? shape.heads : shape.page_size;
  const std::string values = fmt::format("{}.values", argument);
  require_stored(values, codes.values, {DType::kU8}, {shape.pages, second, third, head_dim / 2},
                 shape.device);
  require_strides(values, codes.values);
  require_cuda_steps(values, codes.values, 8);
  const std::string scales = fmt::format("{}.scales", argument);
  require_stored(scales, codes.scales, {DType::kF8E4M3, DType::kU8},
                 {shape.pages, second, third, head_dim / kKvBlock}, shape.device);
  require_strides(scales, codes.scales);
  return {.values = paged_steps(codes.values, layout), .scales = paged_steps(codes.scales, layout)};
}

std::vector<int64_t> require_numbers(std::string_view argument, const TensorView& view,
                                     std::initializer_list<DType> allowed, Device device) {
  require_view(argument, view);
  require_dtype(argument, view, allowed);
  require_device(argument, view.device, device);
  require_data(argument, view);
  require_strides(argument, view);
  require_cuda_steps(argument, view, kCudaAlignment);
  std::vector<int64_t> steps;
  for (size_t axis = 0; axis + 1 < static_cast<size_t>(view.rank); ++axis) {
    steps.push_back(view.strides[axis] * (bits(view.dtype) / 8));
  }
  return steps;
}

Indices require_indices(std::string_view argument, const TensorView& view, int64_t count,
                        Device device) {
  require_dtype(argument, view, {DType::kI32, DType::kI64});
  require_vector(argument, view, view.dtype, count, device);
  return indices_of(view);
}

int64_t require_head_dim(std::string_view argument, const TensorView& view, int64_t multiple) {
  const int64_t cols = view.rank < 1 ? 0 : view.shape[static_cast<size_t>(view.rank - 1)];
  if (cols % multiple == 0) return cols;
  throw_invalid("{}: expected a multiple of {} in the last axis, got {}", argument, multiple,
                to_string(view));
}

}  // namespace narrowfloat
