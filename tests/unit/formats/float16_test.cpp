// bf16 and fp16: widening of every code and narrowing against the slow definition.
#include "formats/float16.h"

#include <gtest/gtest.h>

#include "slow_definitions.h"

namespace narrowfloat {
namespace {

struct Half {
  int mantissa_bits;
  int bias;
  int infinity;
  float (*widen)(uint16_t);
  uint16_t (*narrow)(float);

  // Values of the finite codes, and beyond them what the code of infinity would be worth: a tie
  // with it rounds to infinity, whose code is even.
  [[nodiscard]] std::vector<double> values() const {
    return slow_values(infinity, mantissa_bits, bias);
  }
  [[nodiscard]] int slow_narrow(const std::vector<double>& values, float x, int start = 0) const {
    if (slow_is_nan(x)) return 0x7FFF;
    const int code = nearest_code(values, std::fabs(static_cast<double>(x)), start);
    return code | (std::signbit(x) ? 0x8000 : 0);
  }
};

const Half kBf16{7, 127, 0x7F80, bf16_to_float, float_to_bf16};
const Half kFp16{10, 15, 0x7C00, f16_to_float, float_to_f16};

class Float16 : public ::testing::TestWithParam<const Half*> {};

TEST_P(Float16, WidensEveryNumberExactlyAndKeepsInfinitiesAndNan) {
  const Half& half = *GetParam();
  for (int code = 0; code <= 0x7FFF; ++code) {
    const float x = half.widen(static_cast<uint16_t>(code));
    const float negative = half.widen(static_cast<uint16_t>(code | 0x8000));
    if (code > half.infinity) {
      ASSERT_TRUE(slow_is_nan(x) && slow_is_nan(negative)) << code;
      continue;
    }
    const double expected = code == half.infinity ? std::numeric_limits<double>::infinity()
                                                  : slow_value(code, half.mantissa_bits, half.bias);
    ASSERT_EQ(static_cast<double>(x), expected) << code;
    ASSERT_EQ(float_bits(negative), float_bits(x) | 0x80000000U) << code;
  }
}

TEST_P(Float16, NarrowsWhatItWidened) {
  const Half& half = *GetParam();
  for (int code = 0; code <= 0xFFFF; ++code) {
    const bool is_nan = (code & 0x7FFF) > half.infinity;
    ASSERT_EQ(half.narrow(half.widen(static_cast<uint16_t>(code))), is_nan ? 0x7FFF : code);
  }
}

TEST_P(Float16, NarrowsMidpointsToEvenAndTheirNeighboursAway) {
  const Half& half = *GetParam();
  const std::vector<double> values = half.values();
  int start = 0;
  for_each_near_midpoint(values, [&](float x) {
    const int expected = half.slow_narrow(values, x, std::max(0, start - 1));
    start = expected & 0x7FFF;
    ASSERT_EQ(half.narrow(x), expected) << std::hexfloat << x;
  });
  EXPECT_EQ(start, half.infinity);
}

TEST_P(Float16, NarrowsSampledFloatsOfBothSigns) {
  const Half& half = *GetParam();
  const std::vector<double> values = half.values();
  int start = 0;
  for_each_magnitude([&](float x) {
    const bool is_nan = slow_is_nan(x);
    const int expected = half.slow_narrow(values, x, start);
    if (!is_nan) start = expected;
    ASSERT_EQ(half.narrow(x), expected) << std::hexfloat << x;
    ASSERT_EQ(half.narrow(-x), is_nan ? expected : expected | 0x8000) << std::hexfloat << x;
  });
  EXPECT_EQ(start, half.infinity);
}

TEST_P(Float16, NarrowsEveryNanToOneCode) {
  for (const uint32_t bits : {0x7FC00000U, 0xFFC00000U, 0x7F800001U, 0xFF800001U, 0xFFFFFFFFU}) {
    EXPECT_EQ(GetParam()->narrow(bits_float(bits)), 0x7FFF);
  }
}

INSTANTIATE_TEST_SUITE_P(Types, Float16, ::testing::Values(&kBf16, &kFp16),
                         [](const ::testing::TestParamInfo<const Half*>& type) {
                           return std::string(type.param == &kBf16 ? "Bf16" : "Fp16");
                         });

// The nearest of two bf16 neighbours, ties to the even one, by comparing distances in double (all
// of them exact).
uint16_t slow_double_to_bf16(double x) {
  const auto magnitude_code = [](double magnitude) {
    uint32_t low = 0;
    uint32_t high = 0x7F80;
    while (high - low > 1) {
      const uint32_t middle = (low + high) / 2;
      (static_cast<double>(bf16_to_float(static_cast<uint16_t>(middle))) <= magnitude ? low
                                                                                      : high) =
          middle;
    }
    const double below = bf16_to_float(static_cast<uint16_t>(low));
    // Infinity stands where the next number would.
    const double above = high == 0x7F80 ? 0x1p128 : bf16_to_float(static_cast<uint16_t>(high));
    const double to_below = magnitude - below;
    const double to_above = above - magnitude;
    if (to_below == to_above) return low % 2 == 0 ? low : high;
    return to_below < to_above ? low : high;
  };
  const uint32_t sign = std::signbit(x) ? 0x8000U : 0U;
  return static_cast<uint16_t>(sign | magnitude_code(std::fabs(x)));
}

TEST(DoubleToBf16, RoundsOnceEverywhere) {
  for (uint32_t code = 0; code < 0x7F80; code += 7) {
    const double value = bf16_to_float(static_cast<uint16_t>(code));
    const double next =
        code + 1 == 0x7F80 ? 0x1p128 : bf16_to_float(static_cast<uint16_t>(code + 1));
    const double tie = value + (next - value) / 2;
    for (const double x : {value, std::nextafter(value, 0x1p200), std::nextafter(tie, 0.0), tie,
                           std::nextafter(tie, 0x1p200), std::nextafter(next, 0.0)}) {
      for (const double signed_x : {x, -x}) {
        ASSERT_EQ(double_to_bf16(signed_x), slow_double_to_bf16(signed_x)) << signed_x;
      }
    }
  }
}

// Rounding to fp32 first would make a tie of it, and even of that.
TEST(DoubleToBf16, DiffersFromTwoRoundings) {
  const double x = 1.0 + 0x1p-8 + 0x1p-40;
  EXPECT_EQ(double_to_bf16(x), 0x3F81);
  EXPECT_EQ(float_to_bf16(static_cast<float>(x)), 0x3F80);
}

TEST(DoubleToBf16, KeepsSignsAndEnds) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  EXPECT_EQ(double_to_bf16(-0.0), 0x8000);
  EXPECT_EQ(double_to_bf16(-1e-300), 0x8000);
  EXPECT_EQ(double_to_bf16(1e300), 0x7F80);
  EXPECT_EQ(double_to_bf16(-kInfinity), 0xFF80);
  EXPECT_EQ(double_to_bf16(-std::numeric_limits<double>::quiet_NaN()), 0x7FFF);
}

}  // namespace
}  // namespace narrowfloat
