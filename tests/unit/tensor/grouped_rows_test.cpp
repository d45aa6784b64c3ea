// Rows of concatenated groups find their padded scale row (spec 8.6).
#include "tensor/grouped_rows.h"

#include <vector>

#include <gtest/gtest.h>

namespace narrowfloat {
namespace {

// The scale row by the definition: searches for the group that holds the row.
int64_t slow_scale_row(const std::vector<int64_t>& offsets, int64_t row) {
  for (size_t group = 0; group + 1 < offsets.size(); ++group) {
    if (row >= offsets[group] && row < offsets[group + 1]) {
      const int64_t start = (offsets[group] + 31 * static_cast<int64_t>(group)) / 32 * 32;
      return start + row - offsets[group];
    }
  }
  return -1;
}

TEST(ScaleRow, IsTheRowItselfWithoutGroups) {
  EXPECT_EQ(scale_row({}, 0), 0);
  EXPECT_EQ(scale_row({}, 1234567), 1234567);
}

TEST(ScaleRow, FollowsTheGroupThatHoldsTheRow) {
  for (const std::vector<int64_t>& offsets : {std::vector<int64_t>{0, 13},
                                              {0, 0, 1, 13},
                                              {0, 5, 5, 5, 13},
                                              {0, 32, 64, 65, 200},
                                              {0, 0, 0, 7, 7}}) {
    for (int64_t row = 0; row < offsets.back(); ++row) {
      EXPECT_EQ(scale_row(offsets, row), slow_scale_row(offsets, row)) << row;
    }
  }
}

}  // namespace
}  // namespace narrowfloat
