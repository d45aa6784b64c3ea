// Portable functions: error against wider library functions, ranges, special values.
#include "base/portable_math.h"

#include <algorithm>
#include <cmath>

#include <gtest/gtest.h>

#include "support/special_floats.h"

namespace narrowfloat {
namespace {

// Distance from the true value in units in the last place of that value.
double error_in_ulp(float actual, long double truth) {
  const int exponent = std::max(std::ilogb(truth), -126);
  return static_cast<double>(std::ldexp(std::fabs(actual - truth), 23 - exponent));
}

double exp_error(float x) {
  return error_in_ulp(exp_portable(x), std::exp(static_cast<long double>(x)));
}

TEST(ExpPortable, IsWithin094UlpWhereTheResultIsNormal) {
  double worst = 0;
  for (uint32_t bits = 0; bits < float_bits(88.7F); bits += 1021) {
    const float x = bits_float(bits);
    worst = std::max(worst, exp_error(x));
    if (x < 87.3F) worst = std::max(worst, exp_error(-x));
  }
  EXPECT_LE(worst, 0.94);
  // Faithful at best: a correctly rounded function would stay below 0.5.
  EXPECT_GT(worst, 0.5);
}

TEST(ExpPortable, OverflowsAboveTheLargestExponentAndVanishesBelowTheSmallest) {
  EXPECT_EQ(exp_portable(89.0F), kFloatInfinity);
  EXPECT_EQ(exp_portable(88.8F), kFloatInfinity);
  EXPECT_LT(exp_portable(88.72F), kFloatInfinity);
  EXPECT_EQ(exp_portable(kFloatInfinity), kFloatInfinity);
  EXPECT_EQ(float_bits(exp_portable(-kFloatInfinity)), 0U);
  EXPECT_EQ(float_bits(exp_portable(-104.5F)), 0U);
  EXPECT_EQ(exp_portable(-103.0F), 0x1p-149F);
}

TEST(ExpPortable, IsOneAtBothZerosAndCanonicalAtNan) {
  EXPECT_EQ(exp_portable(0.0F), 1.0F);
  EXPECT_EQ(exp_portable(-0.0F), 1.0F);
  EXPECT_EQ(float_bits(exp_portable(bits_float(0xFFC00001U))), 0x7FFFFFFFU);
}

TEST(ExpPortable, NeverDecreasesAcrossBf16Inputs) {
  float previous = 0.0F;
  for (uint32_t code = 0x7F80; code > 0; --code) {
    const float y = exp_portable(-bits_float(code << 16));
    ASSERT_GE(y, previous) << code;
    previous = y;
  }
  for (uint32_t code = 0; code <= 0x7F80; ++code) {
    const float y = exp_portable(bits_float(code << 16));
    ASSERT_GE(y, previous) << code;
    previous = y;
  }
}

TEST(TanhPortable, IsCorrectlyRounded) {
  double worst = 0;
  // From the least denormal past saturation; the step is coprime to every run of patterns.
  for (uint32_t bits = 1; bits < float_bits(10.5F); bits += 541) {
    const float x = bits_float(bits);
    const double truth = std::tanh(static_cast<double>(x));
    worst = std::max(worst, error_in_ulp(tanh_portable(x), truth));
    ASSERT_EQ(tanh_portable(x), static_cast<float>(truth)) << std::hexfloat << x;
  }
  EXPECT_LE(worst, 0.50001);
}

TEST(TanhPortable, IsOddAndKeepsTheSignOfZero) {
  EXPECT_EQ(float_bits(tanh_portable(0.0F)), 0U);
  EXPECT_EQ(float_bits(tanh_portable(-0.0F)), 0x80000000U);
  for (uint32_t bits = 1; bits < 0x7F800000U; bits += 10007) {
    const float x = bits_float(bits);
    ASSERT_EQ(float_bits(tanh_portable(-x)), float_bits(tanh_portable(x)) ^ 0x80000000U) << x;
  }
}

TEST(TanhPortable, TakesKnownValues) {
  EXPECT_EQ(tanh_portable(0.5F), bits_float(0x3EEC9A9FU));  // 0.46211715726...
  EXPECT_EQ(tanh_portable(1.0F), bits_float(0x3F42F7D6U));  // 0.76159415595...
  EXPECT_EQ(tanh_portable(2.0F), bits_float(0x3F76CA83U));  // 0.96402758007...
  EXPECT_EQ(tanh_portable(0x1p-149F), 0x1p-149F);
  EXPECT_EQ(tanh_portable(0x1p-20F), 0x1p-20F);
}

TEST(TanhPortable, SaturatesAtOneAndMakesNanCanonical) {
  EXPECT_LT(tanh_portable(9.0F), 1.0F);
  for (const float x : {9.02F, 9.99F, 10.0F, 100.0F, kFloatMax, kFloatInfinity}) {
    EXPECT_EQ(tanh_portable(x), 1.0F) << x;
    EXPECT_EQ(tanh_portable(-x), -1.0F) << x;
  }
  for (const uint32_t nan : {0x7F800001U, 0x7FC00000U, 0xFFC00001U, 0xFFFFFFFFU}) {
    EXPECT_EQ(float_bits(tanh_portable(bits_float(nan))), 0x7FFFFFFFU);
  }
}

TEST(SigmoidByTanh, SaturatesWhereTheDefinitionSays) {
  EXPECT_EQ(sigmoid_by_tanh(0.0F), 0.5F);
  EXPECT_EQ(sigmoid_by_tanh(16.92F), 1.0F - 0x1p-24F);
  EXPECT_EQ(sigmoid_by_tanh(16.93F), 1.0F);
  EXPECT_EQ(sigmoid_by_tanh(-18.02F), 0x1p-25F);
  EXPECT_EQ(float_bits(sigmoid_by_tanh(-18.03F)), 0U);
  EXPECT_EQ(sigmoid_by_tanh(kFloatInfinity), 1.0F);
  EXPECT_EQ(float_bits(sigmoid_by_tanh(-kFloatInfinity)), 0U);
  EXPECT_EQ(float_bits(sigmoid_by_tanh(bits_float(0xFFC00000U))), 0x7FFFFFFFU);
}

TEST(SigmoidByTanh, StepsBy2ToThe25thJustAboveZero) {
  for (uint32_t bits = float_bits(-17.0F); bits < float_bits(-19.0F); bits += 7) {
    const float steps = sigmoid_by_tanh(bits_float(bits)) * 0x1p25F;
    ASSERT_EQ(steps, std::floor(steps)) << bits_float(bits);
  }
}

double cdf_error(float x) {
  return error_in_ulp(normal_cdf(x), std::erfc(-x / std::sqrt(2.0L)) / 2);
}

// Down to -13 the result is a normal number; the form with erf would have nothing left at -6.
TEST(NormalCdf, IsWithin42TenthsOfAnUlpFarIntoTheLowerTail) {
  double worst = 0;
  for (uint32_t bits = 0; bits < float_bits(13.0F); bits += 2039) {
    worst = std::max({worst, cdf_error(bits_float(bits)), cdf_error(-bits_float(bits))});
  }
  for (float x = 0.0F; x < 13.0F; x += 0.0001F) worst = std::max(worst, cdf_error(-x));
  EXPECT_LE(worst, 4.2);
  EXPECT_GT(worst, 0.5);
}

TEST(NormalCdf, EndsInZeroAndOne) {
  EXPECT_EQ(normal_cdf(0.0F), 0.5F);
  EXPECT_EQ(normal_cdf(-0.0F), 0.5F);
  EXPECT_EQ(normal_cdf(6.0F), 1.0F);
  EXPECT_EQ(normal_cdf(15.0F), 1.0F);
  EXPECT_EQ(normal_cdf(kFloatInfinity), 1.0F);
  EXPECT_GT(normal_cdf(-14.0F), 0.0F);
  EXPECT_EQ(float_bits(normal_cdf(-14.51F)), 0U);
  EXPECT_EQ(float_bits(normal_cdf(-kFloatInfinity)), 0U);
  EXPECT_EQ(float_bits(normal_cdf(bits_float(0xFF800001U))), 0x7FFFFFFFU);
}

}  // namespace
}  // namespace narrowfloat
