// Layouts through the public functions: the spot values of spec 8.2 and 8.6, sizes, and refusals.
#include <gtest/gtest.h>

#include "expect_error.h"
#include "layout_ids.h"
#include "narrowfloat/format.h"

namespace narrowfloat {
namespace {

TEST(ScaleOffset, HasTheSpotValuesOfTheDocumentation) {
  const struct {
    int64_t row, block, blocks, linear, swizzled_128x4, swizzled_8x4;
  } rows[] = {{0, 1, 8, 1, 1, 1},
              {1, 0, 8, 8, 16, 4},
              {32, 0, 8, 256, 4, 256},
              {127, 7, 8, 1023, 1023, 1023},
              {128, 0, 8, 1024, 1024, 1024},
              {40, 3, 33, 1323, 135, 1443},
              {5000001, 130, 448, 2240000578, 2239987738, 2240001030}};
  for (const auto& row : rows) {
    const auto offset = [&](ScaleLayoutId layout) {
      return scale_offset(layout, row.row, row.block, row.row + 1, row.blocks);
    };
    EXPECT_EQ(offset(kLinear), row.linear);
    EXPECT_EQ(offset(k128x4), row.swizzled_128x4);
    EXPECT_EQ(offset(k8x4), row.swizzled_8x4);
  }
  EXPECT_EQ(scale_offset(kMnMajor, 16, 55, 17, 56), 1116);
  EXPECT_EQ(scale_offset(kMnMajor, 4, 2, 5, 3), 20);
  EXPECT_EQ(scale_offset(kMnMajor, 4999999, 55, 5000000, 56), 279999999);
}

TEST(ScaleOffset, RefusesPositionsOutsideTheLogicalExtents) {
  expect_invalid("scale offset: (129, 5) is outside the 130 x 5 scales",
                 [] { (void)scale_offset(k128x4, 129, 5, 130, 5); });
  expect_invalid("scale offset: (-1, 0) is outside the 1 x 1 scales",
                 [] { (void)scale_offset(kLinear, -1, 0, 1, 1); });
  expect_invalid("scale offset: (1, 0) is outside the 1 x 1 scales",
                 [] { (void)scale_offset(kLinear, 1, 0, 1, 1); });
  expect_invalid("scale offset: (0, -1) is outside the 1 x 1 scales",
                 [] { (void)scale_offset(kLinear, 0, -1, 1, 1); });
}

TEST(ScaleImageSize, CountsThePadding) {
  EXPECT_EQ(scale_image_size(kLinear, 129, 5), 645);
  EXPECT_EQ(scale_image_size(k128x4, 129, 5), 256 * 8);
  EXPECT_EQ(scale_image_size(k8x4, 129, 5), 136 * 8);
  EXPECT_EQ(scale_image_size(kMnMajor, 129, 5), 132 * 5);
  for (const ScaleLayoutId layout : {kLinear, k128x4, k8x4, kMnMajor}) {
    EXPECT_EQ(scale_image_size(layout, 0, 5), 0);
    EXPECT_EQ(scale_image_size(layout, 5, 0), 0);
  }
}

TEST(ScaleImageSize, RefusesNegativeAndTooLargeExtents) {
  expect_invalid("scales: expected rows and blocks >= 0, got -1 x 2",
                 [] { (void)scale_image_size(kLinear, -1, 2); });
  for (const ScaleLayoutId layout : {kLinear, k128x4, k8x4, kMnMajor}) {
    EXPECT_THROW((void)scale_image_size(layout, INT64_MAX, 1), Error);
    EXPECT_THROW((void)scale_image_size(layout, int64_t{1} << 40, int64_t{1} << 40), Error);
  }
  EXPECT_THROW((void)scale_image_size(static_cast<ScaleLayoutId>(9), 1, 1), Error);
}

TEST(GroupedScaleRow, HasTheValuesOfTheDocumentation) {
  EXPECT_EQ(grouped_scale_row(1, 1), 32);
  EXPECT_EQ(grouped_scale_row(33, 2), 64);
  EXPECT_EQ(grouped_scale_row(100, 3), 192);
  EXPECT_EQ(grouped_scale_row(4096, 8), 4320);
  EXPECT_EQ(grouped_scale_row(0, 0), 0);
}

// Groups never overlap: the padded start plus the rows of a group stay before the next start.
TEST(GroupedScaleRow, LeavesRoomForEveryGroup) {
  for (int64_t size = 0; size <= 70; ++size) {
    int64_t offset = 0;
    for (int64_t group = 0; group < 20; ++group) {
      const int64_t start = grouped_scale_row(offset, group);
      const int64_t rows = group % 3 == 1 ? 0 : size;
      EXPECT_EQ(start % 32, 0);
      ASSERT_LE(start + rows, grouped_scale_row(offset + rows, group + 1));
      offset += rows;
    }
  }
}

TEST(ScaleTypeBytes, AreOneOrFour) {
  EXPECT_EQ(bytes(ScaleType::kE4M3), 1);
  EXPECT_EQ(bytes(ScaleType::kUE8M0), 1);
  EXPECT_EQ(bytes(ScaleType::kF32), 4);
}

}  // namespace
}  // namespace narrowfloat
