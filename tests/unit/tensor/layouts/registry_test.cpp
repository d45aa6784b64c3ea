// Every scale layout is a bijection from (row, block) onto its positions minus padding, and padding
// is where the documentation says (spec 8.2).
#include "tensor/layouts/registry.h"

#include <vector>

#include <gtest/gtest.h>

namespace narrowfloat {
namespace {

// Offsets of all scales are different, inside the buffer, and the same as those of the tensor
// [row tiles][block tiles][tile], which the layouts implement by arithmetic.
template <typename Layout>
void check_bijection(int64_t rows, int64_t blocks) {
  const ScaleExtents logical{rows, blocks};
  const ScaleExtents padded = Layout::padded(logical);
  ASSERT_TRUE(padded.rows >= rows && padded.blocks >= blocks);
  std::vector<uint8_t> hits(static_cast<size_t>(padded.rows * padded.blocks), 0);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t offset = Layout::offset(row, block, logical);
      ASSERT_TRUE(offset >= 0 && offset < std::ssize(hits))
          << Layout::kName << " " << rows << " x " << blocks << " at " << row << ", " << block;
      ASSERT_EQ(hits[static_cast<size_t>(offset)]++, 0)
          << Layout::kName << " " << rows << " x " << blocks << " at " << row << ", " << block;
    }
  }
}

TEST(ScaleLayouts, AreBijectionsForAllSmallExtents) {
  for (int64_t rows = 1; rows <= 300; ++rows) {
    for (int64_t blocks = 1; blocks <= 20; ++blocks) {
      AllLayouts::for_each([&]<typename Layout>() { check_bijection<Layout>(rows, blocks); });
      if (::testing::Test::HasFatalFailure()) return;
    }
  }
}

// Every position of the padded buffer has one place, and offset() leads back to it.
template <typename Layout>
void check_inverse(int64_t rows, int64_t blocks) {
  const ScaleExtents logical{rows, blocks};
  const ScaleExtents padded = Layout::padded(logical);
  for (int64_t offset = 0; offset < padded.rows * padded.blocks; ++offset) {
    const ScalePlace place = Layout::place(offset, logical);
    ASSERT_TRUE(place.row >= 0 && place.row < padded.rows && place.block >= 0 &&
                place.block < padded.blocks)
        << Layout::kName << " " << rows << " x " << blocks << " at " << offset;
    ASSERT_EQ(Layout::offset(place.row, place.block, logical), offset)
        << Layout::kName << " " << rows << " x " << blocks;
    const ScalePlace listed = AllLayouts::place(Layout::kId, offset, logical);
    ASSERT_TRUE(listed.row == place.row && listed.block == place.block);
    ASSERT_EQ(AllLayouts::offset(Layout::kId, place.row, place.block, logical), offset);
  }
}

TEST(ScaleLayouts, PlaceInvertsOffsetAlsoInThePadding) {
  for (const int64_t rows : {1, 4, 7, 8, 9, 31, 127, 128, 129, 300}) {
    for (int64_t blocks = 1; blocks <= 20; ++blocks) {
      AllLayouts::for_each([&]<typename Layout>() { check_inverse<Layout>(rows, blocks); });
      if (::testing::Test::HasFatalFailure()) return;
    }
  }
}

// Full tiles have no padding: every offset is used, so this pins the tile order too.
TEST(ScaleLayouts, AgreeWithTheirTensorOfTiles) {
  const ScaleExtents full{256, 8};
  int64_t next_128x4 = 0;
  for (int64_t row_tile = 0; row_tile < 2; ++row_tile) {
    for (int64_t block_tile = 0; block_tile < 2; ++block_tile) {
      for (int64_t i = 0; i < 32 * 4 * 4; ++i) {
        const int64_t row = row_tile * 128 + i / 4 % 4 * 32 + i / 16;
        const int64_t block = block_tile * 4 + i % 4;
        ASSERT_EQ(Swizzled128x4Layout::offset(row, block, full), next_128x4++);
      }
    }
  }
  int64_t next_8x4 = 0;
  for (int64_t row_tile = 0; row_tile < 32; ++row_tile) {
    for (int64_t block_tile = 0; block_tile < 2; ++block_tile) {
      for (int64_t i = 0; i < 32; ++i) {
        ASSERT_EQ(Swizzled8x4Layout::offset(row_tile * 8 + i / 4, block_tile * 4 + i % 4, full),
                  next_8x4++);
      }
    }
  }
  for (int64_t i = 0; i < 256 * 8; ++i) {
    ASSERT_EQ(LinearLayout::offset(i / 8, i % 8, full), i);
    ASSERT_EQ(MnMajorLayout::offset(i % 256, i / 256, full), i);
  }
}

TEST(ScaleLayouts, PadToWholeTiles) {
  const auto padded = []<typename Layout>(int64_t rows, int64_t blocks) {
    const ScaleExtents extents = Layout::padded({rows, blocks});
    return std::pair(extents.rows, extents.blocks);
  };
  using Padded = std::pair<int64_t, int64_t>;
  EXPECT_EQ(padded.operator()<LinearLayout>(129, 5), (Padded{129, 5}));
  EXPECT_EQ(padded.operator()<Swizzled128x4Layout>(129, 5), (Padded{256, 8}));
  EXPECT_EQ(padded.operator()<Swizzled128x4Layout>(128, 4), (Padded{128, 4}));
  EXPECT_EQ(padded.operator()<Swizzled8x4Layout>(129, 5), (Padded{136, 8}));
  EXPECT_EQ(padded.operator()<MnMajorLayout>(129, 5), (Padded{132, 5}));
  EXPECT_EQ(padded.operator()<Swizzled128x4Layout>(0, 5), (Padded{0, 8}));
}

TEST(ScaleLayouts, AreListedInTheOrderOfTheirIds) {
  int next = 0;
  AllLayouts::for_each([&]<typename Layout>() {
    EXPECT_EQ(static_cast<int>(Layout::kId), next++);
    EXPECT_EQ(name(Layout::kId), Layout::kName);
  });
  EXPECT_EQ(next, 4);
}

}  // namespace
}  // namespace narrowfloat
