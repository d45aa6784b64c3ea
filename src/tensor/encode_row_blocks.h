// Encodes columns of one row in a block format, in exact mode: block after block, with the format's
// own rule. The encoder of activation rows and the epilogue of the all-reduce on the CPU use it.
#pragma once

#include <algorithm>
#include <array>

#include "formats/block_codes.h"
#include "formats/registry.h"

namespace narrowfloat {

// Columns [first, first + count) of a row as fp32. `first` is a multiple of the block.
struct RowColumns {
  const float* x;
  int64_t first;
  int64_t count;
};

// values: column 0 of the row's codes. store_scale(block, stored) is called for each block; the
// last one may be short.
template <BlockFormat Format, class StoreScale>
void encode_row_blocks(const RowColumns& columns, const ScalePair& pair, const BlockRules& rules,
                       uint8_t* values, StoreScale&& store_scale) {
  constexpr int64_t kCols = Format::kBlockCols;
  std::array<uint8_t, kCols> codes;
  for (int64_t done = 0; done < columns.count; done += kCols) {
    const float* x = columns.x + done;
    const int64_t col = columns.first + done;
    const int64_t n = std::min(kCols, columns.count - done);
    const auto scale =
        Format::template block_scale<ExactMath>(block_amax<Format>(x, n), pair, rules);
    store_scale(col / kCols, canonical_scale(scale.stored));
    encode_values<Format, ExactMath>(x, n, scale.multiplier, codes.data());
    pack_codes<typename Format::Element>(codes.data(), col, n, values);
  }
}

}  // namespace narrowfloat
