// See kv_case.h.
#include "support/kv_case.h"

#include <limits>

namespace narrowfloat::testing {
namespace {

int64_t product(const std::vector<int64_t>& shape) {
  int64_t count = 1;
  for (const int64_t extent : shape) count *= extent;
  return count;
}

std::vector<int64_t> page_shape(const KvCaseShape& shape, int64_t width) {
  if (shape.layout == KvLayout::kNhd) return {shape.pages, shape.page_size, shape.heads, width};
  return {shape.pages, shape.heads, shape.page_size, width};
}

}  // namespace

KvCaseShape sample_kv_shape(Random& random) {
  KvCaseShape shape{.pages = random.range(0, 6),
                    .page_size = random.pick<int64_t>({1, 3, 4, 16, 64}),
                    .heads = random.range(1, 4),
                    .k_dim = random.pick<int64_t>({16, 48, 64, 128, 256}),
                    .v_dim = random.pick<int64_t>({16, 48, 64, 128, 256}),
                    .layout = random.chance(50) ? KvLayout::kNhd : KvLayout::kHnd,
                    .is_stacked = random.chance(40)};
  if (shape.is_stacked || random.chance(50)) shape.v_dim = shape.k_dim;
  return shape;
}

TensorView strided_view(void* data, DType dtype, const std::vector<int64_t>& shape, int64_t gap) {
  TensorView view{.data = data, .dtype = dtype, .rank = static_cast<int>(shape.size())};
  int64_t stride = 1;
  for (size_t axis = shape.size(); axis-- > 0;) {
    view.shape[axis] = shape[axis];
    view.strides[axis] = stride;
    stride *= shape[axis];
    if (axis + 1 == shape.size()) stride += gap;
  }
  return view;
}

GuardedBuffer& KvTensors::add(int64_t bytes) {
  buffers_.push_back(std::make_unique<GuardedBuffer>(bytes, style_));
  return *buffers_.back();
}

PagedKvCache KvTensors::cache(const KvCaseShape& shape, bool is_random) {
  PagedKvCache cache{.layout = shape.layout};
  const auto halves = [&](DType dtype, int64_t k_width, int64_t v_width, TensorView& k,
                          TensorView& v) {
    const std::vector<int64_t> k_shape = page_shape(shape, k_width);
    const std::vector<int64_t> v_shape = page_shape(shape, v_width);
    GuardedBuffer& first = add(product(k_shape) + (shape.is_stacked ? product(v_shape) : 0));
    k = strided_view(first.data(), dtype, k_shape);
    if (shape.is_stacked) {
      const int64_t page = shape.page_size * shape.heads * k_width;
      v = strided_view(first.data() + (shape.pages > 0 ? page : 0), dtype, v_shape);
      k.strides[0] = v.strides[0] = 2 * page;
    } else {
      v = strided_view(add(product(v_shape)).data(), dtype, v_shape);
    }
  };
  halves(DType::kU8, shape.k_dim / 2, shape.v_dim / 2, cache.k.values, cache.v.values);
  const DType scale_type = random_.chance(50) ? DType::kU8 : DType::kF8E4M3;
  halves(scale_type, shape.k_dim / 16, shape.v_dim / 16, cache.k.scales, cache.v.scales);
  if (is_random) {
    for (const auto& buffer : buffers_) {
      for (uint8_t& byte : buffer->span()) byte = static_cast<uint8_t>(random_.bits());
    }
  }
  cache.k_scale = scale();
  cache.v_scale = scale();
  return cache;
}

TensorView KvTensors::numbers(DType dtype, const std::vector<int64_t>& shape, Fill fill,
                              int64_t gap) {
  const TensorView view = output(dtype, shape, gap);
  fill_elements(fill, dtype, random_, buffers_.back()->size() / (bits(dtype) / 8), view.data);
  return view;
}

TensorView KvTensors::output(DType dtype, const std::vector<int64_t>& shape, int64_t gap) {
  const int64_t cols = shape.back();
  const int64_t rows = cols == 0 ? 0 : product(shape) / cols;
  // The last row has no gap.
  const int64_t count = rows == 0 ? 0 : rows * (cols + gap) - gap;
  return strided_view(add(count * (bits(dtype) / 8)).data(), dtype, shape, gap);
}

TensorView KvTensors::random_bytes(const std::vector<int64_t>& shape) {
  const TensorView view = output(DType::kU8, shape);
  for (uint8_t& byte : buffers_.back()->span()) byte = static_cast<uint8_t>(random_.bits());
  return view;
}

TensorView KvTensors::indices(DType dtype, const std::vector<int64_t>& values,
                              const std::vector<int64_t>& shape) {
  GuardedBuffer& buffer = add(static_cast<int64_t>(values.size()) * (bits(dtype) / 8));
  for (size_t i = 0; i < values.size(); ++i) {
    if (dtype == DType::kI64) {
      buffer.data<int64_t>()[i] = values[i];
    } else {
      buffer.data<int32_t>()[i] = static_cast<int32_t>(values[i]);
    }
  }
  return strided_view(buffer.data(), dtype, shape);
}

KvScale KvTensors::scale() {
  if (random_.chance(10)) return {};
  const float value = random_.pick({1.0F, 0.0036831F, 0x1p-20F, 3.7F, 0x1p60F, 0x1p-60F,
                                    std::numeric_limits<float>::max(), 0x1p-126F});
  if (random_.chance(50)) return value;
  const float any =
      random_.chance(70)
          ? value
          : random_.pick({0.0F, -1.0F, 0x1p-140F, std::numeric_limits<float>::infinity(),
                          std::numeric_limits<float>::quiet_NaN()});
  GuardedBuffer& buffer = add(4);
  *buffer.data<float>() = any;
  return TensorView::contiguous(buffer.data(), DType::kF32, {1});
}

Buffers KvTensors::buffers() const {
  Buffers all;
  for (const auto& buffer : buffers_) all.push_back(buffer.get());
  return all;
}

std::vector<uint8_t> KvTensors::bytes() const {
  std::vector<uint8_t> all;
  for (const auto& buffer : buffers_) {
    const std::vector<uint8_t> one = buffer->copy();
    all.insert(all.end(), one.begin(), one.end());
  }
  return all;
}

bool KvTensors::intact() const {
  for (const auto& buffer : buffers_) {
    if (!buffer->intact()) return false;
  }
  return true;
}

KvCodes on_device(const DeviceCopies& device, const KvCodes& codes) {
  return {device.view(codes.values), device.view(codes.scales)};
}

KvScale on_device(const DeviceCopies& device, const KvScale& scale) {
  KvScale moved = scale;
  moved.tensor = device.view(scale.tensor);
  return moved;
}

PagedKvCache on_device(const DeviceCopies& device, const PagedKvCache& cache) {
  return {.k = on_device(device, cache.k),
          .v = on_device(device, cache.v),
          .layout = cache.layout,
          .k_scale = on_device(device, cache.k_scale),
          .v_scale = on_device(device, cache.v_scale)};
}

KvPositions on_device(const DeviceCopies& device, const KvPositions& positions) {
  return {.batch_indices = device.view(positions.batch_indices),
          .positions = device.view(positions.positions),
          .indices = device.view(positions.indices),
          .indptr = device.view(positions.indptr)};
}

}  // namespace narrowfloat::testing
