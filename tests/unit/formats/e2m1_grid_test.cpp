// The rounding to E2M1's numbers against its codes: a dense sample of (or all) floats in range, and
// all floats around every number and every tie.
#include "formats/e2m1_grid.h"

#include <gtest/gtest.h>

#include "formats/minifloat.h"
#include "slow_definitions.h"

namespace narrowfloat {
namespace {

float by_code(float v) { return E2M1::decode(E2M1::encode(v / kE2m1Prescale)) * kE2m1Prescale; }

TEST(RoundToE2m1Grid, IsTheNumberOfTheCode) {
  for_each_magnitude([](float v) {
    if (!(v < kE2m1FastLimit)) return;
    ASSERT_EQ(float_bits(round_to_e2m1_grid(v)), float_bits(by_code(v))) << std::hexfloat << v;
  });
}

TEST(RoundToE2m1Grid, IsTheNumberOfTheCodeAroundNumbersAndTies) {
  constexpr uint32_t kNearby = 1 << 12;
  // Quarters: all of E2M1's numbers, all ties, and what lies in the middle.
  for (float quarter = 0.25F; quarter <= 7.0F; quarter += 0.25F) {
    const uint32_t middle = float_bits(quarter * kE2m1Prescale);
    for (uint32_t bits = middle - kNearby; bits <= middle + kNearby; ++bits) {
      const float v = bits_float(bits);
      if (!(v < kE2m1FastLimit)) break;
      ASSERT_EQ(float_bits(round_to_e2m1_grid(v)), float_bits(by_code(v))) << std::hexfloat << v;
    }
  }
}

TEST(E2m1GridCode, IsTheCode) {
  for (uint32_t code = 0; code < 8; ++code) {
    const float q = E2M1::decode(static_cast<uint8_t>(code)) * kE2m1Prescale;
    EXPECT_EQ(e2m1_grid_code(q), code << 22);
  }
}

}  // namespace
}  // namespace narrowfloat
