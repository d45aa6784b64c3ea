// The common part of both CPU implementations: the global scale and the block scales of one row.
#pragma once

#include <algorithm>
#include <cstring>

#include "formats/registry.h"
#include "ops/dequantize/dequantize_problem.h"
#include "tensor/grouped_rows.h"
#include "tensor/layouts/registry.h"

namespace narrowfloat {

template <BlockFormat Format>
class RowDecoder {
 public:
  using Stored = typename Format::Stored;

  // row_scales: the row's scales in linear order, if they are there.
  RowDecoder(const DequantizeProblem& problem, const DequantizeArgs& args, int64_t batch,
             int64_t row, const Stored* row_scales = nullptr)
      : problem_(problem),
        args_(args),
        scales_(static_cast<const Stored*>(args.scales.data) +
                batch * (args.scales.capacity / args.scales.batch)),
        row_scales_(row_scales),
        scale_row_(image_row(row)),
        global_scale_(find_global_scale(batch, row)) {}

  [[nodiscard]] float global_scale() const { return global_scale_; }

  // Copies the stored scales of `count` blocks from `first_block`, a multiple of 4, on.
  template <typename Layout>
  void load_scales(int64_t first_block, int64_t count, Stored* out) const {
    if (row_scales_ != nullptr) {
      std::copy_n(row_scales_ + first_block, count, out);
      return;
    }
    const ScaleExtents extents{args_.scales.rows, args_.scales.blocks};
    constexpr bool kIsSwizzled =
        Layout::kId == ScaleLayoutId::kSwizzled128x4 || Layout::kId == ScaleLayoutId::kSwizzled8x4;
    int64_t block = 0;
    if constexpr (Layout::kId == ScaleLayoutId::kLinear) {
      std::copy_n(scales_ + Layout::offset(scale_row_, first_block, extents), count, out);
      return;
    } else if constexpr (kIsSwizzled) {
      // 4 scales of a row are side by side.
      const Stored* quad = scales_ + Layout::offset(scale_row_, first_block, extents);
      constexpr int64_t kTileScales = Layout::kTileRows * Layout::kTileBlocks;
      for (; block + 4 <= count; block += 4, quad += kTileScales) {
        std::memcpy(out + block, quad, 4 * sizeof(Stored));
      }
    }
    for (; block < count; ++block) {
      out[block] = scales_[Layout::offset(scale_row_, first_block + block, extents)];
    }
  }

  // The fp32 factor of a block, scale first (spec 7).
  template <typename Layout>
  [[nodiscard]] float block_factor(int64_t block) const {
    const ScaleExtents extents{args_.scales.rows, args_.scales.blocks};
    const Stored stored = row_scales_ != nullptr
                              ? row_scales_[block]
                              : scales_[Layout::offset(scale_row_, block, extents)];
    if constexpr (Format::kHasGlobalScale) {
      if (problem_.global_scale_divides) return div_rn(E4M3::decode(stored), global_scale_);
    }
    return Format::decode_scale(stored, global_scale_);
  }

 private:
  [[nodiscard]] int64_t image_row(int64_t row) const {
    if constexpr (Format::kBlockRows == 0) return 0;
    if constexpr (Format::kBlockRows > 1) return row / Format::kBlockRows;
    return scale_row(args_.row_offsets, row);
  }

  [[nodiscard]] float find_global_scale(int64_t batch, int64_t row) const {
    switch (problem_.global_axis) {
      case GlobalScaleAxis::kNone:
        return 1.0F;
      case GlobalScaleAxis::kTensor:
        return args_.global_scale[0];
      case GlobalScaleAxis::kRow:
        return args_.global_scale[row];
      case GlobalScaleAxis::kBatchRow:
        return args_.global_scale[batch * problem_.rows + row];
      case GlobalScaleAxis::kBatch:
        return args_.global_scale[batch];
    }
    return 1.0F;
  }

  const DequantizeProblem& problem_;
  const DequantizeArgs& args_;
  const Stored* scales_;
  const Stored* row_scales_;
  int64_t scale_row_;
  float global_scale_;
};

// The code of a column of a row of values.
template <typename Element>
uint8_t code_at(const uint8_t* row, int64_t col) {
  if constexpr (Element::kBits == 4) {
    return static_cast<uint8_t>(col % 2 == 0 ? row[col / 2] & 0xF : row[col / 2] >> 4);
  } else {
    return row[col];
  }
}

}  // namespace narrowfloat
