// Single IEEE operations, comparisons that prefer numbers over NaN, and the maximum of magnitudes.
#include "base/float_ops.h"

#include <random>

#include <gtest/gtest.h>

#include "support/special_floats.h"

namespace narrowfloat {
namespace {

const float kNan = bits_float(0x7FC00000U);
const float kSignallingNan = bits_float(0x7F800001U);

TEST(FloatOps, RoundOnceAndDoNotContract) {
  const float a = 1.0F + 0x1p-12F;
  EXPECT_EQ(mul_rn(a, a), 1.0F + 0x1p-11F);
  // An fma keeps what the product drops.
  EXPECT_EQ(fma_rn(a, a, -(1.0F + 0x1p-11F)), 0x1p-24F);
  EXPECT_EQ(add_rn(mul_rn(a, a), -(1.0F + 0x1p-11F)), 0.0F);
  EXPECT_EQ(add_rn(1.0F, 0x1p-24F), 1.0F);
  EXPECT_EQ(div_rn(1.0F, 3.0F), bits_float(0x3EAAAAABU));
}

TEST(FloatOps, KeepTheBitsOfDoubles) {
  const double a = 1.0 + 0x1p-30;
  EXPECT_EQ(mul_rn(a, a), 1.0 + 0x1p-29);  // 2^-60 is lost to rounding, not to fp32.
  EXPECT_EQ(add_rn(1.0, 0x1p-52), 1.0 + 0x1p-52);
  EXPECT_EQ(div_rn(1.0, 1.0 + 0x1p-52), 1.0 - 0x1p-52);
}

TEST(FloatOps, KeepDenormals) {
  EXPECT_EQ(mul_rn(0x1p-126F, 0.5F), 0x1p-127F);
  EXPECT_EQ(add_rn(0x1p-149F, 0x1p-149F), 0x1p-148F);
  EXPECT_EQ(div_rn(0x1p-126F, 0x1p23F), 0x1p-149F);
}

// Correct rounding, without a square root: y is right if 1/x lies between the squares of the
// midpoints around y. Long double has enough bits to tell for y of 24.
TEST(RsqrtRn, IsCorrectlyRounded) {
  std::mt19937 random(1);
  int differs_from_float = 0;
  for (int i = 0; i < 300000; ++i) {
    // Mantissa and exponent parity decide everything.
    const float x = bits_float((127U + static_cast<uint32_t>(random() % 2)) << 23 |
                               static_cast<uint32_t>(random() & 0x7FFFFFU));
    const float y = rsqrt_rn(x);
    const long double step = std::nextafter(y, kFloatInfinity) - y;
    const long double low = y - step / 2;
    const long double high = y + step / 2;
    ASSERT_LT(low * low * x, 1.0L) << std::hexfloat << x;
    ASSERT_GT(high * high * x, 1.0L) << std::hexfloat << x;
    differs_from_float += 1.0F / std::sqrt(x) != y ? 1 : 0;
  }
  EXPECT_GT(differs_from_float, 0);
  EXPECT_EQ(rsqrt_rn(4.0F), 0.5F);
  EXPECT_EQ(rsqrt_rn(0.0F), kFloatInfinity);
}

TEST(MinMaxNumber, PreferTheNumberOverAnyNan) {
  for (const float nan : {kNan, -kNan, kSignallingNan}) {
    EXPECT_EQ(min_number(nan, 2.0F), 2.0F);
    EXPECT_EQ(min_number(2.0F, nan), 2.0F);
    EXPECT_EQ(max_number(nan, -2.0F), -2.0F);
    EXPECT_EQ(max_number(-2.0F, nan), -2.0F);
    EXPECT_TRUE(is_nan(min_number(nan, nan)));
  }
  EXPECT_EQ(min_number(1.0F, 2.0F), 1.0F);
  EXPECT_EQ(max_number(1.0F, 2.0F), 2.0F);
  EXPECT_EQ(min_number(kFloatInfinity, kFloatMax), kFloatMax);
}

TEST(IsNan, RecognisesEveryPatternAndNothingElse) {
  EXPECT_TRUE(is_nan(kNan) && is_nan(kSignallingNan) && is_nan(bits_float(0xFFFFFFFFU)));
  EXPECT_FALSE(is_nan(kFloatInfinity) || is_nan(-kFloatInfinity) || is_nan(0.0F));
}

TEST(IsDenormalOrZero, EndsAtTheSmallestNormal) {
  EXPECT_TRUE(is_denormal_or_zero(-0.0F));
  EXPECT_TRUE(is_denormal_or_zero(bits_float(0x807FFFFFU)));
  EXPECT_FALSE(is_denormal_or_zero(0x1p-126F));
  EXPECT_FALSE(is_denormal_or_zero(kNan));
}

// Exponents do not matter while nothing under- or overflows.
TEST(DivideByKnown, IsTheDivisionForAllSignificands) {
  for (const float divisor : {1.0F, 6.0F, 1536.0F, 2688.0F}) {
    const float reciprocal = 1.0F / divisor;
    for (uint32_t significand = 0; significand < 1U << 23; ++significand) {
      const float a = bits_float(float_bits(1.0F) + significand);
      ASSERT_EQ(divide_by_known(a, divisor, reciprocal), a / divisor) << a << " / " << divisor;
    }
  }
}

TEST(AbsMax, SkipsNanAndTellsNoNumberFromZero) {
  AbsMax amax;
  EXPECT_EQ(float_bits(amax.or_zero()), 0U);
  EXPECT_EQ(float_bits(amax.or_nan()), 0x7FFFFFFFU);
  amax.add(kSignallingNan);
  EXPECT_TRUE(is_nan(amax.or_nan()));
  amax.add(-0.0F);
  EXPECT_EQ(float_bits(amax.or_nan()), 0U);
  amax.add(-3.0F);
  amax.add(2.0F);
  amax.add(kNan);
  EXPECT_EQ(amax.or_nan(), 3.0F);
  EXPECT_EQ(amax.or_zero(), 3.0F);
  amax.add(-kFloatInfinity);
  EXPECT_EQ(amax.or_zero(), kFloatInfinity);
}

}  // namespace
}  // namespace narrowfloat
