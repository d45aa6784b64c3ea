// Requirements that need a call of their own, devices nobody can do, and empty tensors.
#include <array>
#include <limits>

#include <gtest/gtest.h>

#include "support/expect_error.h"
#include "support/special_floats.h"
#include "unit/ops/quantize/refused_call.h"

namespace narrowfloat::testing {
namespace {

// Requirements that no call of refused_call.h can break.
TEST(QuantizeSpecialCalls, RowListAndOffsetsNeedOneBatch) {
  const Matrix input =
      Matrix::filled({.dtype = DType::kBF16, .batch = 2, .rows = 3, .cols = 128}, Fill::kNormal, 1);
  const Vector rows = Vector::of<int32_t>(DType::kI32, {0});
  const Vector offsets = Vector::of<int64_t>(DType::kI64, {0, 3});
  QuantizeOptions options;
  options.row_list = rows.view();
  const QuantizedTensor token(quantized_layout(kTok, 3, 128, {.batch = 2}));
  expect_error(ErrorKind::kInvalidArgument, {"row_list", "batch 1", "got 2"},
               [&] { quantize(input.view(), token.view, options); });
  options = {};
  options.row_offsets = offsets.view();
  const QuantizedTensor fp8(quantized_layout(kF1, 3, 128, {.batch = 2}));
  expect_error(ErrorKind::kInvalidArgument, {"row_offsets", "batch 1", "got 2"},
               [&] { quantize(input.view(), fp8.view, options); });
}

TEST(QuantizeSpecialCalls, RowOffsetsMustAscend) {
  const Matrix input =
      Matrix::filled({.dtype = DType::kBF16, .rows = 6, .cols = 128}, Fill::kNormal, 1);
  const Vector offsets = Vector::of<int64_t>(DType::kI64, {0, 4, 3, 6});
  const QuantizedTensor output(quantized_layout(kF1, 6, 128, {.groups = 3}));
  QuantizeOptions options;
  options.row_offsets = offsets.view();
  expect_error(ErrorKind::kInvalidArgument, {"row_offsets", "ascending", "4", "3"},
               [&] { quantize(input.view(), output.view, options); });
  EXPECT_EQ(output.scales.copy(), std::vector<uint8_t>(output.scales.span().size(), 0xCC));
}

TEST(QuantizeSpecialCalls, E4m3InputExcludesFourOverSixAndOtherRoundings) {
  const Matrix input =
      Matrix::filled({.dtype = DType::kF8E4M3, .rows = 2, .cols = 64}, Fill::kNormal, 1);
  const QuantizedTensor nvfp4(quantized_layout(kNv, 2, 64));
  expect_error(ErrorKind::kInvalidArgument, {"four_over_six", "F8_E4M3"},
               [&] { quantize(input.view(), nvfp4.view, {.four_over_six = {.enabled = true}}); });
  const QuantizedTensor mxfp4(quantized_layout(kMx4, 2, 64));
  expect_error(ErrorKind::kInvalidArgument, {"mx_scale", "up", "floor"},
               [&] { quantize(input.view(), mxfp4.view, {.mx_scale = Ue8m0Rounding::kFloor}); });
}

TEST(QuantizeSpecialCalls, NormsNeedSixtyFourColumns) {
  const Matrix input =
      Matrix::filled({.dtype = DType::kBF16, .rows = 2, .cols = 48}, Fill::kNormal, 1);
  const TensorView weight = TensorView::contiguous(input.row(0), DType::kBF16, {48});
  const QuantizedTensor output(quantized_layout(kNv, 2, 48));
  expect_error(ErrorKind::kInvalidArgument, {"64", "48"},
               [&] { rmsnorm_quantize(input.view(), weight, output.view); });
}

TEST(QuantizeSpecialCalls, ConvertersRefuseOtherMaxima) {
  expect_error(ErrorKind::kInvalidArgument, {"e4m3_max", "448 or 256", "240"},
               [] { encode_scale_from_amax(1.0F, 240); });
  EXPECT_EQ(encode_scale_from_amax(0.0F), 1.0F);
  EXPECT_EQ(encode_scale_from_amax(kFloatInfinity), 1.0F);
  EXPECT_EQ(encode_scale_from_amax(0x1p-149F), std::numeric_limits<float>::max());
  EXPECT_EQ(encode_scale_from_amax(3.0F, 256), 512.0F);
}

// All tensors of a call moved to a GPU that this build knows nothing of.
TEST(QuantizeSpecialCalls, UnsupportedDevicesAreRefusedWithEveryCandidatesReason) {
  if (build_has_cuda()) GTEST_SKIP() << "this build has implementations for CUDA";
  for (const FormatInfo& info : all_formats()) {
    Working working(info.id, kPlain);
    QuantizeCall moved = working.call;
    moved.input.device = kGpu;
    moved.output.values.device = kGpu;
    moved.output.scales.device = kGpu;
    moved.output.global_scale.device = kGpu;
    if (!info.has_global_scale) moved.output.global_scale = {};
    const auto before = working.outputs();
    expect_error(ErrorKind::kUnsupported,
                 {"quantize", "cuda:1", info.name.data(), "cpu_baseline: runs on the CPU only",
                  "cpu_reference: runs on the CPU only"},
                 [&] { call(moved); });
    EXPECT_EQ(before, working.outputs());
  }
}

// M = 0, K = 0 and B = 0 with null pointers, in every format and form.
TEST(QuantizeEmpty, EveryFormAcceptsEveryEmptyExtent) {
  for (const FormatInfo& info : all_formats()) {
    for (const RowSourceKind source : {kPlain, kSilu, kSmooth, kNorm, kAdd}) {
      for (const auto& [batch, rows, cols] :
           {std::array<int64_t, 3>{1, 0, 128}, {1, 4, 0}, {0, 4, 128}, {0, 0, 0}, {3, 0, 0}}) {
        QuantizedTensor output(quantized_layout(info.id, rows, cols, {.batch = batch}));
        const int64_t input_cols = source == kSilu ? 2 * cols : cols;
        QuantizeCall empty;
        empty.source = source;
        empty.input = TensorView::contiguous(nullptr, DType::kBF16, {batch, rows, input_cols});
        empty.residual = TensorView::contiguous(nullptr, DType::kBF16, {batch, rows, cols});
        const Vector vector(DType::kBF16, cols, {.poison = 0});
        empty.vector = vector.view();
        empty.output = output.view;
        if (output.values.size() == 0) empty.output.values.data = nullptr;
        if (output.scales.size() == 0) empty.output.scales.data = nullptr;
        if (output.global_scale.size() == 0) empty.output.global_scale.data = nullptr;
        SCOPED_TRACE(std::string(info.name) + " " + std::string(name(source)) + " " +
                     std::to_string(batch) + "x" + std::to_string(rows) + "x" +
                     std::to_string(cols));
        EXPECT_NO_THROW(call(empty));
        // A scale that exists without elements: 1 for FP8 tensors and encode scales, 0 for rows.
        for (const float scale : output.global_scale.span<float>()) {
          EXPECT_EQ(scale, info.has_row_scale ? 0.0F : 1.0F);
        }
        if (info.scale_type == ScaleType::kF32) {
          for (const float scale : output.scales.span<float>()) EXPECT_EQ(scale, 1.0F);
        }
      }
    }
  }
}

// Extents beside a 0 may be any numbers: nothing goes over 2^60 rows that have no columns.
TEST(QuantizeSpecialCalls, EmptyTensorsOfAnyExtentTakeNoTime) {
  constexpr int64_t kMany = int64_t{1} << 60;
  float scales[4] = {0, 0, 0, 0};
  float global = 0;
  for (const FormatInfo& info : all_formats()) {
    for (const auto& [batch, rows, cols] :
         {std::array{int64_t{1}, kMany, int64_t{0}}, std::array{kMany, int64_t{0}, int64_t{128}},
          std::array{kMany, int64_t{3}, int64_t{0}}}) {
      const bool has_scales_of_batches = info.id == FormatId::kFp8Tensor;
      if (info.has_row_scale || (has_scales_of_batches && batch > 1))
        continue;  // These have sizes.
      SCOPED_TRACE(::testing::Message() << info.name << " " << batch << " x " << rows);
      const QuantizedView view =
          quantized_layout(info.id, rows, cols, {.batch = batch}).bind(nullptr, scales, &global);
      const TensorView empty = TensorView::contiguous(nullptr, DType::kBF16, {batch, rows, cols});
      quantize(empty, view);
      dequantize(view, empty);
      if (!has_scales_of_batches) relayout(info.id, view.scales, view.scales);
    }
  }
  tensor_amax(TensorView::contiguous(nullptr, DType::kBF16, {kMany, 0}),
              TensorView::contiguous(&global, DType::kF32, {1}));
  EXPECT_EQ(global, 0);
}

}  // namespace
}  // namespace narrowfloat::testing
