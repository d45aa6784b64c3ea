// The locations of a row's scales: every layout stores scale `block` at
//
//   base + (block >> shift) * stride + (block & mask)
//
// where base, stride and so on are the same for the whole row.
#pragma once

#include "narrowfloat/format.h"
#include "tensor/layouts/registry.h"

namespace narrowfloat {

template <typename Stored>
struct ScaleRow {
  Stored* base;  // Null: there are no scales.
  uint32_t shift;
  uint32_t mask;
  uint32_t stride;

  __device__ Stored* place(uint32_t block) const {
    return base + (size_t{block >> shift} * stride + (block & mask));
  }
};

// `tensor`: scale (0, 0) of a tensor of `extents`, logical. A negative row has no scales.
template <typename Stored>
__device__ inline ScaleRow<Stored> scale_row_of(Stored* tensor, ScaleLayoutId layout,
                                                const ScaleExtents& extents, int64_t row) {
  if (row < 0) return {nullptr, 0, 0, 0};
  switch (layout) {
    case ScaleLayoutId::kMnMajor:
      return {tensor + row, 0, 0, static_cast<uint32_t>(MnMajorLayout::padded(extents).rows)};
    case ScaleLayoutId::kSwizzled128x4:
      return {tensor + Swizzled128x4Layout::offset(row, 0, extents), 2, 3, 512};
    case ScaleLayoutId::kSwizzled8x4:
      return {tensor + Swizzled8x4Layout::offset(row, 0, extents), 2, 3, 32};
    case ScaleLayoutId::kLinear:
      break;
  }
  return {tensor + LinearLayout::offset(row, 0, extents), 2, 3, 4};
}

// Stores a scale, and the zeros that pad the last four blocks of a swizzled row.
template <typename Stored>
__device__ inline void store_scale(const ScaleRow<Stored>& row, uint32_t num_blocks, uint32_t block,
                                   Stored scale) {
  if (row.base == nullptr) return;
  Stored* place = row.place(block);
  *place = scale;
  constexpr uint32_t kLinearStride = 4;
  if (block + 1 == num_blocks && row.mask != 0 && row.stride != kLinearStride) {
#pragma unroll 1
    for (uint32_t pad = 1; (block + pad) % 4 != 0; ++pad) place[pad] = Stored{0};
  }
}

}  // namespace narrowfloat
