// Row groups of FP8 1x128 scales (spec 8.6): groups start at padded rows of one scale buffer.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "narrowfloat/format.h"

namespace narrowfloat {

// The scale row of a row: the row itself without groups, else its group's padded start plus its
// index in the group. row_offsets: [groups + 1], checked.
inline int64_t scale_row(std::span<const int64_t> row_offsets, int64_t row) {
  if (row_offsets.empty()) return row;
  // The last group that starts at or before the row; empty groups share their start with it.
  const auto next = std::upper_bound(row_offsets.begin(), row_offsets.end(), row);
  const int64_t group = next - row_offsets.begin() - 1;
  const int64_t start = row_offsets[static_cast<size_t>(group)];
  return grouped_scale_row(start, group) + row - start;
}

}  // namespace narrowfloat
