// The contents of cells that wait for addends or sums: every 16-bit element is tried at every place
// of a word, and some of 32 bits.
#include "comm/leaf.h"

#include <gtest/gtest.h>

#include "comm/elements.h"

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

// Whether all bits of an element are set, at every place; -0 is a sum like others.
TEST(Leaf, LacksASumWhereAllBitsAreSet) {
  for (uint32_t element = 0; element <= 0xFFFFU; ++element) {
    const Leaf16 low{{0x80008000U, 0x7FFF0000U | element, 0, 0xFFFEFFFEU}};
    const Leaf16 high{{0, 0x80007FFFU, 0xFF7FFF80U, element << 16 | 0x7FFFU}};
    ASSERT_EQ(lacks_sum(low), element == 0xFFFFU) << element;
    ASSERT_EQ(lacks_sum(high), element == 0xFFFFU) << element;
  }
  for (const uint32_t word : {0xFFFFFFFFU, 0x7FFFFFFFU, 0x80000000U, 0xFFFF8000U, 0x8000FFFFU}) {
    EXPECT_EQ(lacks_sum(Leaf32{{0, 0x80000000U, word}}), word == 0xFFFFFFFFU) << word;
  }
  EXPECT_TRUE(lacks_sum(leaf_without_sums<2>()) && lacks_sum(leaf_without_sums<4>()));
}

// Every fp32 NaN of a sample, both signs, and every number becomes an element that is there.
template <DType kType>
void expect_narrow_makes_sums(uint32_t bits) {
  float x[kLeafElements] = {};
  for (int i = 0; i < kLeafElements; ++i) x[i] = bits_float(bits + static_cast<uint32_t>(i));
  ASSERT_FALSE(lacks_sum(HostElements<kType>::narrow(x))) << bits;
}

TEST(Leaf, NarrowMakesNoCellThatLacksASum) {
  for (uint64_t bits = 0; bits <= 0xFFFFFFFFU; bits += 0x3FF8) {
    expect_narrow_makes_sums<DType::kF16>(static_cast<uint32_t>(bits));
    expect_narrow_makes_sums<DType::kBF16>(static_cast<uint32_t>(bits));
    expect_narrow_makes_sums<DType::kF32>(static_cast<uint32_t>(bits));
  }
  for (const uint32_t bits : {0x7FFFFFF0U, 0xFFFFFFF8U, 0x7F800000U, 0xFF800000U, 0xFF7FFFF8U}) {
    expect_narrow_makes_sums<DType::kF16>(bits);
    expect_narrow_makes_sums<DType::kBF16>(bits);
    expect_narrow_makes_sums<DType::kF32>(bits);
  }
}

}  // namespace
}  // namespace narrowfloat
