// MXFP4 and MXFP8: every row of the table of spec 6.5 through the public API, the maxima for which
// the modes differ, and the rounding rules.
#include "formats/mx.h"

#include <gtest/gtest.h>

#include "formats/float16.h"
#include "quantize_block.h"

namespace narrowfloat {
namespace {

struct MxBlock {
  int scale;
  Codes codes;
  friend bool operator==(const MxBlock&, const MxBlock&) = default;
};
void PrintTo(const MxBlock& block, std::ostream* out) {
  *out << "scale " << block.scale << " codes " << ::testing::PrintToString(block.codes);
}

// Scale byte, and the codes of the given elements; the rest of the block is +0.
MxBlock mx_block(FormatId format, MathMode math, const std::vector<uint16_t>& elements) {
  const Quantized q = quantize_bf16_row(format, elements, 32, in(math));
  return {q.scales.at(0), first_codes(q, elements.size())};
}
MxBlock mxfp4(MathMode math, const std::vector<uint16_t>& elements) {
  return mx_block(FormatId::kMxfp4, math, elements);
}
MxBlock mxfp8(MathMode math, const std::vector<uint16_t>& elements) {
  return mx_block(FormatId::kMxfp8, math, elements);
}

constexpr MathMode kExact = MathMode::kExact;
constexpr MathMode kFast = MathMode::kFast;

TEST(MxQuantize, KeepsTheSignsOfAZeroBlock) {
  for (const MathMode math : {kExact, kFast}) {
    EXPECT_EQ(mxfp4(math, {kPlusZero, kMinusZero}), (MxBlock{0, {0x0, 0x8}}));
    EXPECT_EQ(mxfp8(math, {kPlusZero, kMinusZero}), (MxBlock{0, {0x00, 0x80}}));
  }
}

// 0 < amax / largest <= 2^-127: 2^-125 for E2M1, 2^-119 for E4M3.
TEST(MxQuantize, LetsValuesUnderTheSmallestScaleSurviveInExactOnly) {
  EXPECT_EQ(mxfp4(kExact, {0x0100, 0x8100, 0x8000}), (MxBlock{0, {6, 14, 8}}));
  EXPECT_EQ(mxfp4(kFast, {0x0100, 0x8100, 0x8000}), (MxBlock{0, {0, 8, 8}}));
  EXPECT_EQ(mxfp8(kExact, {0x0400, 0x8400, 0x8000}), (MxBlock{0, {0x78, 0xF8, 0x80}}));
  EXPECT_EQ(mxfp8(kFast, {0x0400, 0x8400, 0x8000}), (MxBlock{0, {0x00, 0x80, 0x80}}));
}

// 2^-127 < amax / largest < 2^-126: 2^-124 for E2M1, 2^-118 for E4M3.
TEST(MxQuantize, GivesDifferentBytesInTheWindowBelowTheSmallestNormal) {
  EXPECT_EQ(mxfp4(kExact, {0x0180, 0x8180}), (MxBlock{1, {6, 14}}));
  EXPECT_EQ(mxfp4(kFast, {0x0180, 0x8180}), (MxBlock{0, {0, 8}}));
  EXPECT_EQ(mxfp8(kExact, {0x0480, 0x8480}), (MxBlock{1, {0x78, 0xF8}}));
  EXPECT_EQ(mxfp8(kFast, {0x0480, 0x8480}), (MxBlock{0, {0x00, 0x80}}));
}

TEST(MxQuantize, CountsDenormalElementsOfALargerBlockInExactOnly) {
  EXPECT_EQ(mxfp4(kExact, {0x0200, 0x007F, 0x807F}), (MxBlock{2, {6, 1, 9}}));
  EXPECT_EQ(mxfp4(kFast, {0x0200, 0x007F, 0x807F}), (MxBlock{2, {6, 0, 8}}));
  EXPECT_EQ(mxfp8(kExact, {0x0500, 0x0040, 0x8040}), (MxBlock{2, {0x78, 0x28, 0xA8}}));
  EXPECT_EQ(mxfp8(kFast, {0x0500, 0x0040, 0x8040}), (MxBlock{2, {0x78, 0x00, 0x80}}));
}

TEST(MxQuantize, GivesOneNanElementItsCodeAndLeavesTheOthersAlone) {
  for (const uint16_t nan : {kQuietNan, kSignallingNan}) {
    for (const MathMode math : {kExact, kFast}) {
      EXPECT_EQ(mxfp4(math, {0x40C0, nan, kMinusOne}), (MxBlock{127, {7, 7, 10}}));
    }
    // 448: scale 1. The clamp of fast turns NaN into the largest number.
    EXPECT_EQ(mxfp8(kExact, {0x43E0, nan, kMinusOne}), (MxBlock{127, {0x7E, 0x7F, 0xB8}}));
    EXPECT_EQ(mxfp8(kFast, {0x43E0, nan, kMinusOne}), (MxBlock{127, {0x7E, 0x7E, 0xB8}}));
  }
}

TEST(MxQuantize, KeepsTheSignsOfInfinitiesInExactAndLosesThemInFast) {
  // 2^127 beside infinities is 1 in exact.
  const std::vector<uint16_t> block{kPlusInfinity, kMinusInfinity, kMinusOne, 0x7F00, kQuietNan};
  EXPECT_EQ(mxfp4(kExact, block), (MxBlock{0xFE, {7, 15, 8, 2, 7}}));
  EXPECT_EQ(mxfp4(kFast, block), (MxBlock{0xFE, {7, 7, 8, 0, 7}}));
  EXPECT_EQ(mxfp8(kExact, block), (MxBlock{0xFE, {0x7E, 0xFE, 0x80, 0x38, 0x7F}}));
  EXPECT_EQ(mxfp8(kFast, block), (MxBlock{0xFE, {0x7E, 0x7E, 0x80, 0x00, 0x7E}}));
}

TEST(MxQuantize, GivesANanScaleForABlockOfNanOnly) {
  const std::vector<uint16_t> block(32, kSignallingNan);
  for (const MathMode math : {kExact, kFast}) {
    EXPECT_EQ(mxfp4(math, block), (MxBlock{0xFF, Codes(32, 7)}));
  }
  EXPECT_EQ(mxfp8(kExact, block), (MxBlock{0xFF, Codes(32, 0x7F)}));
  EXPECT_EQ(mxfp8(kFast, block), (MxBlock{0xFF, Codes(32, 0x7E)}));
}

TEST(MxQuantize, RoundsTheScaleAsTheRuleSays) {
  // 3.5 * 2^-1 over E2M1 and 1.875 over E4M3: floor clips, even does or does not follow.
  const auto byte = [](FormatId format, uint16_t amax, Ue8m0Rounding rounding) {
    const Quantized exact = quantize_bf16_row(format, {amax}, 32, in(kExact, rounding));
    const Quantized fast = quantize_bf16_row(format, {amax}, 32, in(kFast, rounding));
    EXPECT_EQ(exact.scales, fast.scales);
    return static_cast<int>(exact.scales[0]);
  };
  const struct {
    FormatId format;
    uint16_t amax;  // 1 + n/128
    int floor;
    int even;
    int up;
  } rows[] = {{FormatId::kMxfp4, 0x3F80, 125, 125, 125}, {FormatId::kMxfp4, 0x3FC0, 125, 125, 125},
              {FormatId::kMxfp4, 0x3FC1, 125, 125, 126}, {FormatId::kMxfp4, 0x3FDF, 125, 125, 126},
              {FormatId::kMxfp4, 0x3FE0, 125, 126, 126}, {FormatId::kMxfp8, 0x3FE0, 119, 119, 119},
              {FormatId::kMxfp8, 0x3FE1, 119, 119, 120}, {FormatId::kMxfp8, 0x3FF7, 119, 119, 120},
              {FormatId::kMxfp8, 0x3FF8, 119, 120, 120}};
  for (const auto& row : rows) {
    EXPECT_EQ(byte(row.format, row.amax, Ue8m0Rounding::kFloor), row.floor) << row.amax;
    EXPECT_EQ(byte(row.format, row.amax, Ue8m0Rounding::kEven), row.even) << row.amax;
    EXPECT_EQ(byte(row.format, row.amax, Ue8m0Rounding::kUp), row.up) << row.amax;
  }
}

// Rows of one block, each with a maximum of its own.
std::vector<uint16_t> rows_of_maxima(uint32_t first, uint32_t last) {
  std::vector<uint16_t> elements;
  for (uint32_t code = first; code <= last; ++code) {
    elements.push_back(static_cast<uint16_t>(code));
    elements.resize(elements.size() + 31, kMinusZero);
  }
  return elements;
}

class MxScaleByte : public ::testing::TestWithParam<FormatId> {};
INSTANTIATE_TEST_SUITE_P(Formats, MxScaleByte,
                         ::testing::Values(FormatId::kMxfp4, FormatId::kMxfp8),
                         [](const auto& format) { return std::string(name(format.param)); });

TEST_P(MxScaleByte, DiffersBetweenTheModesForExactly127Bf16Maxima) {
  const auto elements = rows_of_maxima(1, 0x7F7F);
  const auto exact = quantize_matrix(GetParam(), DType::kBF16, elements, 0x7F7F, in(kExact));
  const auto fast = quantize_matrix(GetParam(), DType::kBF16, elements, 0x7F7F, in(kFast));
  int differing = 0;
  for (size_t i = 0; i < exact.scales.size(); ++i) {
    if (exact.scales[i] == fast.scales[i]) continue;
    ++differing;
    EXPECT_EQ(exact.scales[i], 1);
    EXPECT_EQ(fast.scales[i], 0);
  }
  EXPECT_EQ(differing, 127);
}

TEST_P(MxScaleByte, IsTheSameInBothModesForEveryFp16Maximum) {
  const auto elements = rows_of_maxima(1, 0x7BFF);
  const auto exact = quantize_matrix(GetParam(), DType::kF16, elements, 0x7BFF, in(kExact));
  const auto fast = quantize_matrix(GetParam(), DType::kF16, elements, 0x7BFF, in(kFast));
  EXPECT_EQ(exact.scales, fast.scales);
}

TEST_P(MxScaleByte, IsBelow254AndNoCodeIsNanForEveryFiniteBf16MaximumInExact) {
  const auto elements = rows_of_every_bf16_maximum(32);
  const bool is_fp4 = GetParam() == FormatId::kMxfp4;
  const int sign = is_fp4 ? 8 : 0x80;
  for (const Ue8m0Rounding rounding :
       {Ue8m0Rounding::kUp, Ue8m0Rounding::kFloor, Ue8m0Rounding::kEven}) {
    const auto q =
        quantize_matrix(GetParam(), DType::kBF16, elements, 0x7F7F, in(kExact, rounding));
    for (size_t row = 0; row < 0x7F7F; ++row) {
      const uint8_t* codes = &q.codes[32 * row];
      ASSERT_LT(q.scales[row], 254) << row + 1;
      ASSERT_LE(codes[0], is_fp4 ? 7 : 0x7E) << row + 1;
      ASSERT_TRUE(codes[1] == codes[0] + sign && codes[2] >= sign && codes[2] <= codes[1])
          << row + 1;
      ASSERT_TRUE(codes[3] == sign && codes[4] == 0) << row + 1;
    }
  }
}

TEST(MxMultiplier, IsTheReciprocalOfTheScaleAndFlushedAtBothEndsInFast) {
  for (int code = 0; code <= 254; ++code) {
    const auto byte = static_cast<uint8_t>(code);
    const float reciprocal = std::ldexp(1.0F, 127 - code);
    EXPECT_EQ(Mxfp4::multiplier<ExactMath>(byte), reciprocal);
    EXPECT_EQ(Mxfp8::multiplier<FastMath>(byte), code == 0 || code == 254 ? 0.0F : reciprocal);
  }
  EXPECT_TRUE(is_nan(Mxfp4::multiplier<ExactMath>(255)));
  EXPECT_TRUE(is_nan(Mxfp8::multiplier<FastMath>(255)));
}

// An infinity survives quantization and dequantization with its sign in exact (spec 6.5).
TEST(MxQuantize, RoundTripsInfinitiesAndNanToF32InExact) {
  for (const FormatId format : {FormatId::kMxfp4, FormatId::kMxfp8}) {
    const std::vector<uint16_t> block = [] {
      std::vector<uint16_t> elements(32, kOne);
      elements[3] = kPlusInfinity;
      elements[4] = kMinusInfinity;
      elements[5] = kQuietNan;
      return elements;
    }();
    const QuantizedLayout layout = quantized_layout(format, 1, 32);
    std::vector<uint8_t> values(static_cast<size_t>(layout.values_bytes));
    std::vector<uint8_t> scales(static_cast<size_t>(layout.scales_bytes));
    const QuantizedView view = layout.bind(values.data(), scales.data(), nullptr);
    quantize(TensorView::contiguous(block.data(), DType::kBF16, {1, 32}), view);
    std::vector<float> out(32);
    dequantize(view, TensorView::contiguous(out.data(), DType::kF32, {1, 32}));
    EXPECT_EQ(out[3], std::numeric_limits<float>::infinity());
    EXPECT_EQ(out[4], -std::numeric_limits<float>::infinity());
    EXPECT_EQ(is_nan(out[5]), format == FormatId::kMxfp8);
  }
}

}  // namespace
}  // namespace narrowfloat
