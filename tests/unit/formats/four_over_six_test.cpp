// 4-over-6 (spec 6.3): which candidate is kept, and that it never loses to plain NVFP4.
#include "formats/four_over_six.h"

#include <random>

#include <gtest/gtest.h>

#include "formats/float16.h"
#include "quantize_block.h"

namespace narrowfloat {
namespace {

QuantizeOptions four_over_six(MathMode math = MathMode::kExact, float encode_scale = 1.0F) {
  QuantizeOptions options;
  options.math = math;
  options.encode_scale = encode_scale;
  options.four_over_six.enabled = true;
  return options;
}

Quantized quantize_block(const std::vector<uint16_t>& elements, const QuantizeOptions& options) {
  return quantize_bf16_row(FormatId::kNvfp4, elements, 16, options);
}

TEST(FourOverSix, DropsTheSignsOfAZeroBlock) {
  for (const MathMode math : {MathMode::kExact, MathMode::kFast}) {
    const auto q = quantize_block({kMinusZero, kPlusZero, kMinusZero}, four_over_six(math));
    EXPECT_EQ(q.scales[0], 0x00);
    EXPECT_EQ(first_codes(q, 3), (Codes{0, 0, 0}));
  }
  // Plain NVFP4 keeps them.
  QuantizeOptions plain;
  plain.encode_scale = 1.0F;
  EXPECT_EQ(quantize_block({kMinusZero}, plain).codes[0], 8);
}

TEST(FourOverSix, CountsABlockOfDenormalsAsZeroInFastOnly) {
  const std::vector<uint16_t> block{0x8040, 0x0001};
  EXPECT_EQ(quantize_block(block, four_over_six(MathMode::kFast)).codes[0], 0);
  EXPECT_NE(quantize_block(block, four_over_six(MathMode::kExact)).codes[0], 0);
}

TEST(FourOverSix, KeepsSixOnATie) {
  for (const FourOverSixError error : {FourOverSixError::kMae, FourOverSixError::kMse}) {
    for (const FourOverSixMath error_math : {FourOverSixMath::kStrict, FourOverSixMath::kFast}) {
      for (const MathMode math : {MathMode::kExact, MathMode::kFast}) {
        // +-6 and 0 are exact with both scales, 1 and 1.5.
        QuantizeOptions options = four_over_six(math);
        options.four_over_six.error = error;
        options.four_over_six.error_math = error_math;
        const auto q = quantize_block({0x40C0, 0xC0C0, kPlusZero}, options);
        EXPECT_EQ(q.scales[0], 0x38);
        EXPECT_EQ(first_codes(q, 3), (Codes{7, 15, 0}));
      }
    }
  }
}

TEST(FourOverSix, TakesFourWhereItIsCloser) {
  // 4.5 is 3 * 1.5 but lies between 4 and 6 on the grid of scale 1.
  for (const MathMode math : {MathMode::kExact, MathMode::kFast}) {
    const auto q = quantize_block({0x40C0, 0x4090, 0xC090}, four_over_six(math));
    EXPECT_EQ(q.scales[0], 0x3C);
    EXPECT_EQ(first_codes(q, 3), (Codes{6, 5, 13}));
  }
}

TEST(FourOverSix, ErrorMeasureDecidesBetweenManySmallAndOneLargeError) {
  std::mt19937 random(5);
  int disagreements = 0;
  for (int i = 0; i < 500; ++i) {
    std::vector<uint16_t> block;
    for (int j = 0; j < 16; ++j) {
      block.push_back(float_to_bf16(static_cast<float>(random() % 768) / 128.0F));
    }
    QuantizeOptions options = four_over_six();
    const auto mae = quantize_block(block, options);
    options.four_over_six.error = FourOverSixError::kMse;
    const auto mse = quantize_block(block, options);
    disagreements += mae.scales != mse.scales ? 1 : 0;
  }
  EXPECT_GT(disagreements, 5);
}

TEST(FourOverSix, KeepsSixForNanAndInfinityInTheBlock) {
  for (const MathMode math : {MathMode::kExact, MathMode::kFast}) {
    // Without the NaN, 4 would be kept (above).
    const auto with_nan = quantize_block({0x40C0, 0x4090, 0xC090, kQuietNan}, four_over_six(math));
    EXPECT_EQ(with_nan.scales[0], 0x38);
    EXPECT_EQ(first_codes(with_nan, 4), (Codes{7, 6, 14, 7}));
    const auto with_infinity = quantize_block({kMinusInfinity, kOne}, four_over_six(math));
    EXPECT_EQ(with_infinity.scales[0], 0x7E);
    EXPECT_EQ(with_infinity.codes[0], 15);
  }
}

TEST(FourOverSix, SaturatesBothScalesAt448) {
  const auto q = quantize_block({0x40C0}, four_over_six(MathMode::kExact, 1e6F));
  EXPECT_EQ(q.scales[0], 0x7E);
}

TEST(FourOverSix, SmallerScaleRangeOnlyChangesTheComputedEncodeScale) {
  QuantizeOptions options;
  options.four_over_six.enabled = true;
  const std::vector<uint16_t> block{0x40C0, kOne};
  EXPECT_EQ(quantize_block(block, options).global[0], 1.0F / 448.0F);
  options.four_over_six.e4m3_max = 256;
  EXPECT_EQ(quantize_block(block, options).global[0], 1.0F / 256.0F);
  options.encode_scale = 3.0F;
  EXPECT_EQ(quantize_block(block, options).global[0], 1.0F / 3.0F);
}

// Sum of the absolute decoding errors in double.
double total_error(const std::vector<uint16_t>& block, const Quantized& q) {
  double error = 0;
  for (size_t i = 0; i < block.size(); ++i) {
    const double decoded =
        static_cast<double>(E2M1::decode(q.codes[i])) * E4M3::decode(q.scales[0]) * q.global[0];
    error += std::fabs(decoded - bf16_to_float(block[i]));
  }
  return error;
}

TEST(FourOverSix, NeverLosesToPlainNvfp4AndOftenWins) {
  std::mt19937 random(6);
  int wins = 0;
  for (int i = 0; i < 1000; ++i) {
    std::vector<uint16_t> block;
    for (int j = 0; j < 16; ++j) {
      block.push_back(float_to_bf16(static_cast<float>(random() % 4096) / 512.0F - 4.0F));
    }
    const float g = 100.0F;
    QuantizeOptions plain;
    plain.encode_scale = g;
    const double plain_error = total_error(block, quantize_block(block, plain));
    const double error = total_error(block, quantize_block(block, four_over_six({}, g)));
    ASSERT_LE(error, plain_error * (1 + 1e-5)) << i;
    wins += error < plain_error * 0.99 ? 1 : 0;
  }
  EXPECT_GT(wins, 200);
}

// The order of the sum is part of the contract: two half sums flip some decisions.
TEST(FourOverSix, SumsTheErrorsInIndexOrder) {
  const auto fast_error = [](const float* x, const FourOverSixBlock& block, int first, int last) {
    float sum = 0.0F;
    for (int i = first; i < last; ++i) {
      sum += std::fabs(E2M1::decode(block.codes[i]) * E4M3::decode(block.stored) - x[i]);
    }
    return sum;
  };
  std::mt19937 random(8);
  int flipped = 0;
  for (int i = 0; i < 50000; ++i) {
    float x[16];
    float amax = 0.0F;
    for (float& element : x) {
      element = 0.3F * static_cast<float>(random() % 32);
      amax = std::max(amax, element);
    }
    const auto candidate = [&](float scale) {
      FourOverSixBlock block{};
      block.stored = E4M3::encode(scale);
      const float m = 1.0F / E4M3::decode(block.stored);
      for (int j = 0; j < 16; ++j) block.codes[j] = E2M1::encode(x[j] * m);
      return block;
    };
    const FourOverSixBlock six = candidate(amax / 6.0F);
    const FourOverSixBlock four = candidate(amax / 6.0F * 1.5F);
    const bool keeps_four = fast_error(x, four, 0, 16) < fast_error(x, six, 0, 16);
    const bool halves_keep_four = fast_error(x, four, 0, 8) + fast_error(x, four, 8, 16) <
                                  fast_error(x, six, 0, 8) + fast_error(x, six, 8, 16);
    const auto got = FourOverSixSearch<ExactMath>::encode(x, amax, ScalePair{}, {});
    ASSERT_EQ(got.stored, keeps_four ? four.stored : six.stored) << i;
    flipped += keeps_four != halves_keep_four ? 1 : 0;
  }
  EXPECT_GT(flipped, 0);
}

}  // namespace
}  // namespace narrowfloat
