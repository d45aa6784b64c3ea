// NVFP4 with an encode scale and per token: every row of the tables of spec 6.1 and 6.2 through the
// public API, and the association of the scale products.
#include "formats/nvfp4.h"

#include <random>

#include <gtest/gtest.h>

#include "formats/float16.h"
#include "quantize_block.h"
#include "support/special_floats.h"

namespace narrowfloat {
namespace {

constexpr uint16_t kSmall = 0x3A83;  // About 1e-3.
constexpr uint16_t kMinusSmall = 0xBA83;
constexpr uint16_t kDenormal = 0x0040;  // 2^-127

Quantized nvfp4(const std::vector<uint16_t>& elements, const QuantizeOptions& options) {
  return quantize_bf16_row(FormatId::kNvfp4, elements, 16, options);
}

class Nvfp4Quantize : public ::testing::TestWithParam<MathMode> {};
INSTANTIATE_TEST_SUITE_P(Modes, Nvfp4Quantize, ::testing::Values(MathMode::kExact, MathMode::kFast),
                         [](const auto& mode) { return std::string(name(mode.param)); });

TEST_P(Nvfp4Quantize, MapsTheMaximumToSixAndRoundsTiesToEven) {
  // 6 gives scale 1, so elements are what E2M1 sees.
  const Quantized q =
      nvfp4({0x40C0, 0x3E80, 0x3F40, 0x3FA0, 0x3FE0, 0x4020, 0x4060, 0x40A0, 0xC0A0, 0x3E81},
            with(GetParam()));
  EXPECT_EQ(q.scales[0], 0x38);
  EXPECT_EQ(first_codes(q, 10), (Codes{7, 0, 2, 2, 4, 4, 6, 6, 14, 1}));
}

TEST_P(Nvfp4Quantize, StoresTheRoundedReciprocalOfTheEncodeScale) {
  for (const float g : {1.0F, 3.0F, 271.515F}) {
    EXPECT_EQ(nvfp4({kOne}, with(GetParam(), g)).global[0], 1.0F / g);
  }
}

TEST_P(Nvfp4Quantize, KeepsTheSignsOfAZeroBlock) {
  const Quantized q = nvfp4({kPlusZero, kMinusZero, kPlusZero, kMinusZero}, with(GetParam()));
  EXPECT_EQ(q.scales[0], 0x00);
  EXPECT_EQ(first_codes(q, 5), (Codes{0, 8, 0, 8, 0}));
}

TEST_P(Nvfp4Quantize, SaturatesInfinitiesAndMapsNanToTheLargestCode) {
  for (const float g : {1.0F, 448.0F}) {
    const Quantized q = nvfp4({kPlusInfinity, kMinusInfinity, kQuietNan, kSignallingNan, 0x4080},
                              with(GetParam(), g));
    EXPECT_EQ(q.scales[0], 0x7E);
    // Finite elements are scaled by 1 / (448 / g).
    const int code = E2M1::encode(4.0F / (448.0F / g));
    EXPECT_EQ(first_codes(q, 5), (Codes{7, 15, 7, 7, code})) << g;
  }
}

TEST_P(Nvfp4Quantize, GivesCodeSevenForNanAndLeavesTheOthersAlone) {
  for (const uint16_t nan : {kQuietNan, kSignallingNan}) {
    const Quantized q = nvfp4({0x40C0, nan, kMinusOne}, with(GetParam()));
    EXPECT_EQ(q.scales[0], 0x38);
    EXPECT_EQ(first_codes(q, 4), (Codes{7, 7, 10, 0}));
  }
}

TEST_P(Nvfp4Quantize, GivesANanScaleForABlockOfNanOnly) {
  const Quantized q = nvfp4(std::vector<uint16_t>(16, kSignallingNan), with(GetParam()));
  EXPECT_EQ(q.scales[0], 0x7F);
  EXPECT_EQ(first_codes(q, 16), Codes(16, 7));
}

TEST(Nvfp4QuantizeExact, KeepsZerosWhereTheScaleRoundsToZero) {
  const Quantized q = nvfp4({kSmall, kMinusSmall, kPlusZero, kMinusZero, kDenormal, 0x0001},
                            with(MathMode::kExact));
  EXPECT_EQ(q.scales[0], 0x00);
  // The multiplier is FLT_MAX: 2^-127 becomes 2, the smallest denormal 0.03.
  EXPECT_EQ(first_codes(q, 6), (Codes{7, 15, 0, 8, 4, 0}));
}

TEST(Nvfp4QuantizeFast, MakesNanOfZerosWhereTheScaleRoundsToZero) {
  const Quantized q =
      nvfp4({kSmall, kMinusSmall, kPlusZero, kMinusZero, kDenormal}, with(MathMode::kFast));
  EXPECT_EQ(q.scales[0], 0x00);
  EXPECT_EQ(first_codes(q, 5), (Codes{7, 15, 7, 7, 7}));
}

TEST(Nvfp4Quantize, CountsDenormalElementsInExactAndFlushesThemInFast) {
  // 2^-123 beside almost 2^-126, with an encode scale that gives the block the scale 2^-4.
  const float g = 6.0F * 0x1p119F;
  const std::vector<uint16_t> block{0x0200, 0x007F, 0x807F};
  const Quantized exact = nvfp4(block, with(MathMode::kExact, g));
  const Quantized fast = nvfp4(block, with(MathMode::kFast, g));
  EXPECT_EQ(exact.scales[0], 0x18);
  EXPECT_EQ(fast.scales[0], 0x18);
  EXPECT_EQ(first_codes(exact, 3), (Codes{7, 1, 9}));
  EXPECT_EQ(first_codes(fast, 3), (Codes{7, 0, 8}));
}

TEST(Nvfp4Quantize, TreatsABlockOfDenormalsAsABlockInExactAndAsZerosInFast) {
  const std::vector<uint16_t> block{0x007F, 0x8040, kPlusZero, kMinusZero};
  const Quantized exact = nvfp4(block, with(MathMode::kExact, kFloatMax));
  EXPECT_NE(exact.scales[0], 0x00);
  // The multiplier is clamped to FLT_MAX, which makes 3.97 and -2 of the first two.
  EXPECT_EQ(first_codes(exact, 4), (Codes{6, 12, 0, 8}));
  const Quantized fast = nvfp4(block, with(MathMode::kFast, kFloatMax));
  EXPECT_EQ(fast.scales[0], 0x00);
  EXPECT_EQ(first_codes(fast, 4), (Codes{0, 8, 0, 8}));
}

TEST(Nvfp4Quantize, WorksWithAHugeEncodeScaleInExactOnly) {
  const std::vector<uint16_t> block{0x0200, kPlusZero, 0x8180};
  const Quantized exact = nvfp4(block, with(MathMode::kExact, kFloatMax));
  EXPECT_EQ(first_codes(exact, 3), (Codes{7, 0, 13}));
  // rcp(g) is zero, so the multiplier is infinite.
  const Quantized fast = nvfp4(block, with(MathMode::kFast, kFloatMax));
  EXPECT_EQ(first_codes(fast, 3), (Codes{7, 7, 15}));
}

TEST(Nvfp4Quantize, GivesAZeroBlockANanScaleForAnInfiniteDeviceScaleInFastOnly) {
  for (const MathMode math : {MathMode::kExact, MathMode::kFast}) {
    QuantizeOptions options;
    options.math = math;
    options.encode_scales = TensorView::contiguous(&kFloatInfinity, DType::kF32, {1});
    EXPECT_EQ(nvfp4({kPlusZero}, options).scales[0], math == MathMode::kExact ? 0x00 : 0x7F);
  }
}

// Finite input never gives a NaN scale, a NaN code (which would have no sign, or be non-zero for a
// zero) or a non-finite decode scale.
TEST(Nvfp4QuantizeExact, HasNoNanForAnyBf16MaximumAndManyEncodeScales) {
  const std::vector<uint16_t> elements = rows_of_every_bf16_maximum(16);
  std::vector<float> scales{kFloatMax, 0x1p-149F, 0x1.8p126F, 2688.0F};
  for (int exponent = -148; exponent < 128; exponent += 35) {
    scales.push_back(std::ldexp(1.37F, exponent));
  }
  for (const float g : scales) {
    const Quantized q = quantize_matrix(FormatId::kNvfp4, DType::kBF16, elements, 0x7F7F,
                                        with(MathMode::kExact, g));
    for (size_t row = 0; row < 0x7F7F; ++row) {
      const uint8_t* codes = &q.codes[16 * row];
      ASSERT_LE(q.scales[row], 0x7E) << "g " << g << ", maximum " << row + 1;
      ASSERT_TRUE(codes[0] < 8 && codes[1] == codes[0] + 8 && codes[2] >= 8 && codes[2] <= codes[1])
          << "g " << g << ", maximum " << row + 1;
      ASSERT_TRUE(codes[3] == 8 && codes[4] == 0 && codes[15] == 0) << row + 1;
    }
  }
}

// Spec 17.6: amax * (g / 6) in exact, g * (amax / 6) in fast.
TEST(Nvfp4BlockScale, AssociatesTheProductAsTheModeSays) {
  std::mt19937 random(4);
  int differing = 0;
  for (int i = 0; i < 300000; ++i) {
    // Products next to a tie of E4M3: halfway between 1 + k/8 and its neighbour.
    const float tie = 1.0625F + static_cast<float>(random() % 8) * 0.125F;
    const float g = bits_float(0x43000000U | (random() & 0x7FFFFFU));
    const float near = 6.0F * tie / g;
    const float amax = bits_float(float_bits(near) + static_cast<uint32_t>(random() % 5) - 2);
    const uint8_t exact = E4M3::encode(amax * (g * kOneSixth));
    const uint8_t fast = E4M3::encode(g * (amax * kOneSixth));
    if (exact == fast) continue;
    ++differing;
    const auto exact_scale =
        Nvfp4::block_scale<ExactMath>(amax, Nvfp4::scale_pair<ExactMath>(g), BlockRules{});
    const auto fast_scale =
        Nvfp4::block_scale<FastMath>(amax, Nvfp4::scale_pair<FastMath>(g), BlockRules{});
    EXPECT_EQ(exact_scale.stored, exact);
    EXPECT_EQ(fast_scale.stored, fast);
  }
  EXPECT_GT(differing, 0);
}

// --- Per token ---

Quantized per_token(const std::vector<uint16_t>& elements, MathMode math) {
  return quantize_bf16_row(FormatId::kNvfp4PerToken, elements, 16, in(math));
}

std::vector<uint16_t> three_blocks(uint16_t a, uint16_t b, uint16_t c) {
  std::vector<uint16_t> row(48, kPlusZero);
  row[0] = a;
  row[16] = b;
  row[32] = c;
  return row;
}

TEST(Nvfp4PerToken, ScalesEachRowByItsOwnMaximum) {
  for (const MathMode math : {MathMode::kExact, MathMode::kFast}) {
    std::vector<uint16_t> rows(32, kPlusZero);
    rows[0] = kOne;
    rows[17] = 0xC3E0;  // -448
    const Quantized q = quantize_matrix(FormatId::kNvfp4PerToken, DType::kBF16, rows, 2, in(math));
    EXPECT_EQ(q.scales, (std::vector<uint8_t>{0x7E, 0x7E}));
    EXPECT_FLOAT_EQ(q.global[0], 1.0F / 2688.0F);
    EXPECT_FLOAT_EQ(q.global[1], 448.0F / 2688.0F);
    EXPECT_EQ(q.codes[0], 7);
    EXPECT_EQ(q.codes[17], 15);
  }
}

TEST(Nvfp4PerToken, GivesAZeroRowScaleZeroAndNanBlockScalesInFastOnly) {
  const auto row = three_blocks(kMinusZero, kPlusZero, kPlusZero);
  const Quantized exact = per_token(row, MathMode::kExact);
  EXPECT_EQ(float_bits(exact.global[0]), 0U);
  EXPECT_EQ(exact.scales, (std::vector<uint8_t>{0, 0, 0}));
  EXPECT_EQ(first_codes(exact, 2), (Codes{8, 0}));
  const Quantized fast = per_token(row, MathMode::kFast);
  EXPECT_EQ(float_bits(fast.global[0]), 0U);
  EXPECT_EQ(fast.scales, (std::vector<uint8_t>{0x7F, 0x7F, 0x7F}));
  EXPECT_EQ(first_codes(fast, 2), (Codes{8, 0}));
}

TEST(Nvfp4PerToken, HandlesRowsSoSmallThatTheRowScaleFlushes) {
  // 2^-116, a zero block, and 2^-125, whose sixth flushes.
  const auto row = three_blocks(0x0580, kMinusZero, 0x0100);
  const Quantized fast = per_token(row, MathMode::kFast);
  EXPECT_EQ(float_bits(fast.global[0]), 0U);
  EXPECT_EQ(fast.scales, (std::vector<uint8_t>{0x7E, 0x7F, 0x7F}));
  EXPECT_EQ(first_codes(fast, 18), (Codes{7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 8, 0}));
  EXPECT_EQ(fast.codes[32], 7);
  const Quantized exact = per_token(row, MathMode::kExact);
  EXPECT_FLOAT_EQ(exact.global[0], 0x1p-116F / 2688.0F);
  EXPECT_EQ(exact.scales[0], 0x7E);
  EXPECT_EQ(first_codes(exact, 18), (Codes{7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 8, 0}));
}

TEST(Nvfp4PerToken, ClampsTheEncodeFactorOfTinyRowsInExact) {
  const Quantized q = per_token({0x0480}, MathMode::kExact);  // 2^-118 < 7.9e-36
  EXPECT_EQ(float_bits(q.global[0]), 0x00200000U);
  EXPECT_EQ(q.codes[0], 7);
}

TEST(Nvfp4PerToken, TakesFactorOneForARowWithAnInfinityInExact) {
  const auto row = three_blocks(kMinusInfinity, kPlusZero, 0x40C0);
  const Quantized exact = per_token(row, MathMode::kExact);
  EXPECT_EQ(exact.global[0], 1.0F);
  EXPECT_EQ(exact.scales, (std::vector<uint8_t>{0x7E, 0x00, 0x38}));
  EXPECT_EQ(exact.codes[0], 15);
  EXPECT_EQ(exact.codes[32], 7);
  const Quantized fast = per_token(row, MathMode::kFast);
  EXPECT_EQ(fast.global[0], kFloatInfinity);
  EXPECT_EQ(fast.scales, (std::vector<uint8_t>{0x7F, 0x00, 0x00}));
  EXPECT_EQ(fast.codes[0], 7);
  EXPECT_EQ(fast.codes[16], 0);
  EXPECT_EQ(fast.codes[32], 7);
}

TEST(Nvfp4PerToken, GivesRowScaleZeroForNanAndZeros) {
  std::vector<uint16_t> row(32, kQuietNan);
  row[16] = kMinusZero;
  const Quantized exact = per_token(row, MathMode::kExact);
  EXPECT_EQ(float_bits(exact.global[0]), 0U);
  EXPECT_EQ(exact.scales, (std::vector<uint8_t>{0x7F, 0x00}));
  EXPECT_EQ(exact.codes[0], 7);
  EXPECT_EQ(exact.codes[16], 8);
  EXPECT_EQ(exact.codes[17], 7);
  const Quantized fast = per_token(row, MathMode::kFast);
  EXPECT_EQ(float_bits(fast.global[0]), 0U);
  EXPECT_EQ(fast.scales, (std::vector<uint8_t>{0x7F, 0x7F}));
  EXPECT_EQ(fast.codes[16], 8);
  EXPECT_EQ(fast.codes[17], 7);
}

TEST(Nvfp4PerToken, ReturnsZeroRowScalesForNoColumns) {
  for (const MathMode math : {MathMode::kExact, MathMode::kFast}) {
    std::vector<float> global(3, -1.0F);
    const QuantizedLayout layout = quantized_layout(FormatId::kNvfp4PerToken, 3, 0);
    quantize(TensorView::contiguous(nullptr, DType::kBF16, {3, 0}),
             layout.bind(nullptr, nullptr, global.data()), in(math));
    EXPECT_EQ(global, (std::vector<float>{0.0F, 0.0F, 0.0F}));
  }
}

TEST(Nvfp4PerToken, DefaultBaseIsTheReciprocalOfTheRange) {
  const auto scale = [](float base) {
    return Nvfp4PerToken::row_scale<ExactMath>(1.0F, base).pair.encode;
  };
  EXPECT_EQ(scale(bits_float(0x39C30C31U)), 2688.0F);
  EXPECT_EQ(scale(bits_float(0x3A2AAAABU)), 1536.0F);
  EXPECT_EQ(float_bits(per_token({kOne}, MathMode::kFast).global[0]), 0x39C30C31U);
}

// Spec 6.2: fast multiplies by the row scale itself. Taking its reciprocal twice differs on some
// rows of small integers, whose elements are often ties.
TEST(Nvfp4PerToken, NeverTakesTheReciprocalOfAReciprocal) {
  int differing = 0;
  for (int amax = 1; amax <= 2000; ++amax) {
    const auto scale =
        Nvfp4PerToken::row_scale<FastMath>(static_cast<float>(amax), bits_float(0x39C30C31U));
    const float twice = FastMath::rcp(FastMath::rcp(scale.stored));
    for (int block = 1; block <= amax; block += 1 + amax / 16) {
      const auto got =
          Nvfp4PerToken::block_scale<FastMath>(static_cast<float>(block), scale.pair, BlockRules{});
      const float s = E4M3::decode(got.stored);
      EXPECT_EQ(got.multiplier, FastMath::rcp(FastMath::mul(s, scale.stored)));
      differing += got.multiplier != FastMath::rcp(FastMath::mul(s, twice)) ? 1 : 0;
    }
  }
  EXPECT_GT(differing, 0);
}

}  // namespace
}  // namespace narrowfloat
