// See weight_images.h.
#include "ops/grouped_gemm/weight_images.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>

#include "ops/grouped_gemm/panel_image.h"
#include "runtime/parallel.h"
#include "tensor/layouts/linear.h"
#include "tensor/layouts/swizzled_128x4.h"

namespace narrowfloat {
namespace {

// Not initialised: the threads that fill it touch its pages first.
std::shared_ptr<uint8_t> make_host_image(int64_t size_bytes) {
  constexpr std::align_val_t kAlignment{static_cast<size_t>(kGemmAlignment)};
  const auto size = static_cast<size_t>(std::max<int64_t>(1, size_bytes));
  return {static_cast<uint8_t*>(::operator new(size, kAlignment)),
          [](uint8_t* image) { ::operator delete(image, kAlignment); }};
}

// Where the scale of (row, block) of an expert's grid lies: linear or swizzled_128x4, as checked.
const uint8_t* scale_address(const ScaleView& scales, int64_t expert, int64_t row, int64_t block) {
  const ImageExtents extents{scales.rows, scales.blocks};
  const int64_t offset = scales.layout == ScaleLayoutId::kLinear
                             ? LinearLayout::offset(row, block, extents)
                             : Swizzled128x4Layout::offset(row, block, extents);
  const int64_t image = scales.capacity / scales.batch;
  return static_cast<const uint8_t*>(scales.data) + (expert * image + offset) * bytes(scales.type);
}

// rows: 16 rows of codes, `stride` bytes apart.
template <typename Code>
void interleave(const uint8_t* rows, int64_t stride, int64_t cols, uint8_t* out) {
  for (int64_t k = 0; k < cols; ++k) {
    for (int64_t row = 0; row < kPanelRows; ++row, out += sizeof(Code)) {
      std::memcpy(out, rows + row * stride + k * static_cast<int64_t>(sizeof(Code)), sizeof(Code));
    }
  }
}

// From two columns a byte to two rows a byte.
void interleave_packed(const uint8_t* rows, int64_t stride, int64_t cols, uint8_t* out) {
  for (int64_t k = 0; k < cols; k += 2) {
    for (int64_t j = 0; j < kPanelRows / 2; ++j) {
      const unsigned low = rows[2 * j * stride + k / 2];
      const unsigned high = rows[(2 * j + 1) * stride + k / 2];
      out[k * kPanelRows / 2 + j] = static_cast<uint8_t>((low & 0xFU) | ((high & 0xFU) << 4));
      out[(k + 1) * kPanelRows / 2 + j] = static_cast<uint8_t>((low >> 4) | (high & 0xF0U));
    }
  }
}

void copy_codes(const GemmShape& shape, const uint8_t* values, int64_t panel, uint8_t* image) {
  const int64_t stride = shape.cols * code_bits(shape.weights.dtype) / 8;
  const uint8_t* rows = values + panel * kPanelRows * stride;
  uint8_t* out = image + panel * kPanelRows * stride;
  if (shape.weights.dtype == DType::kBF16)
    return interleave<uint16_t>(rows, stride, shape.cols, out);
  if (shape.weights.dtype == DType::kF8E4M3)
    return interleave<uint8_t>(rows, stride, shape.cols, out);
  interleave_packed(rows, stride, shape.cols, out);
}

// Byte scales of the 16 rows of a panel; panel counts over all experts.
void copy_scales(const GemmShape& shape, const ScaleView& scales, int64_t panel, uint8_t* image) {
  const int64_t panels = shape.rows / kPanelRows;
  const int64_t blocks = shape.weight_scales.blocks;
  uint8_t* out = image + shape.code_bytes() + panel * blocks * kPanelRows;
  for (int64_t block = 0; block < blocks; ++block) {
    for (int64_t row = 0; row < kPanelRows; ++row) {
      *out++ = *scale_address(scales, panel / panels, panel % panels * kPanelRows + row, block);
    }
  }
}

}  // namespace

WeightImage make_canonical_image(const GroupedGemmProblem& problem, const WeightSource& source,
                                 Stream /*stream*/) {
  const GemmShape shape(problem);
  const auto image = make_host_image(shape.image_bytes());
  std::memcpy(image.get(), source.values, static_cast<size_t>(shape.code_bytes()));
  uint8_t* out = image.get() + shape.code_bytes();
  const ScaleGrid& grid = shape.weight_scales;
  for (int64_t row = 0; row < shape.experts * grid.rows; ++row) {
    for (int64_t block = 0; block < grid.blocks; ++block, out += bytes(grid.type)) {
      std::memcpy(out, scale_address(source.scales, row / grid.rows, row % grid.rows, block),
                  static_cast<size_t>(bytes(grid.type)));
    }
  }
  return {.bytes = image, .size_bytes = shape.image_bytes()};
}

WeightImage make_panel_image(const GroupedGemmProblem& problem, const WeightSource& source,
                             Stream /*stream*/) {
  const GemmShape shape(problem);
  const auto image = make_host_image(shape.image_bytes());
  const bool has_byte_scales =
      shape.weight_scales.is_present() && shape.weight_scales.block_rows == 1;
  parallel_for(shape.experts * shape.rows / kPanelRows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel) {
      copy_codes(shape, source.values, panel, image.get());
      if (has_byte_scales) copy_scales(shape, source.scales, panel, image.get());
    }
  });
  if (shape.weight_scales.is_present() && !has_byte_scales) {
    std::memcpy(image.get() + shape.code_bytes(), source.scales.data,
                static_cast<size_t>(shape.scale_bytes()));
  }
  return {.bytes = image, .size_bytes = shape.image_bytes()};
}

}  // namespace narrowfloat
