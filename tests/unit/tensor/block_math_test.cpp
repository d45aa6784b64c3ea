// How formats divide matrices (spec 1.5, 9.1).
#include "tensor/block_math.h"

#include <gtest/gtest.h>

namespace narrowfloat {
namespace {

std::pair<int64_t, int64_t> extents(FormatId format, int64_t rows, int64_t cols) {
  const ScaleExtents extents = scale_extents(format_info(format), rows, cols);
  return {extents.rows, extents.blocks};
}
using Extents = std::pair<int64_t, int64_t>;

TEST(ColumnMultiple, IsTheBlockOfFp4AndMxAndSixteenForFp8) {
  EXPECT_EQ(column_multiple(format_info(FormatId::kNvfp4)), 16);
  EXPECT_EQ(column_multiple(format_info(FormatId::kNvfp4PerToken)), 16);
  EXPECT_EQ(column_multiple(format_info(FormatId::kMxfp4)), 32);
  EXPECT_EQ(column_multiple(format_info(FormatId::kMxfp8)), 32);
  EXPECT_EQ(column_multiple(format_info(FormatId::kFp8Block1x128)), 16);
  EXPECT_EQ(column_multiple(format_info(FormatId::kFp8Block128x128)), 16);
  EXPECT_EQ(column_multiple(format_info(FormatId::kFp8Tensor)), 16);
}

TEST(ScaleExtents, CountPartialBlocks) {
  EXPECT_EQ(extents(FormatId::kNvfp4, 3, 96), (Extents{3, 6}));
  EXPECT_EQ(extents(FormatId::kMxfp8, 3, 1056), (Extents{3, 33}));
  EXPECT_EQ(extents(FormatId::kFp8Block1x128, 5, 144), (Extents{5, 2}));
  EXPECT_EQ(extents(FormatId::kFp8Block128x128, 129, 144), (Extents{2, 2}));
  EXPECT_EQ(extents(FormatId::kFp8Block128x128, 0, 128), (Extents{0, 1}));
}

TEST(ScaleExtents, HaveOneScaleForAWholeTensorEvenIfItIsEmpty) {
  EXPECT_EQ(extents(FormatId::kFp8Tensor, 129, 144), (Extents{1, 1}));
  EXPECT_EQ(extents(FormatId::kFp8Tensor, 0, 0), (Extents{1, 1}));
}

}  // namespace
}  // namespace narrowfloat
