// E2M1, E4M3 and E5M2 against the slow definition: every code, every midpoint and its neighbours,
// every 16-bit input, and a dense sample of (or all) 2^32 floats.
#include "formats/minifloat.h"

#include <gtest/gtest.h>

#include "formats/float16.h"
#include "slow_definitions.h"

namespace narrowfloat {
namespace {

template <typename Type, int kTypeBias, int kTypeMantissaBits, int kTypeMaxCode>
struct Expected {
  using Codec = Type;
  static constexpr int kBias = kTypeBias;
  static constexpr int kMantissaBits = kTypeMantissaBits;
  static constexpr int kMaxCode = kTypeMaxCode;
};

template <typename Format>
class MiniFloatCodec : public ::testing::Test {
 protected:
  const std::vector<double> values_ =
      slow_values(Format::kMaxCode, Format::kMantissaBits, Format::kBias);
  static constexpr int kSign = 1 << (Format::Codec::kBits - 1);

  // `start` as in nearest_code().
  [[nodiscard]] int slow_encode(float x, int start = 0) const {
    if (slow_is_nan(x)) return kSign - 1;
    const int code = nearest_code(values_, std::fabs(static_cast<double>(x)), start);
    return code | (std::signbit(x) ? kSign : 0);
  }
};

using Formats = ::testing::Types<Expected<E2M1, 1, 1, 7>, Expected<E4M3, 7, 3, 0x7E>,
                                 Expected<E5M2, 15, 2, 0x7B>>;

struct Names {
  template <typename Format>
  static std::string GetName(int index) {
    return std::vector<std::string>{"E2M1", "E4M3", "E5M2"}.at(static_cast<size_t>(index));
  }
};

TYPED_TEST_SUITE(MiniFloatCodec, Formats, Names);

TYPED_TEST(MiniFloatCodec, DecodesEveryFiniteCodeExactly) {
  using Codec = typename TypeParam::Codec;
  for (int code = 0; code <= TypeParam::kMaxCode; ++code) {
    const auto expected = static_cast<float>(this->values_[static_cast<size_t>(code)]);
    const float positive = Codec::decode(static_cast<uint8_t>(code));
    const float negative = Codec::decode(static_cast<uint8_t>(code | this->kSign));
    EXPECT_EQ(float_bits(positive), float_bits(expected)) << code;
    EXPECT_EQ(float_bits(negative), float_bits(-expected)) << code;
  }
}

TYPED_TEST(MiniFloatCodec, DecodesEveryCodeAboveTheLargestToNanOrInfinity) {
  using Codec = typename TypeParam::Codec;
  const bool is_ieee = std::is_same_v<Codec, E5M2>;
  for (int code = TypeParam::kMaxCode + 1; code < this->kSign; ++code) {
    const bool is_infinity = is_ieee && code == TypeParam::kMaxCode + 1;
    const float positive = Codec::decode(static_cast<uint8_t>(code));
    const float negative = Codec::decode(static_cast<uint8_t>(code | this->kSign));
    EXPECT_EQ(float_bits(positive), is_infinity ? 0x7F800000U : 0x7FFFFFFFU) << code;
    EXPECT_EQ(float_bits(negative), is_infinity ? 0xFF800000U : 0x7FFFFFFFU) << code;
  }
}

TYPED_TEST(MiniFloatCodec, EncodesEveryDecodedCodeToItself) {
  using Codec = typename TypeParam::Codec;
  for (int code = 0; code <= TypeParam::kMaxCode; ++code) {
    for (const int signed_code : {code, code | this->kSign}) {
      const auto byte = static_cast<uint8_t>(signed_code);
      EXPECT_EQ(Codec::encode(Codec::decode(byte)), byte);
    }
  }
}

TYPED_TEST(MiniFloatCodec, RoundsMidpointsToTheEvenCodeAndTheirNeighboursAway) {
  using Codec = typename TypeParam::Codec;
  for_each_near_midpoint(this->values_, [&](float x) {
    EXPECT_EQ(Codec::encode(x), this->slow_encode(x)) << std::hexfloat << x;
  });
}

TYPED_TEST(MiniFloatCodec, EncodesEvery16BitInputToTheNearestCode) {
  using Codec = typename TypeParam::Codec;
  for (uint32_t bits = 0; bits <= 0xFFFF; ++bits) {
    for (const float x :
         {bf16_to_float(static_cast<uint16_t>(bits)), f16_to_float(static_cast<uint16_t>(bits))}) {
      ASSERT_EQ(Codec::encode(x), this->slow_encode(x)) << std::hexfloat << x;
    }
  }
}

TYPED_TEST(MiniFloatCodec, EncodesSampledFloatsOfBothSignsToTheNearestCode) {
  using Codec = typename TypeParam::Codec;
  int start = 0;
  for_each_magnitude([&](float x) {
    const bool is_nan = slow_is_nan(x);
    const int code = this->slow_encode(x, start);
    if (!is_nan) start = code;
    ASSERT_EQ(Codec::encode(x), code) << std::hexfloat << x;
    ASSERT_EQ(Codec::encode(-x), is_nan ? code : code | this->kSign) << std::hexfloat << x;
  });
  EXPECT_EQ(start, TypeParam::kMaxCode);
}

TYPED_TEST(MiniFloatCodec, MapsEveryNanToOneCode) {
  using Codec = typename TypeParam::Codec;
  for (const uint32_t bits : {0x7FC00000U, 0xFFC00000U, 0x7F800001U, 0xFF800001U, 0x7FFFFFFFU,
                              0xFFFFFFFFU, 0x7FBFFFFFU}) {
    EXPECT_EQ(Codec::encode(bits_float(bits)), this->kSign - 1);
  }
}

TYPED_TEST(MiniFloatCodec, KeepsTheSignOfZeroAndOfUnderflow) {
  using Codec = typename TypeParam::Codec;
  EXPECT_EQ(Codec::encode(0.0F), 0);
  EXPECT_EQ(Codec::encode(-0.0F), this->kSign);
  EXPECT_EQ(Codec::encode(-0x1p-149F), this->kSign);
  EXPECT_EQ(Codec::encode(0x1p-149F), 0);
}

TYPED_TEST(MiniFloatCodec, SaturatesInfinities) {
  using Codec = typename TypeParam::Codec;
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(Codec::encode(kInfinity), TypeParam::kMaxCode);
  EXPECT_EQ(Codec::encode(-kInfinity), TypeParam::kMaxCode | this->kSign);
}

// Spec 5, word for word.
TEST(MiniFloat, E2m1ThresholdsAreThePublishedOnes) {
  const auto encode_like_the_spec = [](double a) {
    if (a <= .25) return 0;
    if (a < .75) return 1;
    if (a <= 1.25) return 2;
    if (a < 1.75) return 3;
    if (a <= 2.5) return 4;
    if (a < 3.5) return 5;
    return a <= 5 ? 6 : 7;
  };
  for (int i = 0; i <= 8 * 4096; ++i) {
    const float a = static_cast<float>(i) / 4096.0F;
    ASSERT_EQ(E2M1::encode(a), encode_like_the_spec(a)) << a;
  }
}

TEST(MiniFloat, E4m3RoundsHalfItsSmallestNumberToZero) {
  EXPECT_EQ(E4M3::encode(0x1p-10F), 0x00);
  EXPECT_EQ(E4M3::encode(-0x1p-10F), 0x80);
  EXPECT_EQ(E4M3::encode(0x1.000002p-10F), 0x01);
  EXPECT_EQ(E4M3::encode(448.0F), 0x7E);
  EXPECT_EQ(E4M3::encode(1e30F), 0x7E);
}

TEST(MiniFloat, ConstantsFollowFromTheBitCounts) {
  EXPECT_EQ(E2M1::kMaxExponent, 2);
  EXPECT_EQ(E4M3::kMaxExponent, 8);
  EXPECT_EQ(E5M2::kMaxExponent, 15);
  EXPECT_EQ(E2M1::kDenormalStep, 0.5F);
  EXPECT_EQ(E4M3::kDenormalStep, 0x1p-9F);
  EXPECT_EQ(E5M2::kDenormalStep, 0x1p-16F);
}

}  // namespace
}  // namespace narrowfloat
