// Construction and description of tensor views.
#include <algorithm>
#include <span>

#include <fmt/ranges.h>

#include "base/int_math.h"
#include "base/throw_error.h"
#include "narrowfloat/tensor.h"

namespace narrowfloat {

std::string to_string(Device device) {
  return device.type == DeviceType::kCpu ? "cpu" : fmt::format("cuda:{}", device.index);
}

TensorView TensorView::contiguous(const void* data, DType dtype,
                                  std::initializer_list<int64_t> shape, Device device) {
  if (shape.size() > static_cast<size_t>(kMaxRank)) {
    throw_invalid("shape: expected at most {} extents, got {}", kMaxRank, shape.size());
  }
  TensorView view;
  // The one place where an input loses its const; operations never write through their inputs.
  view.data = const_cast<void*>(data);
  view.dtype = dtype;
  view.device = device;
  view.rank = static_cast<int>(shape.size());
  size_t axis = 0;
  for (const int64_t extent : shape) {
    if (extent < 0) throw_invalid("shape: expected extents >= 0, got {}", extent);
    view.shape[axis++] = extent;
  }
  int64_t stride = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    view.strides[i] = stride;
    // An empty tensor may have huge other extents; its strides are never used.
    stride = checked_mul(stride, view.shape[i]).value_or(0);
  }
  return view;
}

int64_t TensorView::num_elements() const {
  if (rank < 0 || rank > kMaxRank) {
    throw_invalid("rank: expected 0 to {}, got {}", kMaxRank, rank);
  }
  int64_t count = 1;
  const auto extents = std::span(shape).first(static_cast<size_t>(rank));
  for (const int64_t extent : extents) {
    if (extent == 0) return 0;
  }
  for (const int64_t extent : extents) {
    const auto product = checked_mul(count, extent);
    if (!product) throw_invalid("shape: {} has more than 2^63 elements", to_string(*this));
    count = *product;
  }
  return count;
}

std::string to_string(const TensorView& view) {
  // Messages also describe views with a wrong rank.
  const int rank = std::clamp(view.rank, 0, TensorView::kMaxRank);
  const auto extents = std::span(view.shape).first(static_cast<size_t>(rank));
  return fmt::format("{}[{}]", name(view.dtype), fmt::join(extents, ", "));
}

}  // namespace narrowfloat
