// Bit casts, canonical NaN and powers of two.
#include "base/host_device.h"

#include <cmath>

#include <gtest/gtest.h>

namespace narrowfloat {
namespace {

TEST(FloatBits, AndBackIsTheIdentityOnPatternsOfNumbers) {
  for (const uint32_t bits : {0U, 0x80000000U, 0x3F800000U, 0x00000001U, 0x7F800000U}) {
    EXPECT_EQ(float_bits(bits_float(bits)), bits);
  }
  EXPECT_EQ(float_bits(1.0F), 0x3F800000U);
  EXPECT_EQ(float_bits(-0.0F), 0x80000000U);
}

TEST(CanonicalNan, ReplacesEveryNanAndNothingElse) {
  for (const uint32_t bits : {0x7F800001U, 0xFF800001U, 0x7FC00000U, 0xFFFFFFFFU}) {
    EXPECT_EQ(float_bits(canonical_nan(bits_float(bits))), 0x7FFFFFFFU);
  }
  for (const uint32_t bits : {0x7F800000U, 0xFF800000U, 0x00000001U, 0x80000000U}) {
    EXPECT_EQ(float_bits(canonical_nan(bits_float(bits))), bits);
  }
}

TEST(PowerOfTwo, IsExactForEveryNormalExponent) {
  for (int exponent = -126; exponent <= 127; ++exponent) {
    EXPECT_EQ(power_of_two(exponent), std::ldexp(1.0F, exponent));
  }
}

}  // namespace
}  // namespace narrowfloat
