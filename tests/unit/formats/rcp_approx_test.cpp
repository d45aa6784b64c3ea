// The model of rcp.approx.ftz.f32: special values, the published statistics of the measured table,
// and the exponent rule (spec 4.3).
#include "formats/rcp_approx.h"

#include <cmath>
#include <random>

#include <gtest/gtest.h>

namespace narrowfloat {
namespace {

constexpr uint32_t kInfinityBits = 0x7F800000U;

uint32_t rcp_bits(float x) { return float_bits(rcp_approx_ftz(x)); }

TEST(RcpApprox, MapsSpecialValuesAsTheTableOfTheSpecSays) {
  const struct {
    uint32_t x;
    uint32_t y;
  } rows[] = {
      {0x00000000U, kInfinityBits}, {0x80000000U, 0xFF800000U}, {0x00000001U, kInfinityBits},
      {0x007FFFFFU, kInfinityBits}, {0x807FFFFFU, 0xFF800000U}, {kInfinityBits, 0x00000000U},
      {0xFF800000U, 0x80000000U},   {0x7FC00000U, 0x7FFFFFFFU}, {0xFFC00000U, 0x7FFFFFFFU},
      {0x7F800001U, 0x7FFFFFFFU},   {0x7E800000U, 0x00800000U},  // 2^126 gives 2^-126.
      {0x7E800001U, 0x00000000U},                                // Above it: zero.
      {0xFE800001U, 0x80000000U},                                // The sign is kept.
      {0x7F7FFFFFU, 0x00000000U},   {0x00800000U, 0x7E800000U},  // 2^-126 gives 2^126.
      {0x3F800000U, 0x3F800000U},   {0x40C00000U, 0x3E2AAAABU},  // 6
      {0x43E00000U, 0x3B124925U}};                               // 448
  for (const auto& row : rows) {
    EXPECT_EQ(rcp_bits(bits_float(row.x)), row.y) << std::hex << row.x;
  }
}

TEST(RcpApprox, DiffersFromTheRoundedReciprocalAsOftenAsMeasured) {
  int lower = 0;
  int equal = 0;
  int higher = 0;
  for (uint32_t mantissa = 0; mantissa < (1U << 23); ++mantissa) {
    const float x = bits_float(0x3F800000U | mantissa);
    const auto difference = static_cast<int32_t>(rcp_bits(x) - float_bits(1.0F / x));
    ASSERT_LE(std::abs(difference), 1) << mantissa;
    lower += difference == -1 ? 1 : 0;
    equal += difference == 0 ? 1 : 0;
    higher += difference == 1 ? 1 : 0;
  }
  EXPECT_EQ(lower, 374723);
  EXPECT_EQ(equal, 7280086);
  EXPECT_EQ(higher, 733799);
}

TEST(RcpApprox, DiffersFor64OfTheFirst512Integers) {
  int differing = 0;
  for (int i = 1; i <= 512; ++i) {
    const auto x = static_cast<float>(i);
    differing += rcp_bits(x) != float_bits(1.0F / x) ? 1 : 0;
  }
  EXPECT_EQ(differing, 64);
}

// The mantissa decides, the exponent only moves: rcp(2^k * 1.m) = rcp(1.m) * 2^-k, zero below
// 2^-126.
TEST(RcpApprox, MovesWithTheExponentOfItsInput) {
  std::mt19937 random(1);
  std::vector<uint32_t> mantissas{0, 1, 2, 0x400000U, 0x7FFFFEU, 0x7FFFFFU};
  for (int i = 0; i < 300; ++i) mantissas.push_back(random() & 0x7FFFFFU);
  for (int exponent = -126; exponent <= 127; ++exponent) {
    for (const uint32_t mantissa : mantissas) {
      const float unit = bits_float(0x3F800000U | mantissa);
      const double moved = std::ldexp(static_cast<double>(rcp_approx_ftz(unit)), -exponent);
      const float expected = moved < 0x1p-126 ? 0.0F : static_cast<float>(moved);
      const float x = std::ldexp(unit, exponent);
      ASSERT_EQ(rcp_bits(x), float_bits(expected)) << std::hexfloat << x;
      ASSERT_EQ(rcp_bits(-x), float_bits(-expected)) << std::hexfloat << x;
    }
  }
}

}  // namespace
}  // namespace narrowfloat
