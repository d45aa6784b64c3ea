// quantize() against a second transcription of the formulas (plain_model.h), on data chosen so that
// near misses of the arithmetic show: a reassociated product, a flush too many or too few, another
// reciprocal, a contracted multiply-add.
#include <array>
#include <cmath>

#include <gtest/gtest.h>

#include "base/host_device.h"
#include "support/tensors.h"
#include "unit/ops/quantize/plain_model.h"

namespace narrowfloat::testing {
namespace {

constexpr int64_t kModelRows = 4000;

std::vector<float> block_of(const Matrix& input, int64_t row) {
  std::vector<float> x(static_cast<size_t>(input.shape().cols));
  for (size_t i = 0; i < x.size(); ++i) x[i] = input.at(row, static_cast<int64_t>(i));
  return x;
}

// The one block of a row, one code a byte.
ModelBlock stored_block(const QuantizedTensor& tensor, int64_t row) {
  const bool is_packed = format_info(tensor.layout.format).element_bits == 4;
  const int64_t bytes = is_packed ? tensor.layout.cols / 2 : tensor.layout.cols;
  ModelBlock block{.scale = tensor.scales.data()[row], .codes = {}};
  for (const uint8_t byte :
       tensor.values.span().subspan(static_cast<size_t>(row * bytes), static_cast<size_t>(bytes))) {
    block.codes.push_back(is_packed ? byte & 0xF : byte);
    if (is_packed) block.codes.push_back(byte >> 4);
  }
  return block;
}

void expect_block(const ModelBlock& expected, const ModelBlock& actual, int64_t row) {
  ASSERT_EQ(expected.scale, actual.scale) << "scale of row " << row;
  ASSERT_EQ(expected.codes, actual.codes) << "codes of row " << row;
}

// A row is one block whose maximum times g / 6 lies within some ulps of a midpoint of E4M3, which
// is where the association of the scale product shows.
Matrix rows_near_scale_ties(float g, uint64_t seed) {
  Matrix input({.dtype = DType::kF32, .rows = kModelRows, .cols = 16});
  Random random(seed);
  for (int64_t row = 0; row < kModelRows; ++row) {
    const auto code = static_cast<uint8_t>(random.range(8, 125));
    const double midpoint = (static_cast<double>(model_e4m3_value(code)) +
                             static_cast<double>(model_e4m3_value(code + 1))) /
                            2;
    const auto tie = static_cast<float>(midpoint * 6 / static_cast<double>(g));
    const float amax = bits_float(float_bits(tie) + static_cast<uint32_t>(random.range(-2, 2)));
    for (int64_t col = 0; col < 16; ++col) {
      input.set(row, col, amax * static_cast<float>(random.range(-64, 64)) / 64.0F);
    }
    input.set(row, random.range(0, 15), random.chance(50) ? amax : -amax);
  }
  return input;
}

class QuantizeModel : public ::testing::TestWithParam<MathMode> {};

TEST_P(QuantizeModel, Nvfp4ScalesNearTies) {
  Random random(1);
  for (int i = 0; i < 12; ++i) {
    const float g =
        std::ldexp(1.0F + std::abs(random.normal()), static_cast<int>(random.range(-9, 9)));
    const Matrix input = rows_near_scale_ties(g, random.bits());
    const QuantizedTensor tensor =
        quantized(input, {.format = FormatId::kNvfp4,
                          .layout = ScaleLayoutId::kLinear,
                          .options = {.math = GetParam(), .encode_scale = g}});
    for (int64_t row = 0; row < kModelRows; ++row) {
      expect_block(model_nvfp4(block_of(input, row), g, GetParam()), stored_block(tensor, row),
                   row);
      if (HasFatalFailure()) return;
    }
  }
}

// Elements within some ulps of a midpoint of E2M1 after the multiplication: the multiplier's last
// bit decides.
TEST_P(QuantizeModel, Nvfp4CodesNearTies) {
  constexpr std::array<float, 7> kMidpoints{0.25F, 0.75F, 1.25F, 1.75F, 2.5F, 3.5F, 5.0F};
  Random random(2);
  for (int i = 0; i < 6; ++i) {
    const float g = 100.0F + 900.0F * std::abs(random.normal());
    const Matrix input = rows_near_scale_ties(g, random.bits());
    for (int64_t row = 0; row < kModelRows; ++row) {
      const uint8_t scale = model_nvfp4(block_of(input, row), g, GetParam()).scale;
      const float product =
          multiply(model_e4m3_value(scale), reciprocal(g, GetParam()), GetParam());
      for (int64_t col = 0; col < 16; ++col) {
        if (std::abs(input.at(row, col)) > 0.9F * 5.5F * product) continue;
        const float tie = product * kMidpoints[static_cast<size_t>(random.range(0, 5))];
        input.set(row, col,
                  bits_float(float_bits(tie) + static_cast<uint32_t>(random.range(-2, 2))));
      }
    }
    const QuantizedTensor tensor =
        quantized(input, {.format = FormatId::kNvfp4,
                          .layout = ScaleLayoutId::kLinear,
                          .options = {.math = GetParam(), .encode_scale = g}});
    for (int64_t row = 0; row < kModelRows; ++row) {
      expect_block(model_nvfp4(block_of(input, row), g, GetParam()), stored_block(tensor, row),
                   row);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(QuantizeModel, Nvfp4OfEveryFiniteFill) {
  Random random(3);
  for (int fill = 1; fill < kNumFills; ++fill) {
    if (!is_finite(static_cast<Fill>(fill))) continue;
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      const float g = random.pick({1.0F, 333.0F, 0x1p126F, 0x1p-126F, 2688.0F});
      const Matrix input = Matrix::filled({.dtype = dtype, .rows = 500, .cols = 16},
                                          static_cast<Fill>(fill), random.bits());
      const QuantizedTensor tensor =
          quantized(input, {.format = FormatId::kNvfp4,
                            .layout = ScaleLayoutId::kLinear,
                            .options = {.math = GetParam(), .encode_scale = g}});
      for (int64_t row = 0; row < 500; ++row) {
        SCOPED_TRACE(std::string(name(static_cast<Fill>(fill))) + " " + std::to_string(g));
        expect_block(model_nvfp4(block_of(input, row), g, GetParam()), stored_block(tensor, row),
                     row);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_P(QuantizeModel, MxOfEveryFiniteFill) {
  Random random(4);
  for (const FormatId format : {FormatId::kMxfp4, FormatId::kMxfp8}) {
    for (int fill = 1; fill < kNumFills; ++fill) {
      if (!is_finite(static_cast<Fill>(fill))) continue;
      for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
        const Matrix input = Matrix::filled({.dtype = dtype, .rows = 300, .cols = 32},
                                            static_cast<Fill>(fill), random.bits());
        const QuantizedTensor tensor = quantized(
            input,
            {.format = format, .layout = ScaleLayoutId::kLinear, .options = {.math = GetParam()}});
        for (int64_t row = 0; row < 300; ++row) {
          expect_block(model_mx(block_of(input, row), format == FormatId::kMxfp4, GetParam()),
                       stored_block(tensor, row), row);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

// Products with results around 2^-126, where `fast` judges tininess after rounding.
TEST_P(QuantizeModel, MaximaAroundTheSmallestNormal) {
  for (const FormatId format : {FormatId::kMxfp4, FormatId::kMxfp8}) {
    const float largest = format == FormatId::kMxfp4 ? 6.0F : 448.0F;
    const auto edge = float_bits(largest * 0x1p-126F);
    const Matrix input({.dtype = DType::kF32, .rows = 400, .cols = 32}, {.poison = 0});
    for (int64_t row = 0; row < 400; ++row) {
      input.set(row, 0, bits_float(edge + static_cast<uint32_t>(row - 200)));
      input.set(row, 1, -0x1p-149F);
    }
    const QuantizedTensor tensor = quantized(
        input,
        {.format = format, .layout = ScaleLayoutId::kLinear, .options = {.math = GetParam()}});
    for (int64_t row = 0; row < 400; ++row) {
      expect_block(model_mx(block_of(input, row), format == FormatId::kMxfp4, GetParam()),
                   stored_block(tensor, row), row);
      if (HasFatalFailure()) return;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Modes, QuantizeModel, ::testing::Values(MathMode::kExact, MathMode::kFast),
                         [](const auto& test) { return std::string(name(test.param)); });

// Data on quarter steps of a scale makes the two candidates' errors nearly equal.
TEST(QuantizeFourOverSix, KeepsTheCandidateOfTheSpecifiedErrorSum) {
  Random random(5);
  int64_t num_four = 0;
  for (int variant = 0; variant < 4; ++variant) {
    const FourOverSix options{
        .enabled = true,
        .error = variant % 2 == 0 ? FourOverSixError::kMae : FourOverSixError::kMse,
        .error_math = variant / 2 == 0 ? FourOverSixMath::kStrict : FourOverSixMath::kFast};
    for (int i = 0; i < 8; ++i) {
      const float g =
          std::ldexp(1.0F + std::abs(random.normal()), static_cast<int>(random.range(-3, 9)));
      const Fill fill = random.pick({Fill::kIntegers, Fill::kQuarterIntegers, Fill::kNormal});
      const Matrix input = Matrix::filled(
          {.dtype = random.pick({DType::kBF16, DType::kF32}), .rows = kModelRows, .cols = 16}, fill,
          random.bits());
      const QuantizedTensor tensor =
          quantized(input, {.format = FormatId::kNvfp4,
                            .layout = ScaleLayoutId::kLinear,
                            .options = {.encode_scale = g, .four_over_six = options}});
      for (int64_t row = 0; row < kModelRows; ++row) {
        const std::vector<float> x = block_of(input, row);
        const ModelBlock expected = model_four_over_six(x, g, options);
        const ModelBlock actual = stored_block(tensor, row);
        expect_block(expected, actual, row);
        if (HasFatalFailure()) return;
        num_four += actual.scale != model_nvfp4(x, g, MathMode::kExact).scale ? 1 : 0;
      }
    }
  }
  EXPECT_GT(num_four, 1000) << "candidate 4 was hardly ever taken: the test shows nothing";
}

// Bisects one element of x until its two neighbouring floats decide between the candidates in
// different ways: the two error sums then differ by their rounding. False if no such element is
// found.
bool balance(std::vector<float>& x, size_t index, float g, const FourOverSix& options,
             Random& random) {
  const auto scale_with = [&](float value) {
    x[index] = value;
    return model_four_over_six(x, g, options).scale;
  };
  float low = std::abs(random.normal());
  float high = std::abs(random.normal());
  const uint8_t low_scale = scale_with(low);
  if (low_scale == scale_with(high)) return false;
  // Positive floats are ordered as their bits.
  while (std::abs(static_cast<int64_t>(float_bits(low)) - static_cast<int64_t>(float_bits(high))) >
         1) {
    const float middle = bits_float(float_bits(low) / 2 + float_bits(high) / 2 +
                                    (float_bits(low) & float_bits(high) & 1U));
    (scale_with(middle) == low_scale ? low : high) = middle;
  }
  x[index] = low;
  return true;
}

TEST(QuantizeFourOverSix, DecidesByTheRoundingOfEachOperationWhereErrorsAreEqual) {
  constexpr int64_t kBlocks = 400;
  constexpr int64_t kUlps = 7;
  Random random(6);
  for (int variant = 0; variant < 4; ++variant) {
    const FourOverSix options{
        .enabled = true,
        .error = variant % 2 == 0 ? FourOverSixError::kMae : FourOverSixError::kMse,
        .error_math = variant / 2 == 0 ? FourOverSixMath::kStrict : FourOverSixMath::kFast};
    const float g = 100.0F + 33.0F * std::abs(random.normal());
    const Matrix input({.dtype = DType::kF32, .rows = kBlocks * kUlps, .cols = 16});
    for (int64_t block = 0; block < kBlocks;) {
      std::vector<float> x(16);
      for (float& value : x) value = random.normal();
      x[3] = 4.0F;  // The maximum, whatever balance() tries.
      const auto index = static_cast<size_t>(random.range(4, 15));
      if (!balance(x, index, g, options, random)) continue;
      for (int64_t ulp = 0; ulp < kUlps; ++ulp) {
        const int64_t row = block * kUlps + ulp;
        for (size_t i = 0; i < 16; ++i) input.set(row, static_cast<int64_t>(i), x[i]);
        const uint32_t near = float_bits(x[index]) + static_cast<uint32_t>(ulp - kUlps / 2);
        input.set(row, static_cast<int64_t>(index), bits_float(near));
      }
      ++block;
    }
    const QuantizedTensor tensor =
        quantized(input, {.format = FormatId::kNvfp4,
                          .layout = ScaleLayoutId::kLinear,
                          .options = {.encode_scale = g, .four_over_six = options}});
    for (int64_t row = 0; row < kBlocks * kUlps; ++row) {
      SCOPED_TRACE(variant);
      expect_block(model_four_over_six(block_of(input, row), g, options), stored_block(tensor, row),
                   row);
      if (HasFatalFailure()) return;
    }
  }
}

// Facts about the table of the approximate reciprocal that a division does not reproduce.
TEST(QuantizeReciprocal, IsTheApproximateInstructionsInFastMode) {
  int64_t num_different = 0;
  for (int i = 1; i <= 512; ++i) {
    const auto d = static_cast<float>(i);
    const float exact = encode_scale_from_decode(d);
    const float fast = encode_scale_from_decode(d, MathMode::kFast);
    EXPECT_EQ(exact, 1.0F / d);
    EXPECT_LE(
        std::abs(static_cast<int64_t>(float_bits(exact)) - static_cast<int64_t>(float_bits(fast))),
        1);
    num_different += exact != fast ? 1 : 0;
  }
  // Spec 4.3: of the integers 1 to 512, 64 differ from the IEEE reciprocal.
  EXPECT_EQ(num_different, 64);
}

}  // namespace
}  // namespace narrowfloat::testing
