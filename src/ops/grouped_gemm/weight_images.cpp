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

// Byte scales of the 16 rows of a panel of a source; out is what its first panel gets.
void copy_scales(const GemmShape& shape, const ScaleView& scales, int64_t panel, uint8_t* out) {
  const int64_t panels = shape.rows / kPanelRows;
  const int64_t blocks = shape.weight_scales.blocks;
  out += panel * blocks * kPanelRows;
  for (int64_t block = 0; block < blocks; ++block) {
    for (int64_t row = 0; row < kPanelRows; ++row) {
      *out++ = *scale_address(scales, panel / panels, panel % panels * kPanelRows + row, block);
    }
  }
}

// Where the image has the codes and scales of the experts from `first` on.
struct ImagePlace {
  uint8_t* codes;
  uint8_t* scales;

  ImagePlace(const GemmShape& shape, uint8_t* image, int64_t first)
      : codes(image + first * shape.expert_code_bytes()),
        scales(image + shape.code_bytes() + first * shape.weight_scales.size_bytes()) {}
};

// fill(place, source): of all pieces.
WeightImage make_image(
    const GemmShape& shape, const WeightPieces& pieces,
    FunctionRef<void(const ImagePlace& place, const WeightSource& source)> fill) {
  const auto image = make_host_image(shape.image_bytes());
  for (int64_t first = 0; first < shape.experts; first += pieces.experts) {
    fill(ImagePlace(shape, image.get(), first), pieces.from(first));
  }
  return {.bytes = image, .size_bytes = shape.image_bytes()};
}

}  // namespace

WeightImage make_canonical_image(const GroupedGemmProblem& problem, const WeightPieces& pieces,
                                 Stream /*stream*/) {
  const GemmShape shape(problem);
  return make_image(shape, pieces, [&](const ImagePlace& place, const WeightSource& source) {
    std::memcpy(place.codes, source.values,
                static_cast<size_t>(pieces.experts * shape.expert_code_bytes()));
    uint8_t* out = place.scales;
    const ScaleGrid& grid = shape.weight_scales;
    for (int64_t row = 0; row < pieces.experts * grid.rows; ++row) {
      for (int64_t block = 0; block < grid.blocks; ++block, out += bytes(grid.type)) {
        std::memcpy(out, scale_address(source.scales, row / grid.rows, row % grid.rows, block),
                    static_cast<size_t>(bytes(grid.type)));
      }
    }
  });
}

WeightImage make_panel_image(const GroupedGemmProblem& problem, const WeightPieces& pieces,
                             Stream /*stream*/) {
  const GemmShape shape(problem);
  const ScaleGrid& grid = shape.weight_scales;
  const bool has_byte_scales = grid.is_present() && grid.block_rows == 1;
  return make_image(shape, pieces, [&](const ImagePlace& place, const WeightSource& source) {
    const int64_t panels = pieces.experts * shape.rows / kPanelRows;
    parallel_for(panels, 1, [&](int64_t begin, int64_t end) {
      for (int64_t panel = begin; panel < end; ++panel) {
        copy_codes(shape, source.values, panel, place.codes);
        if (has_byte_scales) copy_scales(shape, source.scales, panel, place.scales);
      }
    });
    if (grid.is_present() && !has_byte_scales) {
      std::memcpy(place.scales, source.scales.data,
                  static_cast<size_t>(pieces.experts * grid.size_bytes()));
    }
  });
}

}  // namespace narrowfloat
