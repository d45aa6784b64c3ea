// The words of scale tensors: logical words and words of pad rows cover a tensor once, by the
// offsets of spec 8.2.
#include "comm/scale_padding.h"

#include <array>
#include <vector>

#include <gtest/gtest.h>

#include "support/allreduce_golden.h"

namespace narrowfloat {
namespace {

using testing::golden_group_words;
using testing::golden_scale_bytes;
using testing::golden_scale_offset;

constexpr std::array kLayouts{ScaleLayoutId::kLinear, ScaleLayoutId::kSwizzled128x4,
                              ScaleLayoutId::kSwizzled8x4};

TEST(ScaleLayouts, HaveTheOffsetsOfTheSpecification) {
  for (const ScaleLayoutId layout : kLayouts) {
    for (const int64_t tokens : {1, 7, 8, 9, 127, 128, 129, 300}) {
      for (const int64_t blocks : {1, 2, 3, 4, 5, 180}) {
        std::vector<bool> seen(static_cast<size_t>(golden_scale_bytes(layout, tokens, blocks)));
        ASSERT_EQ(scale_image_size(layout, tokens, blocks), static_cast<int64_t>(seen.size()));
        for (int64_t row = 0; row < tokens; ++row) {
          for (int64_t block = 0; block < blocks; ++block) {
            const int64_t offset = AllLayouts::offset(layout, row, block, {tokens, blocks});
            ASSERT_EQ(offset, golden_scale_offset(layout, row, block, blocks));
            ASSERT_FALSE(seen.at(static_cast<size_t>(offset)));
            seen[static_cast<size_t>(offset)] = true;
          }
        }
      }
    }
  }
}

EpilogueArgs args_of(AllReduceQuantization quantization, ScaleLayoutId layout, int64_t tokens,
                     int64_t blocks) {
  return {.quantization = quantization,
          .tokens = tokens,
          .scale_layout = layout,
          .scale_extents = {tokens, blocks}};
}

// Rows, with those that pad, by words that cover `words` words once.
void expect_cover(const EpilogueArgs& args, int64_t words) {
  const ScalePadRows pad = scale_pad_rows(args);
  std::vector<bool> seen(static_cast<size_t>(words));
  for (int64_t row = 0; row < args.tokens + pad.rows; ++row) {
    for (int64_t column = 0; column < (args.scale_extents.blocks + 3) / 4; ++column) {
      const auto offset = static_cast<size_t>(scale_word_offset(args, row, column));
      ASSERT_LT(offset, seen.size());
      ASSERT_FALSE(seen[offset]);
      seen[offset] = true;
    }
  }
  EXPECT_EQ(std::count(seen.begin(), seen.end(), true), words);
}

TEST(ScalePadRows, CompleteTheSwizzledLayouts) {
  for (const auto layout : {ScaleLayoutId::kSwizzled128x4, ScaleLayoutId::kSwizzled8x4}) {
    for (const int64_t tokens : {1, 8, 9, 127, 128, 129}) {
      for (const int64_t blocks : {1, 4, 5, 180}) {
        const EpilogueArgs args = args_of(AllReduceQuantization::kNvfp4, layout, tokens, blocks);
        EXPECT_EQ(scale_pad_rows(args).words_per_row, (blocks + 3) / 4);
        expect_cover(args, golden_scale_bytes(layout, tokens, blocks) / 4);
      }
    }
  }
}

TEST(ScalePadRows, CompleteTheWordsOfGroups) {
  for (const int64_t tokens : {1, 3, 4, 5, 129}) {
    for (const int64_t groups : {1, 4, 5, 45}) {
      const EpilogueArgs args =
          args_of(AllReduceQuantization::kFp8GroupUe8m0, ScaleLayoutId::kLinear, tokens, groups);
      expect_cover(args, golden_group_words(tokens, groups, false));
      // The short tensor ends after the last token's word of the last column.
      EXPECT_EQ(scale_word_offset(args, tokens - 1, (groups + 3) / 4 - 1) + 1,
                golden_group_words(tokens, groups, true));
    }
  }
}

TEST(ScalePadRows, AreNoneElsewhere) {
  for (const auto quantization :
       {AllReduceQuantization::kNone, AllReduceQuantization::kFp8Tensor,
        AllReduceQuantization::kFp8Token, AllReduceQuantization::kFp8Block1x128,
        AllReduceQuantization::kMxfp4, AllReduceQuantization::kNvfp4PerToken}) {
    EXPECT_EQ(scale_pad_rows(args_of(quantization, ScaleLayoutId::kLinear, 5, 6)).rows, 0);
  }
}

}  // namespace
}  // namespace narrowfloat
