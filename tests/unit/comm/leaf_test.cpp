// Sentinels of leaves: every 16-bit element at every place of a word, and the 32-bit ones around
// zero.
#include "comm/leaf.h"

#include <gtest/gtest.h>

namespace narrowfloat {
namespace {

TEST(Leaf16, FindsTheSentinelAmongAllElements) {
  for (uint32_t element = 0; element <= 0xFFFFU; ++element) {
    for (const uint32_t other : {0x0000U, 0x0001U, 0x7FFFU, 0x8001U, 0xFFFFU}) {
      const Leaf16 low{{other * 0x10001U, other << 16 | element, other * 0x10001U, 0}};
      const Leaf16 high{{0, other * 0x10001U, other * 0x10001U, element << 16 | other}};
      ASSERT_EQ(has_sentinel(low), element == 0x8000U) << element;
      ASSERT_EQ(has_sentinel(high), element == 0x8000U) << element;
      const uint32_t zero = element == 0x8000U ? 0 : element;
      ASSERT_EQ(without_negative_zeros(low).words[1], other << 16 | zero);
      ASSERT_EQ(without_negative_zeros(high).words[3], zero << 16 | other);
    }
  }
}

TEST(Leaf32, FindsTheSentinelOnly) {
  for (const uint32_t element :
       {0x80000000U, 0U, 1U, 0x80000001U, 0x00008000U, 0x80008000U, 0x7FFFFFFFU, 0xFFFFFFFFU}) {
    for (int place = 0; place < Leaf32::kWords; ++place) {
      Leaf32 leaf{};
      leaf.words[place] = element;
      EXPECT_EQ(has_sentinel(leaf), element == 0x80000000U);
      EXPECT_EQ(without_negative_zeros(leaf).words[place], element == 0x80000000U ? 0 : element);
    }
  }
}

TEST(Leaf, OfSentinelsHasNoOtherElement) {
  EXPECT_EQ(without_negative_zeros(leaf_of_sentinels<2>()).words[3], 0U);
  EXPECT_EQ(without_negative_zeros(leaf_of_sentinels<4>()).words[7], 0U);
  // The sentinel of one class is data of the other: a workspace is for one of them.
  EXPECT_FALSE(has_sentinel(Leaf32{{sentinel_word<2>()}}));
}

}  // namespace
}  // namespace narrowfloat
