// UE8M0 against definitions in powers of two: decoding, the three rounding rules, and the facts
// about them that spec 6.6 states.
#include "formats/ue8m0.h"

#include <gtest/gtest.h>

#include "formats/float16.h"
#include "slow_definitions.h"

namespace narrowfloat {
namespace {

struct ElementType {
  float largest;
  int max_exponent;
  int mantissa_bits;
};
constexpr ElementType kE2M1{6.0F, 2, 1};
constexpr ElementType kE4M3{448.0F, 8, 3};

// Least b with |x| <= 2^(b - 127), 254 where there is none. `start` must not lie above the result.
int slow_encode_up(float x, int start = 0) {
  if (slow_is_nan(x)) return 255;
  const double magnitude = std::fabs(static_cast<double>(x));
  int b = start;
  while (b < 254 && magnitude > std::ldexp(1.0, b - 127)) ++b;
  return b;
}

// floor(log2 a) - max_exponent for finite a, at least byte 0.
int slow_floor(double amax, const ElementType& element) {
  if (amax == 0) return 0;
  const int byte = std::ilogb(amax) - element.max_exponent + 127;
  return byte < 0 ? 0 : byte;
}

// The maximum rounded half up to the element's mantissa width, then floor. Denormals have the grid
// of the smallest normal number.
int slow_even(double amax, const ElementType& element) {
  if (amax == 0) return 0;
  const int exponent = std::max(std::ilogb(amax), -126);
  const double step = std::ldexp(1.0, exponent - element.mantissa_bits);
  const double rounded = std::floor(amax / step + 0.5) * step;
  // A result below the normal numbers has exponent field 0, and so byte 0.
  return rounded < std::ldexp(1.0, -126) ? 0 : slow_floor(rounded, element);
}

uint8_t encode_amax(float amax, Ue8m0Rounding rounding, const ElementType& element) {
  return UE8M0::encode_amax(amax, rounding, element.max_exponent, element.mantissa_bits);
}

uint8_t encode_up_of(float amax, const ElementType& element) {
  return UE8M0::encode_up(amax / element.largest);
}

TEST(Ue8m0, DecodesEveryCodeToItsPowerOfTwo) {
  for (int code = 0; code <= 254; ++code) {
    const auto byte = static_cast<uint8_t>(code);
    EXPECT_EQ(UE8M0::decode(byte), std::ldexp(1.0F, code - 127)) << code;
    EXPECT_EQ(UE8M0::reciprocal(byte), std::ldexp(1.0F, 127 - code)) << code;
  }
  EXPECT_EQ(float_bits(UE8M0::decode(0xFF)), 0x7FFFFFFFU);
  EXPECT_EQ(float_bits(UE8M0::reciprocal(0xFF)), 0x7FFFFFFFU);
}

TEST(Ue8m0, EncodesUpEvery16BitInputToTheLeastPowerAbove) {
  for (uint32_t bits = 0; bits <= 0xFFFF; ++bits) {
    for (const float x :
         {bf16_to_float(static_cast<uint16_t>(bits)), f16_to_float(static_cast<uint16_t>(bits))}) {
      ASSERT_EQ(UE8M0::encode_up(x), slow_encode_up(x)) << std::hexfloat << x;
    }
  }
}

TEST(Ue8m0, EncodesUpPowersOfTwoAndTheirNeighbours) {
  for (int exponent = -149; exponent <= 127; ++exponent) {
    const float power = std::ldexp(1.0F, exponent);
    for (const float x :
         {std::nextafter(power, 0.0F), power, std::nextafter(power, 3.4e38F), -power}) {
      EXPECT_EQ(UE8M0::encode_up(x), slow_encode_up(x)) << std::hexfloat << x;
    }
  }
}

TEST(Ue8m0, EncodesUpSampledFloatsWithTheSignIgnored) {
  int start = 0;
  for_each_magnitude([&](float x) {
    const int code = slow_encode_up(x, start);
    if (code <= 254) start = code;
    ASSERT_EQ(UE8M0::encode_up(x), code) << std::hexfloat << x;
    ASSERT_EQ(UE8M0::encode_up(-x), code) << std::hexfloat << x;
  });
  EXPECT_EQ(start, 254);
}

TEST(Ue8m0, FloorAndEvenFollowTheirDefinitionsOnSampledMaxima) {
  constexpr uint64_t kStride = 3001;  // The definitions are slow.
  for (const ElementType& element : {kE2M1, kE4M3}) {
    const auto expect = [&](float amax, Ue8m0Rounding rounding, int code) {
      ASSERT_EQ(encode_amax(amax, rounding, element), code) << std::hexfloat << amax;
      ASSERT_EQ(encode_amax(-amax, rounding, element), code) << std::hexfloat << amax;
    };
    for_each_magnitude(
        [&](float amax) {
          const int special = slow_is_nan(amax) ? 0xFF : 0xFE;
          const bool is_finite = std::isfinite(amax);
          expect(amax, Ue8m0Rounding::kFloor, is_finite ? slow_floor(amax, element) : special);
          expect(amax, Ue8m0Rounding::kEven, is_finite ? slow_even(amax, element) : special);
        },
        kStride);
  }
}

TEST(Ue8m0, FloorAndEvenMapNanAndInfinityToTheLastTwoBytes) {
  for (const Ue8m0Rounding rounding : {Ue8m0Rounding::kFloor, Ue8m0Rounding::kEven}) {
    EXPECT_EQ(encode_amax(bits_float(0x7FC00000U), rounding, kE2M1), 0xFF);
    EXPECT_EQ(encode_amax(bits_float(0xFF800001U), rounding, kE4M3), 0xFF);
    EXPECT_EQ(encode_amax(bits_float(0x7F800000U), rounding, kE2M1), 0xFE);
    EXPECT_EQ(encode_amax(bits_float(0x7F800000U), rounding, kE4M3), 0xFE);
  }
}

// The table at the end of spec 6.6.
TEST(Ue8m0, RulesDifferExactlyAboveTheirThresholds) {
  const struct {
    ElementType element;
    double up_above;
    double even_from;
  } rows[] = {{kE2M1, 1.5, 1.75}, {kE4M3, 1.75, 1.9375}};
  for (const auto& row : rows) {
    for (uint32_t mantissa = 0; mantissa < (1U << 23); mantissa += 61) {
      for (const uint32_t exponent : {100U, 127U, 200U}) {
        const float amax = bits_float(exponent << 23 | mantissa);
        const double f = 1.0 + mantissa * 0x1p-23;
        const int floor = encode_amax(amax, Ue8m0Rounding::kFloor, row.element);
        ASSERT_EQ(encode_up_of(amax, row.element) - floor, f > row.up_above ? 1 : 0) << f;
        ASSERT_EQ(encode_amax(amax, Ue8m0Rounding::kEven, row.element) - floor,
                  f >= row.even_from ? 1 : 0)
            << f;
      }
    }
    // The thresholds themselves and their neighbours.
    for (const double f : {row.up_above, row.even_from}) {
      const auto at = static_cast<float>(f);
      for (const float amax : {std::nextafter(at, 0.0F), at, std::nextafter(at, 2.0F)}) {
        const int floor = encode_amax(amax, Ue8m0Rounding::kFloor, row.element);
        EXPECT_EQ(encode_up_of(amax, row.element) - floor, amax > row.up_above ? 1 : 0);
        EXPECT_EQ(encode_amax(amax, Ue8m0Rounding::kEven, row.element) - floor,
                  amax >= row.even_from ? 1 : 0);
      }
    }
  }
}

TEST(Ue8m0, UpIsTheLeastScaleThatClipsNothingButForOneFloatPerType) {
  for (const ElementType& element : {kE2M1, kE4M3}) {
    const float exception = std::nextafter(element.largest * 0x1p-127F, 1.0F);
    for (uint32_t bits = 1; bits < 0x7F800000U; bits += 997) {
      const float amax = bits_float(bits);
      if (amax == exception) continue;
      const int byte = encode_up_of(amax, element);
      const double clips_above = element.largest * std::ldexp(1.0, byte - 127);
      ASSERT_LE(amax, clips_above) << std::hexfloat << amax;
      if (byte > 0) {
        ASSERT_GT(amax, clips_above / 2) << std::hexfloat << amax;
      }
    }
    EXPECT_EQ(encode_up_of(exception, element), 0);
    EXPECT_GT(exception, element.largest * 0x1p-127);
  }
}

TEST(Ue8m0, DividingAndMultiplyingByTheReciprocalGiveTheSameByte) {
  for (const float largest : {6.0F, 448.0F}) {
    const float reciprocal = 1.0F / largest;
    for (uint32_t bits = 1; bits < 0x7F800000U; bits += 499) {
      const float amax = bits_float(bits);
      ASSERT_EQ(UE8M0::encode_up(amax / largest), UE8M0::encode_up(amax * reciprocal))
          << std::hexfloat << amax;
    }
  }
}

TEST(Ue8m0, LargestElementTimesAPowerOfTwoGivesThatPower) {
  for (const ElementType& element : {kE2M1, kE4M3}) {
    for (int k = -126; k <= 118; ++k) {
      EXPECT_EQ(encode_up_of(std::ldexp(element.largest, k), element), 127 + k);
    }
  }
}

}  // namespace
}  // namespace narrowfloat
