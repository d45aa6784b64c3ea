// Rows of every format against the public quantizers in exact mode, hand-made rows, strides, and
// rows that are encoded in pieces.
#include "tensor/row_encoder.h"

#include <array>
#include <cstring>
#include <vector>

#include <gtest/gtest.h>

#include "narrowfloat/quantize.h"
#include "support/tensors.h"
#include "tensor/element_io.h"
#include "tensor/row_format.h"

namespace narrowfloat::testing {
namespace {

constexpr std::array kFormats{RowFormat::kBf16,          RowFormat::kFp32,    RowFormat::kFp8Static,
                              RowFormat::kFp8Group,      RowFormat::kMxfp8,   RowFormat::kNvfp4,
                              RowFormat::kNvfp4PerToken, RowFormat::kFp8Token};

int64_t scale_bytes(RowFormat format) { return bits(scale_dtype(format)) / 8; }

// Everything that a row is stored as.
struct Row {
  std::vector<uint8_t> values;
  std::vector<uint8_t> scales;
  float row_scale = 0.0F;
  bool operator==(const Row& other) const {
    return values == other.values && scales == other.scales &&
           float_bits(row_scale) == float_bits(other.row_scale);
  }
};

Row empty_row(RowFormat format, int64_t cols) {
  Row row;
  row.values.assign(static_cast<size_t>(row_bytes(format, cols)), 0xAA);
  row.scales.assign(static_cast<size_t>(scale_blocks(format, cols) * scale_bytes(format)), 0xAA);
  return row;
}

RowTarget target_of(Row& row) {
  return {.values = row.values.data(), .scales = row.scales.data(), .row_scale = &row.row_scale};
}

Row encoded(const RowRules& rules, const std::vector<float>& x) {
  const auto cols = static_cast<int64_t>(x.size());
  Row row = empty_row(rules.format, cols);
  encode_row(rules, x.data(), cols, target_of(row));
  return row;
}

FormatId quantizer_of(RowFormat format) {
  switch (format) {
    case RowFormat::kFp8Group:
      return FormatId::kFp8Block1x128;
    case RowFormat::kMxfp8:
      return FormatId::kMxfp8;
    case RowFormat::kNvfp4:
      return FormatId::kNvfp4;
    case RowFormat::kNvfp4PerToken:
      return FormatId::kNvfp4PerToken;
    default:
      return FormatId::kFp8Tensor;
  }
}

// The result of quantize() for a matrix of one row.
Row quantized_row(const RowRules& rules, const Matrix& input) {
  QuantizeTo to{.format = quantizer_of(rules.format), .layout = ScaleLayoutId::kLinear};
  if (rules.format == RowFormat::kNvfp4) to.options.encode_scale = rules.multiplier;
  if (rules.format == RowFormat::kFp8Static) to.options.fp8_decode_scale = 1.0F / rules.multiplier;
  const QuantizedTensor tensor = quantized(input, to);
  Row row{.values = tensor.values.copy(), .scales = tensor.scales.copy()};
  if (rules.format == RowFormat::kNvfp4PerToken) row.row_scale = *tensor.global_scale.data<float>();
  if (rules.format == RowFormat::kFp8Token) row.row_scale = *tensor.scales.data<float>();
  if (scale_blocks(rules.format, 128) == 0) row.scales.clear();
  return row;
}

std::vector<float> widened(const Matrix& input) {
  std::vector<float> x(static_cast<size_t>(input.shape().cols));
  widen(input.shape().dtype, input.row(0), input.shape().cols, x.data());
  return x;
}

class RowEncoderFormats : public ::testing::TestWithParam<RowFormat> {};

TEST_P(RowEncoderFormats, GiveTheBytesOfTheQuantizerForAnyInput) {
  const bool has_blocks = scale_blocks(GetParam(), 128) > 0;
  const bool is_fp8 = value_dtype(GetParam()) == DType::kF8E4M3;
  const bool has_quantizer = has_blocks || is_fp8;
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (int fill = 0; fill < kNumFills; ++fill) {
      for (const int64_t cols : {0, 32, 128, 160, 2880}) {
        const Matrix input =
            Matrix::filled({.dtype = dtype, .rows = 1, .cols = cols}, static_cast<Fill>(fill),
                           77 + static_cast<uint64_t>(fill));
        const std::vector<float> x = widened(input);
        for (const float multiplier : {1.0F, 0x1p-7F, 0x1p20F}) {
          RowRules rules{.format = GetParam(), .input_max = largest_finite(dtype)};
          if (!has_blocks || GetParam() == RowFormat::kNvfp4) rules.multiplier = multiplier;
          Row expected = empty_row(GetParam(), cols);
          if (has_quantizer) {
            expected = quantized_row(rules, input);
          } else {
            narrow(GetParam() == RowFormat::kBf16 ? DType::kBF16 : DType::kF32, x.data(), cols,
                   expected.values.data());
          }
          EXPECT_EQ(encoded(rules, x), expected)
              << name(static_cast<Fill>(fill)) << " " << name(dtype) << " " << cols;
        }
      }
    }
  }
}

// Pieces share nothing but the row's own scale.
TEST_P(RowEncoderFormats, GiveTheSameBytesInPieces) {
  constexpr int64_t kCols = 416;
  const Matrix input =
      Matrix::filled({.dtype = DType::kF32, .rows = 1, .cols = kCols}, Fill::kNormalRows, 5);
  const std::vector<float> x = widened(input);
  const RowRules rules{.format = GetParam()};
  Row row = empty_row(GetParam(), kCols);
  RowEncoder encoder(rules);
  AbsMax amax;
  amax.add(x.data(), kCols);
  encoder.start_row(amax.or_zero(), target_of(row));
  for (const auto& [col, count] : {std::array<int64_t, 2>{256, 160}, {0, 128}, {128, 128}}) {
    encoder.encode(x.data() + col, col, count, target_of(row));
  }
  EXPECT_EQ(row, encoded(rules, x));
}

// [blocks, rows] scales: the scales of neighbouring rows lie between those of one row.
TEST_P(RowEncoderFormats, StoreScalesAtTheStrideAndNothingElsewhere) {
  constexpr int64_t kCols = 288;
  constexpr int64_t kStride = 3;
  const std::vector<float> x(kCols, 1.5F);
  const Row dense = encoded({.format = GetParam()}, x);
  Row row = empty_row(GetParam(), kCols);
  const auto bytes = static_cast<size_t>(scale_bytes(GetParam()));
  row.scales.assign(dense.scales.size() * kStride, 0xFF);
  RowTarget target = target_of(row);
  target.scale_stride = kStride;
  encode_row({.format = GetParam()}, x.data(), kCols, target);
  EXPECT_EQ(row.values, dense.values);
  for (size_t i = 0; i < row.scales.size(); ++i) {
    const size_t scale = i / bytes;
    const bool is_stored = scale % kStride == 0;
    EXPECT_EQ(row.scales[i], is_stored ? dense.scales[scale / kStride * bytes + i % bytes] : 0xFF);
  }
}

INSTANTIATE_TEST_SUITE_P(All, RowEncoderFormats, ::testing::ValuesIn(kFormats),
                         [](const auto& test) {
                           return std::string(name(test.param) == "fp8_1x128" ? "fp8_group"
                                                                              : name(test.param));
                         });

TEST(RowEncoder, TakesTheMaximumOfAShortGroupOverItsOwnColumns) {
  std::vector<float> x(192, 2.0F);
  x[127] = 448.0F;
  x[191] = 224.0F;
  const Row row = encoded({.format = RowFormat::kFp8Group}, x);
  std::array<float, 2> scales{};
  ASSERT_EQ(row.scales.size(), sizeof(scales));
  std::memcpy(scales.data(), row.scales.data(), sizeof(scales));
  EXPECT_EQ(scales, (std::array{1.0F, 0.5F}));
  EXPECT_EQ(row.values[0], 0x40);    // 2
  EXPECT_EQ(row.values[127], 0x7E);  // 448
  EXPECT_EQ(row.values[128], 0x48);  // 4
  EXPECT_EQ(row.values[191], 0x7E);
}

TEST(RowEncoder, PutsTheEvenColumnInTheLowNibble) {
  std::vector<float> x(16, 0.0F);
  x[0] = 6.0F;
  x[1] = -3.0F;
  x[14] = 0.5F;
  const Row row = encoded({.format = RowFormat::kNvfp4}, x);
  EXPECT_EQ(row.scales, std::vector<uint8_t>{0x38});  // 1
  EXPECT_EQ(row.values, (std::vector<uint8_t>{0xD7, 0, 0, 0, 0, 0, 0, 0x01}));
}

// 2688 = 448 * 6 is the largest value of a per-token row with row scale 1.
TEST(RowEncoder, ScalesAPerTokenRowByItsMaximum) {
  std::vector<float> x(32, 0.0F);
  x[3] = -2688.0F;
  x[16] = 6.0F;
  const Row row = encoded({.format = RowFormat::kNvfp4PerToken}, x);
  EXPECT_EQ(row.row_scale, 1.0F);
  EXPECT_EQ(row.scales, (std::vector<uint8_t>{0x7E, 0x38}));
  EXPECT_EQ(row.values[1], 0xF0);
  EXPECT_EQ(row.values[8], 0x07);
  EXPECT_EQ(encoded({.format = RowFormat::kNvfp4PerToken}, std::vector<float>(16)).row_scale, 0.0F);
}

TEST(RowEncoder, ScalesARowOfFp8PerTokenByItsMaximum) {
  std::vector<float> x(160, 0.0F);
  x[3] = -224.0F;
  x[150] = 2.0F;
  const Row row = encoded({.format = RowFormat::kFp8Token}, x);
  EXPECT_EQ(row.row_scale, 0.5F);
  EXPECT_EQ(row.values[3], 0xFE);    // -448
  EXPECT_EQ(row.values[150], 0x48);  // 4
  EXPECT_TRUE(row.scales.empty());
  EXPECT_EQ(encoded({.format = RowFormat::kFp8Token}, std::vector<float>(16)).row_scale, 1.0F);
}

// 0x1p-130 is a bf16 number whose reciprocal times 448 overflows: the multiplier stops at the
// largest number of the type that the values came from.
TEST(RowEncoder, StopsTheMultiplierAtTheLargestNumberOfTheInputsType) {
  const std::vector<float> x(128, 0x1p-130F);
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const Row row =
        encoded({.format = RowFormat::kFp8Group, .input_max = largest_finite(dtype)}, x);
    float scale = 0.0F;
    std::memcpy(&scale, row.scales.data(), sizeof(scale));
    EXPECT_EQ(float_bits(scale), dtype == DType::kBF16 ? 0x00202020U : 0x00200000U);
  }
}

TEST(RowEncoder, StoresCanonicalNan) {
  const std::vector<float> x{bits_float(0xFFC00001U), 1.0F};
  EXPECT_EQ(encoded({.format = RowFormat::kBf16}, x).values,
            (std::vector<uint8_t>{0xFF, 0x7F, 0x80, 0x3F}));
  EXPECT_EQ(encoded({.format = RowFormat::kFp32}, x).values,
            (std::vector<uint8_t>{0xFF, 0xFF, 0xFF, 0x7F, 0, 0, 0x80, 0x3F}));
}

TEST(RowTarget, FindsTheRowInEveryBuffer) {
  std::array<uint8_t, 48> values{};
  std::array<float, 12> scales{};
  std::array<float, 3> row_scales{};
  CodedRows rows{.values = TensorView::contiguous(values.data(), DType::kU8, {3, 16}),
                 .scales = TensorView::contiguous(scales.data(), DType::kF32, {3, 2}),
                 .row_scale = TensorView::contiguous(row_scales.data(), DType::kF32, {3})};
  rows.scales.strides = {1, 4};
  const RowTarget target = row_target(rows, RowFormat::kNvfp4PerToken, 2, 32);
  EXPECT_EQ(target.values, values.data() + 32);
  EXPECT_EQ(target.scales, scales.data() + 2);
  EXPECT_EQ(target.scale_stride, 4);
  EXPECT_EQ(target.row_scale, row_scales.data() + 2);
  EXPECT_EQ(row_target({.values = rows.values}, RowFormat::kBf16, 2, 8).scales, nullptr);
}

}  // namespace
}  // namespace narrowfloat::testing
