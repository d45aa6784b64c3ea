// SiLU (spec 6.12): error against long double, special values.
#include "formats/silu.h"

#include <gtest/gtest.h>

#include "formats/float16.h"
#include "slow_definitions.h"
#include "support/special_floats.h"

namespace narrowfloat {
namespace {

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
  EXPECT_EQ(silu_mul<ExactMath>(kFloatInfinity, 1.0F), kFloatInfinity);
  EXPECT_TRUE(slow_is_nan(silu_mul<ExactMath>(-kFloatInfinity, 1.0F)));
  EXPECT_TRUE(slow_is_nan(silu_mul<ExactMath>(bits_float(0x7FC00000U), 1.0F)));
}

}  // namespace
}  // namespace narrowfloat
