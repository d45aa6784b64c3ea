// linear: row-major, no padding.
#pragma once

#include "tensor/layouts/image_extents.h"

namespace narrowfloat {

struct LinearLayout {
  static constexpr ScaleLayoutId kId = ScaleLayoutId::kLinear;
  static constexpr std::string_view kName = "linear";

  NF_HOST_DEVICE static constexpr ImageExtents padded(const ImageExtents& logical) {
    return logical;
  }
  NF_HOST_DEVICE static constexpr int64_t offset(int64_t row, int64_t block,
                                                 const ImageExtents& extents) {
    return row * extents.blocks + block;
  }
};

}  // namespace narrowfloat
