// E4M3 codes by addition against the general formula: a dense sample of (or all) floats of both
// signs, and all floats around every number and every tie.
#include "formats/e4m3_rounding.h"

#include <gtest/gtest.h>

#include "slow_definitions.h"

namespace narrowfloat {
namespace {

void expect_code(float v) {
  ASSERT_EQ(encode_e4m3_by_addition(v), E4M3::encode(v)) << std::hexfloat << v;
  ASSERT_EQ(encode_e4m3_by_addition(-v), E4M3::encode(-v)) << std::hexfloat << -v;
}

TEST(EncodeE4m3ByAddition, IsTheGeneralFormula) { for_each_magnitude(expect_code); }

TEST(EncodeE4m3ByAddition, IsTheGeneralFormulaAroundNumbersAndTies) {
  constexpr int32_t kNearby = 1 << 8;
  for (int code = 0; code <= 0x7E; ++code) {
    const float number = E4M3::decode(static_cast<uint8_t>(code));
    const float next = code == 0x7E ? 480.0F : E4M3::decode(static_cast<uint8_t>(code + 1));
    for (const float middle : {number, (number + next) / 2}) {
      for (int32_t i = -kNearby; i <= kNearby; ++i) {
        expect_code(bits_float(float_bits(middle) + static_cast<uint32_t>(i)));
      }
    }
  }
}

}  // namespace
}  // namespace narrowfloat
