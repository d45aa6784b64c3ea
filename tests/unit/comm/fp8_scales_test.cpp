// FP8 scales that only the all-reduce has, at their floors and powers of two.
#include "comm/fp8_scales.h"

#include <cmath>

#include <gtest/gtest.h>

namespace narrowfloat {
namespace {

TEST(Fp8TokenScale, HasAFloor) {
  EXPECT_EQ(fp8_token_scale(448.0F), 1.0F);
  EXPECT_EQ(fp8_token_scale(0.0F), 0x1p-9F / 448.0F);
  EXPECT_EQ(fp8_token_scale(0x1p-10F), 0x1p-9F / 448.0F);
  EXPECT_EQ(fp8_token_scale(3.0F), 3.0F / 448.0F);
}

TEST(Fp8GroupExponent, IsTheLeastPowerOfTwoThatHoldsTheMaximum) {
  EXPECT_EQ(fp8_group_exponent(0.0F), 94);
  EXPECT_EQ(fp8_group_exponent(448.0F), 127);
  EXPECT_EQ(fp8_group_exponent(std::nextafter(448.0F, 1000.0F)), 128);
  EXPECT_EQ(fp8_group_exponent(224.0F), 126);
  EXPECT_EQ(fp8_group_exponent(225.0F), 127);
  EXPECT_EQ(fp8_group_exponent(kFloatMax), 247);
  // 255 would be NaN.
  EXPECT_EQ(fp8_group_exponent(__builtin_inff()), 254);
}

}  // namespace
}  // namespace narrowfloat
