// The exponential and SiLU (spec 6.12): error against long double, ranges, special values.
#include "formats/silu.h"

#include <gtest/gtest.h>

#include "formats/float16.h"
#include "slow_definitions.h"

namespace narrowfloat {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Distance from the true value in units in the last place of that value.
double error_in_ulp(float x) {
  const long double truth = std::exp(static_cast<long double>(x));
  const int exponent = std::ilogb(truth);
  return static_cast<double>(std::ldexp(std::fabs(exp_portable(x) - truth), 23 - exponent));
}

TEST(ExpPortable, IsWithin094UlpWhereTheResultIsNormal) {
  double worst = 0;
  for (uint32_t bits = 0; bits < float_bits(88.7F); bits += 1021) {
    const float x = bits_float(bits);
    worst = std::max(worst, error_in_ulp(x));
    if (x < 87.3F) worst = std::max(worst, error_in_ulp(-x));
  }
  EXPECT_LE(worst, 0.94);
  // Faithful at best: a correctly rounded function would stay below 0.5.
  EXPECT_GT(worst, 0.5);
}

TEST(ExpPortable, OverflowsAboveTheLargestExponentAndVanishesBelowTheSmallest) {
  EXPECT_EQ(exp_portable(89.0F), kInfinity);
  EXPECT_EQ(exp_portable(88.8F), kInfinity);
  EXPECT_LT(exp_portable(88.72F), kInfinity);
  EXPECT_EQ(exp_portable(kInfinity), kInfinity);
  EXPECT_EQ(float_bits(exp_portable(-kInfinity)), 0U);
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
    const float y = exp_portable(-bf16_to_float(static_cast<uint16_t>(code)));
    ASSERT_GE(y, previous) << code;
    previous = y;
  }
  for (uint32_t code = 0; code <= 0x7F80; ++code) {
    const float y = exp_portable(bf16_to_float(static_cast<uint16_t>(code)));
    ASSERT_GE(y, previous) << code;
    previous = y;
  }
}

TEST(SiluMul, ExactIsWithinTwoUlpOfTheTrueValueBeforeItsRounding) {
  for (uint32_t code = 0; code < 0x7F80; ++code) {
    for (const float x : {bf16_to_float(static_cast<uint16_t>(code)),
                          -bf16_to_float(static_cast<uint16_t>(code))}) {
      const long double truth = x / (1.0L + std::exp(-static_cast<long double>(x)));
      if (std::fabs(truth) < 0x1p-120L) continue;
      const float y = silu_mul<ExactMath>(x, 1.0F);
      const auto error = std::fabs((y - truth) / truth);
      // The exponential overflows a little before the quotient does.
      if (x < -88.7F) continue;
      ASSERT_LT(error, 2 * 0x1p-23L) << x;
    }
  }
}

TEST(SiluMul, MultipliesByUpAfterTheSigmoid) {
  const float gate = 1.7F;
  EXPECT_EQ(silu_mul<ExactMath>(gate, 3.0F), silu_mul<ExactMath>(gate, 1.0F) * 3.0F);
  EXPECT_EQ(silu_mul<FastMath>(gate, 3.0F), FastMath::mul(silu_mul<FastMath>(gate, 1.0F), 3.0F));
}

TEST(SiluMul, ModesDifferInDenormalsAndInSomeLastBits) {
  EXPECT_NE(silu_mul<ExactMath>(0x1p-130F, 1.0F), 0.0F);
  EXPECT_EQ(silu_mul<FastMath>(0x1p-130F, 1.0F), 0.0F);
  int differing = 0;
  for (uint32_t code = 0x3F00; code < 0x4100; ++code) {
    const float x = bf16_to_float(static_cast<uint16_t>(code));
    differing += silu_mul<ExactMath>(x, 1.0F) != silu_mul<FastMath>(x, 1.0F) ? 1 : 0;
  }
  EXPECT_GT(differing, 0);
}

TEST(SiluMul, KeepsTheSignOfZeroAndMakesNanOfNegativeInfinity) {
  EXPECT_EQ(float_bits(silu_mul<ExactMath>(-0.0F, 1.0F)), 0x80000000U);
  EXPECT_EQ(float_bits(silu_mul<ExactMath>(0.0F, 1.0F)), 0U);
  EXPECT_EQ(silu_mul<ExactMath>(kInfinity, 1.0F), kInfinity);
  EXPECT_TRUE(slow_is_nan(silu_mul<ExactMath>(-kInfinity, 1.0F)));
  EXPECT_TRUE(slow_is_nan(silu_mul<ExactMath>(bits_float(0x7FC00000U), 1.0F)));
}

}  // namespace
}  // namespace narrowfloat
