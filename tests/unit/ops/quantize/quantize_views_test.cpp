// How views may lie in memory and what they may not mean: transposed inputs, overlapping buffers,
// per-batch scales that could be taken for row scales, values that are no enumerators.
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "narrowfloat/quantize.h"
#include "ops/quantize/quantize_checks.h"
#include "support/expect_error.h"
#include "support/special_floats.h"
#include "support/tensors.h"

namespace narrowfloat::testing {
namespace {

// FP8 1x128 of [Y, H, X] read as H matrices of Y rows: what a transposed copy would give.
TEST(QuantizeViews, TakeATransposedInputAsItsCopy) {
  constexpr int64_t kY = 5;
  constexpr int64_t kH = 3;
  constexpr int64_t kX = 144;
  const Matrix input = Matrix::filled({DType::kBF16, 1, kY * kH, kX, 16}, Fill::kNormal, 7);
  const Matrix copy({DType::kBF16, kH, kY, kX, 0});
  for (int64_t y = 0; y < kY; ++y) {
    for (int64_t h = 0; h < kH; ++h) {
      for (int64_t x = 0; x < kX; ++x) copy.set(h * kY + y, x, input.at(y * kH + h, x));
    }
  }
  TensorView view = input.view(2);
  const int64_t stride = input.stride();
  view.rank = 3;
  view.shape = {kH, kY, kX, 0};
  view.strides = {stride, kH * stride, 1, 0};
  for (const FormatInfo& info : all_formats()) {
    if (kX % 32 != 0 && info.block_cols == 32) continue;
    const QuantizedLayout layout = quantized_layout(info.id, kY, kX, {.batch = kH});
    const QuantizedTensor transposed(layout);
    const QuantizedTensor expected(layout);
    quantize(view, transposed.view);
    quantize(copy.view(3), expected.view);
    EXPECT_EQ(transposed.values.copy(), expected.values.copy()) << info.name;
    EXPECT_EQ(transposed.scales.copy(), expected.scales.copy()) << info.name;
  }
}

// On a GPU rows lie multiples of 16 bytes apart; along an axis of one entry nothing lies apart.
TEST(QuantizeViews, MayHaveAnyStrideAlongAnAxisOfOneEntryOnAGpu) {
  constexpr int64_t kCols = 128;
  const Device gpu{DeviceType::kCuda, 0};
  const QuantizedLayout layout = quantized_layout(FormatId::kMxfp8, 1, kCols, {.batch = 3});
  const Matrix memory({DType::kBF16, 3, 1, kCols, 0});
  const QuantizedTensor output(layout);
  QuantizeCall call{
      .input = memory.view(3),
      .output = layout.bind(output.values.data(), output.scales.data(), nullptr, gpu)};
  call.input.device = gpu;
  call.input.strides = {kCols, 1, 1, 0};
  const LoweredQuantize lowered = lower(call);
  EXPECT_EQ(lowered.args.input_batch_stride, kCols);
  EXPECT_EQ(lowered.args.input_stride, kCols);
  call.input.strides = {kCols + 1, 1, 1, 0};
  expect_error(ErrorKind::kInvalidArgument, {"input: expected rows a multiple of 16 bytes apart"},
               [&] { lower(call); });
}

TEST(QuantizeViews, RefuseBuffersThatOverlap) {
  std::vector<uint16_t> memory(4096, 0x3F80);
  const auto input = TensorView::contiguous(memory.data(), DType::kBF16, {8, 128});
  const QuantizedLayout layout = quantized_layout(FormatId::kMxfp8, 8, 128);
  std::vector<uint8_t> scales(static_cast<size_t>(layout.scales_bytes));
  const QuantizedView onto_input = layout.bind(memory.data() + 512, scales.data(), nullptr);
  expect_error(ErrorKind::kInvalidArgument, {"output.values", "overlaps input"},
               [&] { quantize(input, onto_input); });
  const QuantizedView one_buffer = layout.bind(memory.data() + 2048, memory.data() + 2050, nullptr);
  expect_error(ErrorKind::kInvalidArgument, {"output.values", "overlaps output.scales"},
               [&] { quantize(input, one_buffer); });
  EXPECT_EQ(memory, std::vector<uint16_t>(4096, 0x3F80));
  std::vector<uint8_t> values(static_cast<size_t>(layout.values_bytes));
  const QuantizedView apart = layout.bind(values.data(), scales.data(), nullptr);
  quantize(input, apart);
  const auto output = TensorView::contiguous(values.data(), DType::kBF16, {8, 128});
  expect_error(ErrorKind::kInvalidArgument, {"output", "overlaps input.values"},
               [&] { dequantize(apart, output); });
}

// Every block of a GPU kernel reads it, while some already write.
TEST(QuantizeViews, RefuseABaseScaleInAnOutput) {
  const Matrix input = Matrix::filled({DType::kBF16, 1, 4, 64, 0}, Fill::kNormal, 3);
  const QuantizedTensor output(quantized_layout(FormatId::kNvfp4PerToken, 4, 64));
  const std::pair<void*, const char*> places[] = {
      {output.view.values.data, "output.values: overlaps base_decode_scales"},
      {output.view.scales.data, "output.scales: overlaps base_decode_scales"},
      {output.view.global_scale.data, "output.global_scale: overlaps base_decode_scales"}};
  for (const auto& [place, message] : places) {
    const float base = 0x1p-11F;
    std::memcpy(place, &base, sizeof(base));
    const QuantizeOptions options{.base_decode_scales =
                                      TensorView::contiguous(place, DType::kF32, {1})};
    expect_error(ErrorKind::kInvalidArgument, {message},
                 [&] { quantize(input.view(), output.view, options); });
    EXPECT_EQ(std::memcmp(place, &base, sizeof(base)), 0);
  }
}

TEST(QuantizeViews, RefuseANormOutputThatIsTheInput) {
  const Matrix input = Matrix::filled({DType::kF16, 1, 4, 64, 0}, Fill::kNormal, 3);
  const Matrix weight = Matrix::filled({DType::kF16, 1, 1, 64, 0}, Fill::kNormal, 4);
  const QuantizedTensor output(quantized_layout(FormatId::kMxfp4, 4, 64));
  const RmsNormOptions norm{.norm_output = input.view()};
  expect_error(ErrorKind::kInvalidArgument, {"norm_output", "overlaps input"},
               [&] { rmsnorm_quantize(input.view(), weight.view(), output.view, norm); });
}

// With as many rows as batches a flat list of scales could mean either.
TEST(QuantizeViews, KeepScalesPerBatchApartFromScalesPerRow) {
  constexpr int64_t kCount = 4;
  const Matrix input({DType::kF32, kCount, kCount, 16, 0});
  for (int64_t row = 0; row < kCount * kCount; ++row) {
    for (int64_t col = 0; col < 16; ++col) {
      input.set(row, col, static_cast<float>(row / kCount + 1));
    }
  }
  const auto valid = Vector::of<int32_t>(DType::kI32, {4, 4, 4, 4});
  const QuantizeOptions options{.valid_rows = valid.view()};
  QuantizedTensor output(quantized_layout(
      FormatId::kNvfp4, kCount, 16, {.batch = kCount, .global_scale_axis = ScaleAxis::kBatch}));
  quantize(input.view(3), output.view, options);
  const Matrix decoded({DType::kF32, kCount, kCount, 16, 0});
  dequantize(output.view, decoded.view(3));
  for (int64_t row = 0; row < kCount * kCount; ++row) {
    EXPECT_NEAR(decoded.at(row, 3), static_cast<float>(row / kCount + 1), 1e-3) << row;
  }
  output.view.global_scale =
      TensorView::contiguous(output.view.global_scale.data, DType::kF32, {kCount});
  expect_error(ErrorKind::kInvalidArgument, {"global_scale", "[4, 1]"},
               [&] { quantize(input.view(3), output.view, options); });
}

TEST(QuantizeViews, OfAGivenFp8ScaleHaveOneArithmetic) {
  // A product of two denormals' neighbours, which flushing would lose.
  const std::vector<float> input(16, 0x1p-127F);
  const auto view = TensorView::contiguous(input.data(), DType::kF32, {1, 16});
  const QuantizedLayout layout = quantized_layout(FormatId::kFp8Tensor, 1, 16);
  std::vector<std::vector<uint8_t>> codes;
  for (const MathMode math : {MathMode::kExact, MathMode::kFast}) {
    const QuantizedTensor output(layout);
    quantize(view, output.view, {.math = math, .fp8_decode_scale = 0x1p-126F});
    codes.push_back(output.values.copy());
  }
  EXPECT_EQ(codes[0], codes[1]);
  EXPECT_EQ(codes[0][0], 0x30);  // 0.5
  const QuantizedTensor output(layout);
  expect_error(ErrorKind::kInvalidArgument, {"fp8_decode_scale", "fp8_rule"}, [&] {
    quantize(view, output.view, {.fp8_rule = Fp8ScaleRule::kAmaxDiv, .fp8_decode_scale = 1.0F});
  });
}

// E4M3 input to MXFP4: a NaN scale byte makes every code NaN's, also that of zero.
TEST(QuantizeViews, OfE4M3WithAnUnusableDeviceScaleGiveNanCodes) {
  const std::vector<uint8_t> input = {0x00, 0x38, 0xB8, 0x40, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
                                      0,    0,    0,    0,    0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0};
  const auto view = TensorView::contiguous(input.data(), DType::kF8E4M3, {1, 32});
  for (const float scale : {kFloatNan, kFloatInfinity}) {
    const auto scales = Vector::of<float>(DType::kF32, {scale});
    const QuantizedTensor output(quantized_layout(FormatId::kMxfp4, 1, 32));
    quantize(view, output.view, {.encode_scales = scales.view()});
    EXPECT_EQ(output.scales.copy()[0], 0xFF) << scale;
    EXPECT_EQ(output.values.copy(), std::vector<uint8_t>(16, 0x77)) << scale;
  }
}

TEST(QuantizeViews, RefuseValuesThatAreNoEnumerators) {
  const Matrix input = Matrix::filled({DType::kBF16, 1, 2, 128, 0}, Fill::kNormal, 5);
  const QuantizedTensor output(quantized_layout(FormatId::kNvfp4, 2, 128));
  const auto refused = [&](const char* what, const QuantizeOptions& options) {
    expect_error(ErrorKind::kInvalidArgument, {what, "9"},
                 [&] { quantize(input.view(), output.view, options); });
  };
  refused("math mode", {.math = static_cast<MathMode>(9)});
  refused("UE8M0 rounding", {.mx_scale = static_cast<Ue8m0Rounding>(9)});
  refused("FP8 scale rule", {.fp8_rule = static_cast<Fp8ScaleRule>(9)});
  refused("four_over_six.error",
          {.four_over_six = {.enabled = true, .error = static_cast<FourOverSixError>(9)}});
  refused("four_over_six.error_math",
          {.four_over_six = {.enabled = true, .error_math = static_cast<FourOverSixMath>(9)}});
  EXPECT_FALSE(format_info(FormatId::kNvfp4).allows(static_cast<ScaleLayoutId>(9)));
  expect_error(ErrorKind::kInvalidArgument, {"scale type", "9"},
               [] { (void)bytes(static_cast<ScaleType>(9)); });
}

TEST(QuantizeViews, RefuseNegativeExtentsAndWrongRanks) {
  std::vector<float> data(256, 1.0F);
  float result = -1.0F;
  const auto output = TensorView::contiguous(&result, DType::kF32, {1});
  TensorView view = TensorView::contiguous(data.data(), DType::kF32, {4, 64});
  view.shape[0] = -4;
  expect_error(ErrorKind::kInvalidArgument, {"input", ">= 0", "-4"},
               [&] { tensor_amax(view, output); });
  view.shape[0] = 4;
  view.rank = 9;
  expect_error(ErrorKind::kInvalidArgument, {"input", "rank", "9"},
               [&] { tensor_amax(view, output); });
  EXPECT_EQ(result, -1.0F);
}

}  // namespace
}  // namespace narrowfloat::testing
