// linear: row-major, no padding.
#pragma once

#include "tensor/layouts/scale_extents.h"

namespace narrowfloat {

struct LinearLayout {
  static constexpr ScaleLayoutId kId = ScaleLayoutId::kLinear;
  static constexpr std::string_view kName = "linear";

  NF_HOST_DEVICE static constexpr ScaleExtents padded(const ScaleExtents& logical) {
    return logical;
  }
  NF_HOST_DEVICE static constexpr int64_t offset(int64_t row, int64_t block,
                                                 const ScaleExtents& extents) {
    return row * extents.blocks + block;
  }
  // The inverse of offset(), in all layouts. For an offset in the padding the row or block lies
  // beyond the logical ones.
  NF_HOST_DEVICE static constexpr ScalePlace place(int64_t offset, const ScaleExtents& extents) {
    return {offset / extents.blocks, offset % extents.blocks};
  }
};

}  // namespace narrowfloat
