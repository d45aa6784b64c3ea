// FP8 with F32 scales: every row of the table of spec 6.7 through the public API, the four rules,
// and the counts over all bf16 maxima that the specification states.
#include "formats/fp8_block.h"

#include <gtest/gtest.h>

#include "formats/float16.h"
#include "quantize_block.h"
#include "support/special_floats.h"

namespace narrowfloat {
namespace {

constexpr float kBf16Max = 0x1.fep127F;

QuantizeOptions by(Fp8ScaleRule rule, float eps) {
  QuantizeOptions options;
  options.fp8_rule = rule;
  options.fp8_eps = eps;
  return options;
}

struct ScaledBlock {
  float scale;
  Codes codes;
};

ScaledBlock fp8(const std::vector<uint16_t>& elements, const QuantizeOptions& options) {
  const Quantized q = quantize_bf16_row(FormatId::kFp8Block1x128, elements, 16, options);
  return {q.f32_scales.at(0), first_codes(q, elements.size())};
}

void expect_block(const ScaledBlock& block, float scale, const Codes& codes) {
  EXPECT_EQ(float_bits(block.scale), float_bits(scale)) << block.scale;
  EXPECT_EQ(block.codes, codes);
}

TEST(Fp8Block, GivesAZeroBlockScaleOneAndKeepsItsSigns) {
  for (const MathMode math : {MathMode::kExact, MathMode::kFast}) {
    expect_block(fp8({kPlusZero, kMinusZero}, in(math)), 1.0F, {0x00, 0x80});
  }
}

TEST(Fp8Block, MapsTheMaximumTo448) {
  for (const MathMode math : {MathMode::kExact, MathMode::kFast}) {
    expect_block(fp8({0x4360, 0xC2E0, kPlusZero}, in(math)), 0.5F, {0x7E, 0xF6, 0x00});
  }
}

TEST(Fp8Block, HandlesDenormalMaxima) {
  for (const uint16_t amax : {uint16_t{0x0001}, uint16_t{0x007F}}) {
    const ScaledBlock exact = fp8({amax, kMinusZero}, in(MathMode::kExact));
    EXPECT_EQ(float_bits(exact.scale), 0x00202020U);
    EXPECT_EQ(exact.codes[0], E4M3::encode(bf16_to_float(amax) * kBf16Max));
    EXPECT_EQ(exact.codes[1], 0x80);
    expect_block(fp8({amax, kMinusZero}, in(MathMode::kFast)), 0.0F, {0x7F, 0x7F});
  }
}

TEST(Fp8Block, HandlesMaximaWhoseMultiplierOverflows) {
  const std::vector<uint16_t> block{0x0300, 0x8300, kPlusZero, 0x0001};
  const ScaledBlock exact = fp8(block, in(MathMode::kExact));
  EXPECT_EQ(float_bits(exact.scale), 0x00202020U);
  EXPECT_EQ(exact.codes[2], 0x00);
  EXPECT_EQ(exact.codes[1], exact.codes[0] | 0x80);
  expect_block(fp8(block, in(MathMode::kFast)), 0.0F, {0x7E, 0xFE, 0x7F, 0x7F});
}

TEST(Fp8Block, HandlesMaximaAbove2To126) {
  const std::vector<uint16_t> block{0x7F00, 0xFF00, kPlusZero, kMinusOne};
  expect_block(fp8(block, in(MathMode::kExact)), 1.0F / (448.0F / 0x1p127F),
               {0x7E, 0xFE, 0x00, 0x80});
  expect_block(fp8(block, in(MathMode::kFast)), kFloatInfinity, {0x00, 0x80, 0x00, 0x80});
}

TEST(Fp8Block, HandlesInfinities) {
  const std::vector<uint16_t> block{kPlusInfinity, kMinusInfinity, kMinusOne, 0x7F00, kPlusZero};
  expect_block(fp8(block, in(MathMode::kExact)), 1.0F, {0x7E, 0xFE, 0xB8, 0x7E, 0x00});
  expect_block(fp8(block, in(MathMode::kFast)), kFloatInfinity, {0x7F, 0x7F, 0x80, 0x00, 0x00});
}

TEST(Fp8Block, GivesNanElementsTheNanCodeAndABlockOfThemScaleOne) {
  for (const MathMode math : {MathMode::kExact, MathMode::kFast}) {
    expect_block(fp8({0x43E0, kQuietNan, kSignallingNan}, in(math)), 1.0F, {0x7E, 0x7F, 0x7F});
    expect_block(fp8(std::vector<uint16_t>(16, kSignallingNan), in(math)), 1.0F, Codes(16, 0x7F));
  }
}

// Rows of one 16-column block with one maximum each.
std::vector<uint16_t> rows_of_every_positive_bf16() {
  std::vector<uint16_t> elements;
  for (uint32_t code = 1; code <= 0x7F7F; ++code) {
    elements.push_back(static_cast<uint16_t>(code));
    elements.resize(elements.size() + 15, kMinusZero);
  }
  return elements;
}

TEST(Fp8Block, ReciprocalHasTheStatedNumbersOfSpecialMaxima) {
  const auto elements = rows_of_every_positive_bf16();
  constexpr int64_t kRows = 0x7F7F;
  const auto format = FormatId::kFp8Block1x128;
  const auto exact = quantize_matrix(format, DType::kBF16, elements, kRows, in(MathMode::kExact));
  const auto fast = quantize_matrix(format, DType::kBF16, elements, kRows, in(MathMode::kFast));
  int clamped_denormal = 0;
  int clamped_normal = 0;
  int infinite_scale = 0;
  int differing = 0;
  for (size_t row = 0; row < static_cast<size_t>(kRows); ++row) {
    const bool is_denormal = row + 1 < 0x80;
    const bool is_clamped = float_bits(exact.f32_scales[row]) == 0x00202020U;
    clamped_denormal += is_clamped && is_denormal ? 1 : 0;
    if (is_clamped && !is_denormal) {
      ++clamped_normal;
      EXPECT_EQ(fast.f32_scales[row], 0.0F);
      EXPECT_EQ(fast.codes[16 * row], 0x7E);
      EXPECT_EQ(fast.codes[16 * row + 1], 0x7F);
    }
    infinite_scale += fast.f32_scales[row] == kFloatInfinity ? 1 : 0;
    const bool differs = float_bits(exact.f32_scales[row]) != float_bits(fast.f32_scales[row]);
    differing += differs ? 1 : 0;
  }
  EXPECT_EQ(clamped_denormal, 127);
  EXPECT_EQ(clamped_normal, 865);
  EXPECT_EQ(infinite_scale, 255);
  EXPECT_EQ(differing, 9774);
}

TEST(Fp8Block, ReciprocalAndQuotientDifferAsOftenAsStated) {
  int multipliers = 0;
  int quotients = 0;
  for (uint32_t code = 1; code <= 0x7F7F; ++code) {
    const float a = bf16_to_float(static_cast<uint16_t>(code));
    const auto fast = Fp8Block1x128::block_scale<FastMath>(a, ScalePair{}, BlockRules{});
    multipliers += fast.multiplier != 448.0F / a ? 1 : 0;
    quotients += 1.0F / (448.0F / a) != a / 448.0F ? 1 : 0;
  }
  EXPECT_EQ(multipliers, 9338);
  EXPECT_EQ(quotients, 10825);
}

TEST(Fp8Block, HasNoNanAndFiniteScalesForEveryFiniteMaximumAndRuleInExact) {
  const auto elements = rows_of_every_bf16_maximum(16);
  for (const Fp8ScaleRule rule : {Fp8ScaleRule::kReciprocal, Fp8ScaleRule::kReciprocalPow2,
                                  Fp8ScaleRule::kAmaxDiv, Fp8ScaleRule::kPow2Ceil}) {
    QuantizeOptions options;
    options.fp8_rule = rule;
    const auto q =
        quantize_matrix(FormatId::kFp8Block1x128, DType::kBF16, elements, 0x7F7F, options);
    for (size_t row = 0; row < 0x7F7F; ++row) {
      const uint8_t* codes = &q.codes[16 * row];
      const float scale = q.f32_scales[row];
      ASSERT_TRUE(scale > 0.0F && scale < kFloatInfinity) << name(rule) << " " << row + 1;
      ASSERT_TRUE(codes[0] <= 0x7E && codes[1] == codes[0] + 0x80 && codes[2] >= 0x80 &&
                  codes[2] <= codes[1])
          << name(rule) << " " << row + 1;
      ASSERT_TRUE(codes[3] == 0x80 && codes[4] == 0x00) << name(rule) << " " << row + 1;
    }
  }
}

TEST(Fp8Block, RulesScaleAsWritten) {
  const std::vector<uint16_t> block{0x4040};  // 3
  const float m = 448.0F / 3.0F;              // 149.3
  expect_block(fp8(block, by(Fp8ScaleRule::kReciprocal, 0.0F)), 1.0F / m, {0x7E});
  expect_block(fp8(block, by(Fp8ScaleRule::kReciprocalPow2, 0.0F)), 1.0F / 128.0F, {0x7C});
  expect_block(fp8(block, by(Fp8ScaleRule::kAmaxDiv, 1e-4F)), 3.0F / 448.0F, {0x7E});
  expect_block(fp8(block, by(Fp8ScaleRule::kPow2Ceil, 1e-4F)), 1.0F / 128.0F, {0x7C});
  // A quotient that is a power of two already stays.
  expect_block(fp8({0x4360}, by(Fp8ScaleRule::kPow2Ceil, 1e-4F)), 0.5F, {0x7E});
}

TEST(Fp8Block, EpsIsTheFloorOfTheMaximum) {
  for (const Fp8ScaleRule rule : {Fp8ScaleRule::kReciprocal, Fp8ScaleRule::kAmaxDiv}) {
    // 7 * 2^-2 = 1.75 and 2^-9 of its scale: E4M3 448 is never reached.
    const ScaledBlock block = fp8({0x3E80, kPlusZero}, by(rule, 7.0F));
    EXPECT_EQ(block.scale, 1.0F / 64.0F);
    EXPECT_EQ(block.codes, (Codes{E4M3::encode(16.0F), 0x00}));
    EXPECT_EQ(fp8({kPlusZero}, by(rule, 7.0F)).scale, 1.0F / 64.0F);
  }
}

TEST(Fp8Block, DefaultEpsIsOneTenThousandthForTheDividingRules) {
  QuantizeOptions options;
  options.fp8_rule = Fp8ScaleRule::kAmaxDiv;
  EXPECT_EQ(fp8({kPlusZero}, options).scale, 1e-4F / 448.0F);
  options.fp8_rule = Fp8ScaleRule::kReciprocalPow2;
  EXPECT_EQ(fp8({kPlusZero}, options).scale, 1.0F);
}

TEST(Fp8Block, RulesOtherThanReciprocalAreTheSameInFast) {
  for (const Fp8ScaleRule rule :
       {Fp8ScaleRule::kReciprocalPow2, Fp8ScaleRule::kAmaxDiv, Fp8ScaleRule::kPow2Ceil}) {
    for (const uint16_t amax : {uint16_t{0x0001}, uint16_t{0x4040}, uint16_t{0x7F00}}) {
      QuantizeOptions options;
      options.fp8_rule = rule;
      const ScaledBlock exact = fp8({amax, kMinusOne}, options);
      options.math = MathMode::kFast;
      expect_block(fp8({amax, kMinusOne}, options), exact.scale, exact.codes);
    }
  }
}

TEST(Fp8Block, ClampsToTheLargestNumberOfTheInputType) {
  // F16 maxima are never small enough; 16-bit and 32-bit inputs clamp differently.
  const float tiny = 0x1p-140F;
  const BlockRules bf16{.input_max = kBf16Max};
  const BlockRules f32{.input_max = kFloatMax};
  EXPECT_EQ(Fp8Block1x128::block_scale<ExactMath>(tiny, {}, bf16).multiplier, kBf16Max);
  EXPECT_EQ(Fp8Block1x128::block_scale<ExactMath>(tiny, {}, f32).multiplier, kFloatMax);
}

TEST(Fp8Block, TakesAllElementsOfA128x128TileIntoItsMaximum) {
  // The maximum in each corner of the last, partial tile.
  constexpr int64_t kRows = 130;
  constexpr int64_t kCols = 144;
  for (const auto& [row, col] :
       std::vector<std::pair<int64_t, int64_t>>{{128, 128}, {128, 143}, {129, 128}, {129, 143}}) {
    std::vector<uint16_t> elements(static_cast<size_t>(kRows * kCols), kOne);
    elements[static_cast<size_t>(row * kCols + col)] = 0xC360;  // -224
    const auto q = quantize_matrix(FormatId::kFp8Block128x128, DType::kBF16, elements, kRows);
    const float of_one = 1.0F / 448.0F;
    ASSERT_EQ(q.f32_scales.size(), 4U);
    EXPECT_EQ(q.f32_scales[0], of_one);
    EXPECT_EQ(q.f32_scales[1], of_one);
    EXPECT_EQ(q.f32_scales[2], of_one);
    EXPECT_EQ(q.f32_scales[3], 0.5F);
    EXPECT_EQ(q.codes[static_cast<size_t>(row * kCols + col)], 0xFE);
    EXPECT_EQ(q.codes[0], 0x7E);
  }
}

TEST(Fp8Tensor, TakesAGivenDecodeScaleInsteadOfTheMaximum) {
  QuantizeOptions options;
  options.fp8_decode_scale = 2.0F;
  const std::vector<uint16_t> elements(32, 0x4040);  // 3
  const auto q = quantize_matrix(FormatId::kFp8Tensor, DType::kBF16, elements, 2, options);
  EXPECT_EQ(q.f32_scales, (std::vector<float>{2.0F}));
  EXPECT_EQ(q.codes[0], E4M3::encode(1.5F));
  const auto computed = quantize_matrix(FormatId::kFp8Tensor, DType::kBF16, elements, 2);
  EXPECT_EQ(computed.f32_scales, (std::vector<float>{1.0F / (448.0F / 3.0F)}));
}

TEST(Fp8Tensor, KeepsZerosWithATinyGivenScale) {
  QuantizeOptions options;
  options.fp8_decode_scale = 0x1p-149F;
  const auto q = quantize_matrix(FormatId::kFp8Tensor, DType::kBF16,
                                 std::vector<uint16_t>(16, kMinusZero), 1, options);
  EXPECT_EQ(q.codes[0], 0x80);
}

}  // namespace
}  // namespace narrowfloat
