// Weight images in host memory, and reading the caller's block scales in any accepted layout.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <new>

#include "ops/grouped_gemm/grouped_gemm_problem.h"
#include "tensor/layouts/linear.h"
#include "tensor/layouts/swizzled_128x4.h"

namespace narrowfloat {

// Not initialised: the threads that fill it touch its pages first.
inline std::shared_ptr<uint8_t> make_host_image(int64_t size_bytes) {
  constexpr std::align_val_t kAlignment{static_cast<size_t>(kGemmAlignment)};
  const auto size = static_cast<size_t>(std::max<int64_t>(1, size_bytes));
  return {static_cast<uint8_t*>(::operator new(size, kAlignment)),
          [](uint8_t* image) { ::operator delete(image, kAlignment); }};
}

// Where the scale of (row, block) of an expert's grid lies: linear or swizzled_128x4, as checked.
inline const uint8_t* scale_address(const ScaleView& scales, int64_t expert, int64_t row,
                                    int64_t block) {
  const ImageExtents extents{scales.rows, scales.blocks};
  const int64_t offset = scales.layout == ScaleLayoutId::kLinear
                             ? LinearLayout::offset(row, block, extents)
                             : Swizzled128x4Layout::offset(row, block, extents);
  const int64_t image = scales.capacity / scales.batch;
  return static_cast<const uint8_t*>(scales.data) + (expert * image + offset) * bytes(scales.type);
}

}  // namespace narrowfloat
