// The two arithmetics. FastMath: flush-to-zero products that judge tininess after rounding (spec
// 4.2), against integer arithmetic on mantissas.
#include "formats/math_policy.h"

#include <random>

#include <gtest/gtest.h>

#include "slow_definitions.h"

namespace narrowfloat {
namespace {

void expect_product(float a, float b) {
  ASSERT_EQ(float_bits(FastMath::mul(a, b)), float_bits(slow_ftz_product(a, b)))
      << std::hexfloat << a << " * " << b;
}

TEST(FastMathMul, JudgesTininessAfterRoundingTo24Bits) {
  // The two measured points: exact products 2^-126 (1 - 2^-24) and 2^-126 (1 - 2^-46).
  EXPECT_EQ(FastMath::mul(0x1.fffffep-1F, 0x1p-126F), 0.0F);
  EXPECT_EQ(FastMath::mul(0x1.fffffcp-64F, 0x1.000002p-63F), 0x1p-126F);
  // IEEE would round the first one up in the denormal grid.
  EXPECT_EQ(0x1.fffffep-1F * 0x1p-126F, 0x1p-126F);
  EXPECT_EQ(float_bits(FastMath::mul(-0x1.fffffep-1F, 0x1p-126F)), 0x80000000U);
}

TEST(FastMathMul, AgreesWithIntegerArithmeticJustBelowTheSmallestNormal) {
  std::mt19937 random(2);
  int zeros = 0;
  int smallest = 0;
  for (int i = 0; i < 2000000; ++i) {
    // a in [1, 2) times the nearest float to 2^-126 / a, a few units up or down.
    const float a = bits_float(0x3F800000U | (random() & 0x7FFFFFU));
    const auto quotient = float_bits(static_cast<float>(0x1p-63 / static_cast<double>(a)));
    const float b = bits_float(quotient + static_cast<uint32_t>(random() % 5) - 2);
    const float scaled = a * 0x1p-63F;
    expect_product(scaled, b);
    const float product = FastMath::mul(scaled, b);
    zeros += product == 0.0F ? 1 : 0;
    smallest += product == 0x1p-126F ? 1 : 0;
  }
  // The window was really hit on both sides.
  EXPECT_GT(zeros, 100000);
  EXPECT_GT(smallest, 100000);
}

TEST(FastMathMul, AgreesWithIntegerArithmeticOnRandomBits) {
  std::mt19937 random(3);
  for (int i = 0; i < 2000000; ++i) {
    const float a = bits_float(static_cast<uint32_t>(random()));
    const float b = bits_float(static_cast<uint32_t>(random()));
    if (std::isfinite(a) && std::isfinite(b)) expect_product(a, b);
  }
}

TEST(FastMathMul, FlushesDenormalOperandsToZerosOfTheirSign) {
  EXPECT_EQ(float_bits(FastMath::mul(0x1p-127F, 0x1p127F)), 0U);
  EXPECT_EQ(float_bits(FastMath::mul(-0x1p-127F, 0x1p127F)), 0x80000000U);
  EXPECT_TRUE(slow_is_nan(FastMath::mul(0x1p-127F, std::numeric_limits<float>::infinity())));
}

TEST(FastMathAdd, FlushesOperandsAndResult) {
  EXPECT_EQ(FastMath::add(0x1p-127F, 1.0F), 1.0F);
  EXPECT_EQ(FastMath::add(0x1p-127F, 0x1p-127F), 0.0F);
  EXPECT_EQ(FastMath::add(0x1.8p-126F, -0x1p-126F), 0.0F);
  EXPECT_EQ(float_bits(FastMath::add(-0x1.8p-126F, 0x1p-126F)), 0x80000000U);
  EXPECT_EQ(FastMath::add(0x1.8p-126F, 0x1p-126F), 0x1.4p-125F);
}

TEST(FastMathDiv, IsACorrectlyRoundedQuotientWithFlushing) {
  EXPECT_EQ(FastMath::div(1.0F, 3.0F), 1.0F / 3.0F);
  EXPECT_EQ(FastMath::div(0x1p-126F, 2.0F), 0.0F);
  EXPECT_EQ(FastMath::div(0x1p-127F, 0x1p-126F), 0.0F);
}

TEST(FastMathRcp, IsTheApproximateReciprocal) {
  int differing = 0;
  for (int i = 1; i <= 512; ++i) {
    const auto x = static_cast<float>(i);
    EXPECT_EQ(float_bits(FastMath::rcp(x)), float_bits(rcp_approx_ftz(x)));
    differing += FastMath::rcp(x) != ExactMath::rcp(x) ? 1 : 0;
  }
  EXPECT_EQ(differing, 64);
}

TEST(FastMathFlush, ClearsDenormalsAndNothingElse) {
  for_each_near_midpoint(std::vector<double>{0x1p-126, 0x1p-126}, [](float x) {
    const bool is_denormal = std::fpclassify(x) == FP_SUBNORMAL;
    EXPECT_EQ(float_bits(FastMath::flush(x)),
              is_denormal ? float_bits(x) & 0x80000000U : float_bits(x));
  });
  EXPECT_EQ(FastMath::flush(0x1.fffffcp-127F), 0.0F);
  EXPECT_TRUE(slow_is_nan(FastMath::flush(bits_float(0x7F800001U))));
}

TEST(ExactMath, KeepsDenormals) {
  EXPECT_EQ(ExactMath::flush(0x1p-149F), 0x1p-149F);
  EXPECT_EQ(ExactMath::mul(0x1p-100F, 0x1p-49F), 0x1p-149F);
  EXPECT_EQ(ExactMath::add(0x1p-149F, 0x1p-149F), 0x1p-148F);
  EXPECT_EQ(ExactMath::div(0x1p-126F, 4.0F), 0x1p-128F);
  EXPECT_EQ(ExactMath::rcp(0x1p127F), 0x1p-127F);
}

}  // namespace
}  // namespace narrowfloat
