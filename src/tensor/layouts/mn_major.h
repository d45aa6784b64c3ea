// mn_major: the scales of one block column are contiguous over the rows, which are padded to 4 (16
// bytes of F32). Hopper's FP8 block-scaled GEMMs load this layout.
#pragma once

#include "tensor/layouts/scale_extents.h"

namespace narrowfloat {

struct MnMajorLayout {
  static constexpr ScaleLayoutId kId = ScaleLayoutId::kMnMajor;
  static constexpr std::string_view kName = "mn_major";
  static constexpr int64_t kRowPadding = 4;

  NF_HOST_DEVICE static constexpr ScaleExtents padded(const ScaleExtents& logical) {
    return {round_up(logical.rows, kRowPadding), logical.blocks};
  }
  NF_HOST_DEVICE static constexpr int64_t offset(int64_t row, int64_t block,
                                                 const ScaleExtents& extents) {
    return block * round_up(extents.rows, kRowPadding) + row;
  }
  NF_HOST_DEVICE static constexpr ScalePlace place(int64_t offset, const ScaleExtents& extents) {
    const int64_t rows = round_up(extents.rows, kRowPadding);
    return {offset % rows, offset / rows};
  }
};

}  // namespace narrowfloat
