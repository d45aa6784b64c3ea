// E4M3 codes by rounding to the grid against the general formula: a dense sample of (or all) floats
// of both signs, and all floats around every number and every tie.
#include "formats/e4m3_rounding.h"

#include <gtest/gtest.h>

#include "slow_definitions.h"

namespace narrowfloat {
namespace {

uint32_t grid_code(float v) {
  // As min.NaN has it on a GPU.
  const float magnitude = canonical_nan(std::fabs(v));
  return e4m3_grid_code(magnitude > E4M3::kMaxFinite ? E4M3::kMaxFinite : magnitude);
}

// Each in the place of another number.
void expect_codes(float v) {
  const uint32_t code = grid_code(v);
  const uint32_t one = grid_code(1.0F);
  const uint32_t of_one = E4M3::encode(1.0F);
  const uint32_t of_v = E4M3::encode(v);
  const uint32_t of_minus_v = E4M3::encode(-v);
  ASSERT_EQ(e4m3_codes<4>({code, code, one, code}, 0x80008000U | (float_bits(v) >> 31) * 0x80U),
            of_v | E4M3::encode(-std::fabs(v)) << 8 | of_one << 16 |
                static_cast<uint32_t>(E4M3::encode(-std::fabs(v))) << 24)
      << std::hexfloat << v;
  ASSERT_EQ(e4m3_codes<4>({one, one, code, one}, ((float_bits(v) >> 31) ^ 1U) << 23),
            of_one | of_one << 8 | of_minus_v << 16 | of_one << 24)
      << std::hexfloat << v;
}

TEST(E4m3GridCode, IsTheGeneralFormula) { for_each_magnitude(expect_codes); }

TEST(E4m3GridCode, IsTheGeneralFormulaAroundNumbersAndTies) {
  constexpr int32_t kNearby = 1 << 8;
  for (int code = 0; code <= 0x7E; ++code) {
    const float number = E4M3::decode(static_cast<uint8_t>(code));
    const float next = code == 0x7E ? 480.0F : E4M3::decode(static_cast<uint8_t>(code + 1));
    for (const float middle : {number, (number + next) / 2}) {
      for (int32_t i = -kNearby; i <= kNearby; ++i) {
        expect_codes(bits_float(float_bits(middle) + static_cast<uint32_t>(i)));
      }
    }
  }
}

}  // namespace
}  // namespace narrowfloat
