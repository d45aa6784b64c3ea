// Quantization inside the layer gives the bytes of the public quantizer.
#include <cstring>

#include <gtest/gtest.h>

#include "layers/moe/row_buffers.h"
#include "moe_shared/quantize_activations.h"
#include "narrowfloat/quantize.h"
#include "support/fills.h"
#include "support/moe_case.h"

namespace narrowfloat::testing {
namespace {

struct RowEncoding {
  RowFormat rows;
  FormatId format;
  float multiplier;
};

class InputRows : public ::testing::TestWithParam<std::tuple<int, DType, Fill>> {};

constexpr RowEncoding kRowEncodings[] = {
    {RowFormat::kFp8Static, FormatId::kFp8Tensor, 32.0F},
    {RowFormat::kFp8Group, FormatId::kFp8Block1x128, 1.0F},
    {RowFormat::kMxfp8, FormatId::kMxfp8, 1.0F},
    {RowFormat::kNvfp4, FormatId::kNvfp4, 300.0F},
    {RowFormat::kNvfp4PerToken, FormatId::kNvfp4PerToken, 1.0F},
    {RowFormat::kFp8Token, FormatId::kFp8Tensor, 1.0F},  // Each row as a tensor.
};

// Quantizes each row as a tensor, whose scale is the row's.
void quantize_each_row(const TensorView& input, uint8_t* values, float* row_scales) {
  const int64_t cols = input.shape[1];
  const QuantizedLayout layout = quantized_layout(FormatId::kFp8Tensor, 1, cols, {});
  for (int64_t row = 0; row < input.shape[0]; ++row) {
    auto* first = static_cast<uint8_t*>(input.data) + row * cols * bits(input.dtype) / 8;
    quantize(TensorView::contiguous(first, input.dtype, {1, cols}),
             layout.bind(values + row * cols, row_scales + row, nullptr), {});
  }
}

INSTANTIATE_TEST_SUITE_P(
    Moe, InputRows,
    ::testing::Combine(::testing::Range(0, 6),
                       ::testing::Values(DType::kBF16, DType::kF16, DType::kF32),
                       ::testing::Values(Fill::kNormalRows, Fill::kSpecials, Fill::kZeros,
                                         Fill::kExtremes, Fill::kDenormals)));

TEST_P(InputRows, AreTheQuantizersBytes) {
  const RowEncoding& encoding = kRowEncodings[std::get<0>(GetParam())];
  const DType dtype = std::get<1>(GetParam());
  constexpr int64_t kRows = 5;
  constexpr int64_t kCols = 1120;  // Eight groups of 128, and 96.
  std::vector<uint8_t> plain(static_cast<size_t>(kRows * kCols * bits(dtype) / 8));
  Random random(7);
  fill_elements(std::get<2>(GetParam()), dtype, random, kRows * kCols, plain.data());
  const TensorView input = TensorView::contiguous(plain.data(), dtype, {kRows, kCols});

  const QuantizedLayout layout =
      quantized_layout(encoding.format, kRows, kCols, {.scale_layout = ScaleLayoutId::kLinear});
  std::vector<uint8_t> values(static_cast<size_t>(layout.values_bytes));
  std::vector<uint8_t> scales(static_cast<size_t>(layout.scales_bytes));
  std::vector<float> global(static_cast<size_t>(std::max(kRows, layout.global_scales)));
  QuantizeOptions options;
  if (encoding.format == FormatId::kNvfp4) options.encode_scale = encoding.multiplier;
  if (encoding.rows == RowFormat::kFp8Static) options.fp8_decode_scale = 1 / encoding.multiplier;
  if (encoding.rows == RowFormat::kFp8Token) {
    quantize_each_row(input, values.data(), global.data());
  } else {
    float* const global_scales = layout.global_scales > 0 ? global.data() : nullptr;
    quantize(input, layout.bind(values.data(), scales.data(), global_scales), options);
  }

  const RowBuffers buffers = row_buffers(encoding.rows, kRows, kCols);
  std::vector<std::byte> memory(static_cast<size_t>(buffers.bytes()), std::byte{0xEE});
  const CodedRows quantized = buffers.bind(memory.data(), kRows, {});
  quantize_activations({.rows = input,
                        .format = encoding.rows,
                        .multiplier = encoding.multiplier,
                        .output = quantized},
                       {});
  EXPECT_EQ(std::memcmp(quantized.values.data, values.data(), values.size()), 0);
  if (!quantized.scales.is_absent()) {
    ASSERT_EQ(static_cast<size_t>(buffers.scales_bytes), scales.size());
    EXPECT_EQ(std::memcmp(quantized.scales.data, scales.data(), scales.size()), 0);
  }
  if (!quantized.row_scale.is_absent()) {
    EXPECT_EQ(std::memcmp(quantized.row_scale.data, global.data(), kRows * sizeof(float)), 0);
  }
}

TEST(InputRows, ListedRowsAloneAreWritten) {
  std::vector<double> rows(4 * 256, 1.5);
  const int32_t list[] = {2, -1, 0};
  const RowBuffers buffers = row_buffers(RowFormat::kFp8Group, 4, 256);
  std::vector<std::byte> memory(static_cast<size_t>(buffers.bytes()), std::byte{0xEE});
  const CodedRows quantized = buffers.bind(memory.data(), 4, {});
  quantize_activations({.rows = TensorView::contiguous(rows.data(), DType::kF64, {4, 256}),
                        .format = RowFormat::kFp8Group,
                        .choice = RowChoice::kListed,
                        .map = TensorView::contiguous(list, DType::kI32, {3}),
                        .output = quantized},
                       {});
  const auto* values = static_cast<const uint8_t*>(quantized.values.data);
  for (size_t row = 0; row < 4; ++row) {
    // 1.5 is its group's maximum: 448.
    EXPECT_EQ(values[row * 256], row % 2 == 0 ? 0x7E : 0xEE) << row;
  }
}

// A plain input and the same input quantized by quantize() give the same output.
class CodedInput : public ::testing::TestWithParam<MoeMode> {};
INSTANTIATE_TEST_SUITE_P(Moe, CodedInput, ::testing::ValuesIn(every_moe_mode()), mode_test_name);

TEST_P(CodedInput, GivesTheOutputOfPlainInput) {
  const MoeShape shape{.tokens = 6, .hidden = 384, .inter = 128, .experts = 4, .top_k = 2};
  MoeCase layer_case(GetParam(), shape, Activation::swiglu(), 3);
  const MoeResult plain = layer_case.run();
  const RowFormat format = moe_mode_info(GetParam()).input;
  if (format == RowFormat::kBf16) return;
  const RowEncoding* encoding = nullptr;
  for (const RowEncoding& candidate : kRowEncodings) {
    if (candidate.rows == format) encoding = &candidate;
  }
  ASSERT_NE(encoding, nullptr);
  const ScaleLayoutId scale_layout =
      format == RowFormat::kFp8Group ? ScaleLayoutId::kMnMajor : ScaleLayoutId::kLinear;
  const QuantizedLayout layout =
      quantized_layout(encoding->format, 6, 384, {.scale_layout = scale_layout});
  std::vector<uint8_t> values(static_cast<size_t>(layout.values_bytes));
  std::vector<float> scales(static_cast<size_t>(layout.scales_bytes));
  std::vector<float> global(8);
  QuantizeOptions options;
  if (format == RowFormat::kNvfp4) {
    options.encode_scale = layer_case.weights().input_multiplier->value;
  }
  if (format == RowFormat::kFp8Static) {
    options.fp8_decode_scale = 1 / layer_case.weights().input_multiplier->value;
  }
  const TensorView& plain_rows = layer_case.inputs().values;
  if (format == RowFormat::kFp8Token) {
    quantize_each_row(plain_rows, values.data(), global.data());
  } else {
    float* const global_scales = layout.global_scales > 0 ? global.data() : nullptr;
    quantize(plain_rows, layout.bind(values.data(), scales.data(), global_scales), options);
  }
  MoeInputs quantized;
  const bool is_packed = value_dtype(format) == DType::kU8;
  quantized.values =
      TensorView::contiguous(values.data(), value_dtype(format), {6, is_packed ? 192 : 384});
  if (const int64_t blocks = scale_blocks(format, 384); blocks > 0) {
    quantized.scales = TensorView::contiguous(scales.data(), scale_dtype(format), {6, blocks});
    // mn_major: one column of 6 rows padded to 8 after the other.
    if (format == RowFormat::kFp8Group) quantized.scales.strides = {1, 8};
  }
  if (has_row_scale(format)) {
    quantized.row_scale = TensorView::contiguous(global.data(), DType::kF32, {6});
  }
  layer_case.inputs() = quantized;
  EXPECT_EQ(layer_case.run(), plain);
}

class StaticInput : public ::testing::TestWithParam<MoeMode> {};
INSTANTIATE_TEST_SUITE_P(Moe, StaticInput, ::testing::Values(MoeMode::kFp8Tensor, MoeMode::kNvfp4),
                         mode_test_name);

// Every expert's rows are those of a layer whose one multiplier is this expert's.
TEST_P(StaticInput, IsCodedWithTheMultiplierOfEachExpert) {
  const MoeShape shape{
      .tokens = 21, .hidden = 272, .inter = 144, .experts = 5, .top_k = 3, .shared_experts = 1};
  MoeCase layer_case(GetParam(), shape, Activation::swiglu(), 9);
  const float base = layer_case.weights().input_multiplier->value;
  std::vector<float> each;
  for (int i = 0; i < 6; ++i) each.push_back(base * (0.5F + 0.3F * static_cast<float>(i)));
  layer_case.weights().input_multiplier =
      PerExpert(TensorView::contiguous(each.data(), DType::kF32, {6}));
  const MoeResult result = layer_case.run();
  EXPECT_EQ(layer_case.run(layer_case.prepare(), {.poison = 0x00, .guard = Guard::kPage}), result);
  std::vector<int32_t> ids(21 * 4);
  std::memcpy(ids.data(), result.topk_ids.data(), result.topk_ids.size());
  for (int32_t expert = 0; expert < 6; ++expert) {
    layer_case.weights().input_multiplier = each[static_cast<size_t>(expert)];
    const MoeResult one = layer_case.run();
    int64_t differing = 0;
    for (size_t slot = 0; slot < ids.size(); ++slot) {
      const bool is_same = std::memcmp(&result.slot_rows[slot * 272 * 2],
                                       &one.slot_rows[slot * 272 * 2], 272 * 2) == 0;
      if (ids[slot] == expert) {
        EXPECT_TRUE(is_same) << "expert " << expert << " slot " << slot;
      } else {
        differing += is_same ? 0 : 1;
      }
    }
    EXPECT_GT(differing, 0);
  }
}

}  // namespace
}  // namespace narrowfloat::testing
