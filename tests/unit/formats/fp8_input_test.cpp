// E4M3 input of FP4 formats (spec 6.10): the 16-bit copy, and that exact equals quantizing it.
#include "formats/fp8_input.h"

#include <random>

#include <gtest/gtest.h>

#include "quantize_block.h"
#include "support/special_floats.h"

namespace narrowfloat {
namespace {

// Random E4M3 codes, NaN among them.
std::vector<uint16_t> random_codes(size_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<uint16_t> codes(count);
  for (uint16_t& code : codes) code = static_cast<uint16_t>(random() & 0xFFU);
  return codes;
}

// The copy h in fp16, by the formula.
std::vector<uint16_t> copy_in_f16(const std::vector<uint16_t>& codes, float g) {
  const float t = std::min(6.0F / g, kFloatMax);
  std::vector<uint16_t> h;
  for (const uint16_t code : codes) {
    const float x = E4M3::decode(static_cast<uint8_t>(code)) * t;
    h.push_back(float_to_f16(is_nan(x) ? x : std::clamp(x, -65504.0F, 65504.0F)));
  }
  return h;
}

TEST(Fp8Input, ExactEqualsQuantizingTheF16CopyToNvfp4) {
  for (const float g : {1.0F, 3.7F, 271.5F, 0.01F, 1e-6F}) {
    const auto codes = random_codes(64 * 32, 1);
    const auto from_e4m3 =
        quantize_matrix(FormatId::kNvfp4, DType::kF8E4M3, codes, 32, with(MathMode::kExact, g));
    const auto from_copy = quantize_matrix(FormatId::kNvfp4, DType::kF16, copy_in_f16(codes, g), 32,
                                           with(MathMode::kExact, g));
    EXPECT_TRUE(from_e4m3 == from_copy) << g;
  }
}

TEST(Fp8Input, ExactWithScaleOneEqualsQuantizingTheF16CopyToMxfp4) {
  const auto codes = random_codes(64 * 32, 2);
  const auto from_e4m3 =
      quantize_matrix(FormatId::kMxfp4, DType::kF8E4M3, codes, 32, with(MathMode::kExact, 1.0F));
  const auto from_copy =
      quantize_matrix(FormatId::kMxfp4, DType::kF16, copy_in_f16(codes, 1.0F), 32);
  EXPECT_EQ(from_e4m3.scales, from_copy.scales);
  EXPECT_EQ(from_e4m3.codes, from_copy.codes);
}

TEST(Fp8Input, DecodesToSixTimesTheElement) {
  // 448 with g = 1 is stored as 2688 = 6 * 448.
  for (const MathMode math : {MathMode::kExact, MathMode::kFast}) {
    std::vector<uint16_t> codes(16, 0x00);
    codes[0] = 0x7E;
    codes[1] = 0xF6;
    const auto q = quantize_matrix(FormatId::kNvfp4, DType::kF8E4M3, codes, 1, with(math, 1.0F));
    EXPECT_EQ(q.scales[0], 0x7E);
    EXPECT_EQ(q.codes[0], 7);
    EXPECT_EQ(q.codes[1], 13);
    EXPECT_EQ(q.codes[2], 0);
  }
}

TEST(Fp8Input, SaturatesTheCopyInExactAndOverflowsItInFast) {
  const uint8_t largest = 0x7E;
  EXPECT_EQ(Fp8Input<ExactMath>::widen(largest, 1000.0F), 65504.0F);
  EXPECT_EQ(Fp8Input<ExactMath>::widen(largest | 0x80, 1000.0F), -65504.0F);
  EXPECT_EQ(Fp8Input<FastMath>::widen(largest, 1000.0F), kFloatInfinity);
  EXPECT_EQ(Fp8Input<FastMath>::widen(largest | 0x80, 1000.0F), -kFloatInfinity);
  EXPECT_EQ(float_bits(Fp8Input<ExactMath>::widen(0x80, 1.0F)), 0x80000000U);
  EXPECT_TRUE(is_nan(Fp8Input<ExactMath>::widen(0x7F, 1.0F)));
  EXPECT_TRUE(is_nan(Fp8Input<FastMath>::widen(0xFF, 1.0F)));
}

TEST(Fp8Input, ClampsTheFactorInExactOnly) {
  EXPECT_EQ(Fp8Input<ExactMath>::factor(0x1p-149F), kFloatMax);
  EXPECT_EQ(Fp8Input<FastMath>::factor(0x1p-149F), kFloatInfinity);
  EXPECT_EQ(Fp8Input<ExactMath>::factor(6.0F), 1.0F);
}

TEST(Fp8Input, KeepsTheSignsOfAZeroBlock) {
  const std::vector<uint16_t> codes(32, 0x80);
  for (const FormatId format : {FormatId::kNvfp4, FormatId::kMxfp4}) {
    for (const MathMode math : {MathMode::kExact, MathMode::kFast}) {
      const auto q = quantize_matrix(format, DType::kF8E4M3, codes, 1, with(math, 2.0F));
      EXPECT_EQ(q.scales[0], 0x00);
      EXPECT_EQ(first_codes(q, 2), (std::vector<int>{8, 8}));
    }
  }
}

TEST(Fp8Input, GivesNanElementsCodeSeven) {
  std::vector<uint16_t> codes(32, 0x38);
  codes[3] = 0x7F;
  codes[4] = 0xFF;
  for (const FormatId format : {FormatId::kNvfp4, FormatId::kMxfp4}) {
    for (const MathMode math : {MathMode::kExact, MathMode::kFast}) {
      const auto q = quantize_matrix(format, DType::kF8E4M3, codes, 1, with(math, 1.0F));
      EXPECT_EQ(q.codes[3], 7);
      EXPECT_EQ(q.codes[4], 7);
      EXPECT_NE(q.codes[0], 0);
    }
  }
}

// Every E4M3 maximum and every exponent of the scale: no NaN from finite input in exact.
TEST(Fp8Input, HasNoNanForAnyMaximumAndScaleExponentInExact) {
  for (const FormatId format : {FormatId::kNvfp4, FormatId::kMxfp4}) {
    std::vector<uint16_t> codes;
    for (uint16_t amax = 0; amax <= 0x7E; ++amax) {
      codes.push_back(amax);
      codes.push_back(amax | 0x80);
      codes.push_back(0x80);
      codes.resize(codes.size() + 29, 0x00);
    }
    for (int exponent = -149; exponent <= 127; ++exponent) {
      const auto q = quantize_matrix(format, DType::kF8E4M3, codes, 0x7F,
                                     with(MathMode::kExact, std::ldexp(1.0F, exponent)));
      for (const uint8_t scale : q.scales) {
        ASSERT_TRUE(format == FormatId::kNvfp4 ? scale <= 0x7E : scale <= 0xFE) << exponent;
      }
      for (size_t row = 0; row < 0x7F; ++row) {
        const uint8_t* block = &q.codes[32 * row];
        ASSERT_TRUE(block[0] < 8 && block[1] == block[0] + 8 && block[2] == 8 && block[3] == 0)
            << name(format) << " exponent " << exponent << " maximum " << row;
      }
    }
  }
}

}  // namespace
}  // namespace narrowfloat
