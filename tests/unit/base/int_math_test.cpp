// Integer helpers at their edges.
#include "base/int_math.h"

#include <gtest/gtest.h>

namespace narrowfloat {
namespace {

TEST(CeilDiv, RoundsUpAndDoesNotOverflow) {
  for (int64_t a = 0; a <= 300; ++a) {
    for (int64_t b = 1; b <= 20; ++b) {
      const int64_t q = ceil_div(a, b);
      ASSERT_TRUE(q * b >= a && (q - 1) * b < a) << a << " / " << b;
    }
  }
  EXPECT_EQ(ceil_div(INT64_MAX, 2), (int64_t{1} << 62));
  EXPECT_EQ(ceil_div(INT64_MAX, INT64_MAX), 1);
}

TEST(RoundUp, GivesTheNextMultiple) {
  EXPECT_EQ(round_up(0, 128), 0);
  EXPECT_EQ(round_up(1, 128), 128);
  EXPECT_EQ(round_up(128, 128), 128);
  EXPECT_EQ(round_up(129, 128), 256);
}

TEST(CheckedMul, IsEmptyExactlyWhereTheProductDoesNotFit) {
  EXPECT_EQ(checked_mul(int64_t{1} << 31, int64_t{1} << 31), int64_t{1} << 62);
  EXPECT_EQ(checked_mul(INT64_MAX, 1), INT64_MAX);
  EXPECT_EQ(checked_mul(INT64_MAX, 0), 0);
  EXPECT_FALSE(checked_mul(int64_t{1} << 32, int64_t{1} << 31));
  EXPECT_FALSE(checked_mul(INT64_MIN, -1));
}

TEST(CheckedAdd, IsEmptyExactlyWhereTheSumDoesNotFit) {
  EXPECT_EQ(checked_add(INT64_MAX - 1, 1), INT64_MAX);
  EXPECT_FALSE(checked_add(INT64_MAX, 1));
  EXPECT_FALSE(checked_add(INT64_MIN, -1));
}

}  // namespace
}  // namespace narrowfloat
