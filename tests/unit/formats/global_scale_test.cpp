// Encode scales from maxima, and the converters between the two directions (spec 1.6).
#include "formats/global_scale.h"

#include <gtest/gtest.h>

#include "formats/float16.h"
#include "narrowfloat/error.h"
#include "narrowfloat/quantize.h"

namespace narrowfloat {
namespace {

TEST(EncodeScaleFromAmax, DividesTheFullRangeByTheMaximum) {
  EXPECT_EQ(encode_scale_from_amax(1.0F), 2688.0F);
  EXPECT_EQ(encode_scale_from_amax(1.0F, 256), 1536.0F);
  EXPECT_EQ(encode_scale_from_amax(3.0F), 2688.0F / 3.0F);
}

TEST(EncodeScaleFromAmax, IsOneForZeroAndInfinityAndClampedForTinyMaxima) {
  EXPECT_EQ(encode_scale_from_amax(0.0F), 1.0F);
  EXPECT_EQ(encode_scale_from_amax(std::numeric_limits<float>::infinity()), 1.0F);
  EXPECT_EQ(encode_scale_from_amax(0x1p-149F), kFloatMax);
  EXPECT_EQ(encode_scale_from_amax(2688.0F / kFloatMax * 0.5F), kFloatMax);
}

TEST(EncodeScaleFromAmax, IsFiniteAndPositiveForEveryBf16Maximum) {
  for (uint32_t code = 0; code <= 0x7F80; ++code) {
    const float g = encode_scale_of_amax(bf16_to_float(static_cast<uint16_t>(code)), 448.0F);
    ASSERT_TRUE(g > 0.0F && g <= kFloatMax) << code;
  }
}

TEST(EncodeScaleFromAmax, RefusesOtherRanges) {
  EXPECT_THROW((void)encode_scale_from_amax(1.0F, 240), Error);
  try {
    (void)encode_scale_from_amax(1.0F, 240);
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "e4m3_max: expected 448 or 256, got 240");
    EXPECT_EQ(error.kind(), ErrorKind::kInvalidArgument);
  }
}

TEST(DecodeScaleFromEncode, IsTheRoundedReciprocal) {
  for (const float g : {1.0F, 3.0F, 2688.0F, kFloatMax, 0x1p-126F}) {
    EXPECT_EQ(decode_scale_from_encode(g), 1.0F / g);
  }
  EXPECT_EQ(float_bits(decode_scale_from_encode(bits_float(0xFFC00000U))), 0x7FFFFFFFU);
}

TEST(EncodeScaleFromDecode, IsTheReciprocalOfItsMode) {
  int differing = 0;
  for (int i = 1; i <= 512; ++i) {
    const auto d = static_cast<float>(i);
    EXPECT_EQ(encode_scale_from_decode(d), 1.0F / d);
    EXPECT_EQ(encode_scale_from_decode(d, MathMode::kFast), FastMath::rcp(d));
    differing += encode_scale_from_decode(d, MathMode::kFast) != 1.0F / d ? 1 : 0;
  }
  EXPECT_EQ(differing, 64);
}

}  // namespace
}  // namespace narrowfloat
