// Each requirement of the quantizers violated once: the kind of error, the parts of its message
// (argument, expected, got), and that no output byte changed.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <ostream>

#include "ops/quantize/quantize_checks.h"
#include "support/expect_error.h"
#include "support/tensors.h"

namespace narrowfloat::testing {
namespace {

constexpr int64_t kBatch = 2;
constexpr int64_t kRows = 6;
constexpr int64_t kCols = 128;

void call(const QuantizeCall& c) {
  switch (c.source) {
    case RowSourceKind::kPlain:
      return quantize(c.input, c.output, c.options);
    case RowSourceKind::kSiluMul:
      return silu_mul_quantize(c.input, c.output, c.options);
    case RowSourceKind::kSmooth:
      return smooth_quantize(c.input, c.vector, c.output, c.options);
    case RowSourceKind::kRmsNorm:
      return rmsnorm_quantize(c.input, c.vector, c.output, c.norm, c.options);
    case RowSourceKind::kAddRmsNorm:
      return add_rmsnorm_quantize(c.input, c.residual, c.vector, c.output, c.norm, c.options);
  }
}

// A call that works, and its buffers. FP8 1x128 has one batch (row groups need that).
struct Working {
  Matrix input;
  Matrix residual;
  Matrix vector;
  Matrix norm_output;
  QuantizedTensor output;
  QuantizedTensor extra;
  Vector scales{DType::kF32, 16};
  Vector rows = Vector::of<int32_t>(DType::kI32, {1, 2});
  Vector offsets = Vector::of<int64_t>(DType::kI64, {0, 2, 6});
  QuantizeCall call;

  Working(FormatId format, RowSourceKind source) {
    const bool has_rows_only =
        format == FormatId::kFp8Block1x128 || format == FormatId::kNvfp4PerToken;
    const MatrixShape shape{.dtype = DType::kBF16,
                            .batch = has_rows_only ? 1 : kBatch,
                            .rows = kRows,
                            .cols = kCols};
    MatrixShape in = shape;
    in.cols *= source == RowSourceKind::kSiluMul ? 2 : 1;
    input = Matrix::filled(in, Fill::kNormal, 1);
    residual = Matrix::filled(shape, Fill::kNormal, 2);
    vector = Matrix::filled({.dtype = DType::kBF16, .rows = 1, .cols = kCols}, Fill::kNormal, 3);
    norm_output = Matrix(shape);
    const auto layout = quantized_layout(format, kRows, kCols, {.batch = shape.batch});
    output = QuantizedTensor(layout);
    extra = QuantizedTensor(layout);
    for (float& scale : scales.buffer().span<float>()) scale = 1.0F;
    call.source = source;
    call.input = input.view(3);
    call.vector = TensorView::contiguous(vector.row(0), DType::kBF16, {kCols});
    call.residual = residual.view(3);
    call.output = output.view;
  }

  [[nodiscard]] TensorView scale_view(int64_t count) const {
    return TensorView::contiguous(scales.buffer().data(), DType::kF32, {count});
  }
  [[nodiscard]] std::vector<std::vector<uint8_t>> outputs() const {
    return {output.values.copy(),      output.scales.copy(),         output.global_scale.copy(),
            extra.scales.copy(),       norm_output.buffer().copy(),  residual.buffer().copy()};
  }
};

using Apply = void (*)(QuantizeCall& call, const Working& working);

struct Violation {
  const char* name;
  FormatId format;
  RowSourceKind source;
  Apply apply;
  std::vector<std::string> fragments;
};

void PrintTo(const Violation& violation, std::ostream* out) { *out << violation.name; }

class QuantizeChecks : public ::testing::TestWithParam<Violation> {};

TEST_P(QuantizeChecks, ThrowAndWriteNothing) {
  const Violation& violation = GetParam();
  const Working working(violation.format, violation.source);
  QuantizeCall broken = working.call;
  const auto before = working.outputs();
  violation.apply(broken, working);
  expect_error(ErrorKind::kInvalidArgument, violation.fragments, [&] { call(broken); });
  EXPECT_EQ(before, working.outputs());
  // The same call without the violation works: it is what is refused.
  EXPECT_NO_THROW(call(working.call));
}

// Short names for the tables.
using C = QuantizeCall;
using W = Working;
constexpr auto kNv = FormatId::kNvfp4;
constexpr auto kTok = FormatId::kNvfp4PerToken;
constexpr auto kMx4 = FormatId::kMxfp4;
constexpr auto kMx8 = FormatId::kMxfp8;
constexpr auto kF1 = FormatId::kFp8Block1x128;
constexpr auto kF128 = FormatId::kFp8Block128x128;
constexpr auto kFt = FormatId::kFp8Tensor;
constexpr auto kPlain = RowSourceKind::kPlain;
constexpr auto kSilu = RowSourceKind::kSiluMul;
constexpr auto kSmooth = RowSourceKind::kSmooth;
constexpr auto kNorm = RowSourceKind::kRmsNorm;
constexpr auto kAdd = RowSourceKind::kAddRmsNorm;
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();
const Device kGpu{.type = DeviceType::kCuda, .index = 1};

std::string name_of(const ::testing::TestParamInfo<Violation>& test) { return test.param.name; }

const std::vector<Violation> kInputs{
    {"dtype", kNv, kPlain, [](C& c, const W&) { c.input.dtype = DType::kI32; },
     {"input", "F32 or BF16 or F16 or F8_E4M3", "I32"}},
    {"dtype_e4m3", kMx8, kPlain, [](C& c, const W&) { c.input.dtype = DType::kF8E4M3; },
     {"input", "F32 or BF16 or F16", "F8_E4M3"}},
    {"dtype_per_token", kTok, kPlain, [](C& c, const W&) { c.input.dtype = DType::kF8E4M3; },
     {"input", "F8_E4M3"}},
    {"dtype_silu", kNv, kSilu, [](C& c, const W&) { c.input.dtype = DType::kF32; },
     {"input", "BF16 or F16", "F32"}},
    {"dtype_smooth", kNv, kSmooth, [](C& c, const W&) { c.input.dtype = DType::kF16; },
     {"input", "BF16", "F16"}},
    {"dtype_norm", kMx8, kNorm, [](C& c, const W&) { c.input.dtype = DType::kF32; },
     {"input", "BF16 or F16", "F32"}},
    {"scalar", kNv, kPlain, [](C& c, const W&) { c.input.rank = 0; }, {"input", "axis"}},
    {"null", kNv, kPlain, [](C& c, const W&) { c.input.data = nullptr; }, {"input", "null"}},
    {"misaligned", kNv, kPlain,
     [](C& c, const W&) { c.input.data = static_cast<char*>(c.input.data) + 1; },
     {"input", "aligned to 2", "0x"}},
    {"columns", kNv, kPlain, [](C& c, const W&) { c.input.shape[2] = 112; },
     {"input", "128 columns", "BF16[2, 6, 112]"}},
    {"columns_silu", kNv, kSilu, [](C& c, const W&) { c.input.shape[2] = 128; },
     {"input", "256 columns", "128"}},
    {"rows", kNv, kPlain, [](C& c, const W&) { c.input.shape[0] = 3; }, {"input", "12", "3, 6"}},
    {"last_stride", kNv, kPlain, [](C& c, const W&) { c.input.strides[2] = 2; },
     {"input", "stride 1", "got 2"}},
    {"row_stride", kNv, kPlain, [](C& c, const W&) { c.input.strides[1] = 64; },
     {"input", "at least 128", "got 64"}},
    {"batch_stride", kNv, kPlain, [](C& c, const W&) { c.input.strides[0] = 6 * 128 + 16; },
     {"input", "768", "784"}},
    {"rows_overflow", kNv, kPlain,
     [](C& c, const W&) { c.input.shape = {INT64_MAX / 2, 8, 128, 0}; }, {"2^63"}},
    {"smooth_dtype", kNv, kSmooth, [](C& c, const W&) { c.vector.dtype = DType::kF16; },
     {"smooth", "BF16", "F16"}},
    {"smooth_count", kNv, kSmooth, [](C& c, const W&) { c.vector.shape[0] = 64; },
     {"smooth", "128 values", "BF16[64]"}},
    {"weight_count", kMx8, kNorm, [](C& c, const W&) { c.vector.shape[0] = 64; },
     {"weight", "128 values", "64"}},
    {"weight_null", kMx8, kNorm, [](C& c, const W&) { c.vector.data = nullptr; },
     {"weight", "null"}},
    {"weight_stride", kMx8, kNorm, [](C& c, const W&) { c.vector.strides[0] = 2; },
     {"weight", "dense", "stride 2"}},
    {"weight_device", kMx8, kNorm, [](C& c, const W&) { c.vector.device = kGpu; },
     {"weight", "cpu", "cuda:1"}},
    {"residual_dtype", kNv, kAdd, [](C& c, const W&) { c.residual.dtype = DType::kF16; },
     {"residual", "BF16", "F16"}},
    {"residual_device", kNv, kAdd, [](C& c, const W&) { c.residual.device = kGpu; },
     {"residual", "cpu", "cuda:1"}},
    {"residual_columns", kNv, kAdd, [](C& c, const W&) { c.residual.shape[2] = 64; },
     {"residual", "128 columns"}},
    {"residual_rows", kNv, kAdd, [](C& c, const W&) { c.residual.shape[0] = 3; },
     {"residual", "12", "3, 6"}},
};
INSTANTIATE_TEST_SUITE_P(Inputs, QuantizeChecks, ::testing::ValuesIn(kInputs), name_of);

const std::vector<Violation> kOutputs{
    {"format", kNv, kPlain, [](C& c, const W&) { c.output.format = static_cast<FormatId>(42); },
     {"format", "42"}},
    {"rows_negative", kNv, kPlain, [](C& c, const W&) { c.output.rows = -1; }, {"-1"}},
    {"batch_negative", kNv, kPlain, [](C& c, const W&) { c.output.batch = -2; },
     {"output", "-2"}},
    {"columns_nvfp4", kNv, kPlain, [](C& c, const W&) { c.output.cols = 120; },
     {"output", "nvfp4", "16", "120"}},
    {"columns_mxfp4", kMx4, kPlain, [](C& c, const W&) { c.output.cols = 112; },
     {"output", "mxfp4", "32", "112"}},
    {"columns_mxfp8", kMx8, kPlain, [](C& c, const W&) { c.output.cols = 112; },
     {"output", "mxfp8", "32", "112"}},
    {"columns_fp8", kF1, kPlain, [](C& c, const W&) { c.output.cols = 120; },
     {"output", "fp8_1x128", "16", "120"}},
    {"values_dtype", kNv, kPlain, [](C& c, const W&) { c.output.values.dtype = DType::kF8E4M3; },
     {"output.values", "U8", "F8_E4M3"}},
    {"values_dtype_fp8", kMx8, kPlain, [](C& c, const W&) { c.output.values.dtype = DType::kU8; },
     {"output.values", "F8_E4M3", "U8"}},
    {"values_scalar", kNv, kPlain, [](C& c, const W&) { c.output.values.rank = 0; },
     {"output.values", "axis"}},
    {"values_null", kNv, kPlain, [](C& c, const W&) { c.output.values.data = nullptr; },
     {"output.values", "null"}},
    {"values_columns", kNv, kPlain, [](C& c, const W&) { c.output.values.shape[2] = 128; },
     {"output.values", "64 columns", "128"}},
    {"values_padding", kMx8, kPlain, [](C& c, const W&) { c.output.values.shape[2] = 144; },
     {"output.values", "144"}},
    {"values_rows", kNv, kPlain, [](C& c, const W&) { c.output.values.shape[0] = 3; },
     {"output.values", "2 x 6", "3, 6"}},
    {"values_stride", kNv, kPlain,
     [](C& c, const W&) { c.output.values.strides = {12 * 70, 70, 1, 0}; },
     {"output.values", "stride"}},
    {"values_device", kNv, kPlain, [](C& c, const W&) { c.output.values.device = kGpu; },
     {"output.values", "cuda:1"}},
    {"device", kNv, kPlain,
     [](C& c, const W&) {
       c.output.values.device = kGpu;
       c.output.scales.device = kGpu;
     },
     {"output", "expected device cpu", "cuda:1"}},
    {"scales_type", kNv, kPlain, [](C& c, const W&) { c.output.scales.type = ScaleType::kUE8M0; },
     {"output.scales", "E4M3", "UE8M0"}},
    {"scales_layout", kNv, kPlain,
     [](C& c, const W&) { c.output.scales.layout = ScaleLayoutId::kMnMajor; },
     {"output.scales", "nvfp4", "mn_major"}},
    {"scales_layout_fp8", kF128, kPlain,
     [](C& c, const W&) { c.output.scales.layout = ScaleLayoutId::kSwizzled128x4; },
     {"output.scales", "fp8_128x128", "swizzled_128x4"}},
    {"scales_batch", kNv, kPlain, [](C& c, const W&) { c.output.scales.batch = -1; },
     {"output.scales", "-1"}},
    {"scales_capacity", kNv, kPlain, [](C& c, const W&) { c.output.scales.capacity = 96; },
     {"output.scales", "2048", "96", "padding"}},
    {"scales_null", kNv, kPlain, [](C& c, const W&) { c.output.scales.data = nullptr; },
     {"output.scales", "null"}},
    {"scales_misaligned", kF1, kPlain,
     [](C& c, const W&) { c.output.scales.data = static_cast<char*>(c.output.scales.data) + 2; },
     {"output.scales", "aligned to 4"}},
    {"scales_extents", kNv, kPlain, [](C& c, const W&) { c.output.scales.rows = 7; },
     {"output.scales", "2 x 6 x 8", "2 x 7 x 8"}},
    {"global_scale_absent", kNv, kPlain, [](C& c, const W&) { c.output.global_scale = {}; },
     {"output.global_scale"}},
    {"global_scale_dtype", kNv, kPlain,
     [](C& c, const W&) { c.output.global_scale.dtype = DType::kBF16; },
     {"output.global_scale", "F32", "BF16"}},
    {"global_scale_count", kTok, kPlain, [](C& c, const W&) { c.output.global_scale.shape[0] = 1; },
     {"output.global_scale", "6 values", "F32[1]"}},
    {"global_scale_null", kNv, kPlain,
     [](C& c, const W&) { c.output.global_scale.data = nullptr; },
     {"output.global_scale", "null"}},
    {"global_scale_unused", kMx4, kPlain,
     [](C& c, const W& w) { c.output.global_scale = w.scale_view(1); },
     {"output.global_scale", "mxfp4", "none"}},
    {"global_scale_of_rows", kNv, kPlain,
     [](C& c, const W& w) { c.options.encode_scales = w.scale_view(kRows); },
     {"output.global_scale", "6 values", "F32[1]"}},
};
INSTANTIATE_TEST_SUITE_P(Outputs, QuantizeChecks, ::testing::ValuesIn(kOutputs), name_of);

const std::vector<Violation> kUnusedOptions{
    {"encode_scale", kMx4, kPlain, [](C& c, const W&) { c.options.encode_scale = 1.0F; },
     {"encode_scale", "mxfp4"}},
    {"encode_scale_per_token", kTok, kPlain, [](C& c, const W&) { c.options.encode_scale = 1.0F; },
     {"encode_scale", "nvfp4_per_token"}},
    {"encode_scales", kMx8, kPlain,
     [](C& c, const W& w) { c.options.encode_scales = w.scale_view(1); },
     {"encode_scales", "mxfp8"}},
    {"four_over_six", kMx8, kPlain,
     [](C& c, const W&) { c.options.four_over_six.enabled = true; }, {"four_over_six", "mxfp8"}},
    {"base_decode_scale", kNv, kPlain, [](C& c, const W&) { c.options.base_decode_scale = 1.0F; },
     {"base_decode_scale", "nvfp4"}},
    {"row_list", kNv, kPlain, [](C& c, const W& w) { c.options.row_list = w.rows.view(); },
     {"row_list", "nvfp4"}},
    {"mx_scale", kNv, kPlain, [](C& c, const W&) { c.options.mx_scale = Ue8m0Rounding::kEven; },
     {"mx_scale", "nvfp4"}},
    {"fp8_rule", kMx8, kPlain, [](C& c, const W&) { c.options.fp8_rule = Fp8ScaleRule::kAmaxDiv; },
     {"fp8_rule", "mxfp8"}},
    {"fp8_eps", kNv, kPlain, [](C& c, const W&) { c.options.fp8_eps = 1.0F; },
     {"fp8_eps", "nvfp4"}},
    {"fp8_decode_scale", kF1, kPlain, [](C& c, const W&) { c.options.fp8_decode_scale = 1.0F; },
     {"fp8_decode_scale", "fp8_1x128"}},
    {"valid_rows", kF128, kPlain, [](C& c, const W& w) { c.options.valid_rows = w.rows.view(); },
     {"valid_rows", "fp8_128x128"}},
    {"row_offsets", kFt, kPlain, [](C& c, const W& w) { c.options.row_offsets = w.offsets.view(); },
     {"row_offsets", "fp8_tensor"}},
};
INSTANTIATE_TEST_SUITE_P(UnusedOptions, QuantizeChecks, ::testing::ValuesIn(kUnusedOptions),
                         name_of);

const std::vector<Violation> kOptionValues{
    {"encode_scale_zero", kNv, kPlain, [](C& c, const W&) { c.options.encode_scale = 0.0F; },
     {"encode_scale", "> 0", "got 0"}},
    {"encode_scale_negative", kNv, kPlain, [](C& c, const W&) { c.options.encode_scale = -2.0F; },
     {"encode_scale", "got -2"}},
    {"encode_scale_infinite", kNv, kPlain, [](C& c, const W&) { c.options.encode_scale = kInf; },
     {"encode_scale", "inf"}},
    {"encode_scale_nan", kNv, kPlain, [](C& c, const W&) { c.options.encode_scale = kNan; },
     {"encode_scale", "nan"}},
    {"both_scales", kNv, kPlain,
     [](C& c, const W& w) {
       c.options.encode_scale = 1.0F;
       c.options.encode_scales = w.scale_view(1);
     },
     {"encode_scale", "encode_scales", "both"}},
    {"encode_scales_count", kNv, kPlain,
     [](C& c, const W& w) { c.options.encode_scales = w.scale_view(5); },
     {"encode_scales", "1 or 6", "F32[5]"}},
    {"encode_scales_dtype", kNv, kPlain,
     [](C& c, const W& w) {
       c.options.encode_scales = w.scale_view(1);
       c.options.encode_scales.dtype = DType::kF16;
     },
     {"encode_scales", "F32", "F16"}},
    {"encode_scales_device", kNv, kPlain,
     [](C& c, const W& w) {
       c.options.encode_scales = w.scale_view(1);
       c.options.encode_scales.device = kGpu;
     },
     {"encode_scales", "cpu", "cuda:1"}},
    {"encode_scales_of_batches", kNv, kPlain,
     [](C& c, const W& w) {
       c.options.valid_rows = w.rows.view();
       c.options.encode_scales = w.scale_view(kRows);
     },
     {"encode_scales", "1 or 2", "F32[6]"}},
    {"base_decode_scale_zero", kTok, kPlain,
     [](C& c, const W&) { c.options.base_decode_scale = 0.0F; }, {"base_decode_scale", "got 0"}},
    {"base_decode_scale_nan", kTok, kPlain,
     [](C& c, const W&) { c.options.base_decode_scale = kNan; }, {"base_decode_scale", "nan"}},
    {"fp8_decode_scale_zero", kFt, kPlain,
     [](C& c, const W&) { c.options.fp8_decode_scale = 0.0F; }, {"fp8_decode_scale", "got 0"}},
    {"fp8_decode_scale_infinite", kFt, kPlain,
     [](C& c, const W&) { c.options.fp8_decode_scale = kInf; }, {"fp8_decode_scale", "inf"}},
    {"e4m3_max", kNv, kPlain,
     [](C& c, const W&) { c.options.four_over_six = {.enabled = true, .e4m3_max = 300}; },
     {"e4m3_max", "448 or 256", "300"}},
    {"e4m3_max_alone", kNv, kPlain,
     [](C& c, const W&) { c.options.four_over_six.e4m3_max = 256; }, {"e4m3_max", "enabled"}},
    {"eps_negative", kF1, kPlain, [](C& c, const W&) { c.options.fp8_eps = -1.0F; },
     {"fp8_eps", ">= 0", "-1"}},
    {"eps_nan", kF1, kPlain, [](C& c, const W&) { c.options.fp8_eps = kNan; }, {"fp8_eps", "nan"}},
    {"eps_tiny", kF1, kPlain,
     [](C& c, const W&) {
       c.options.fp8_rule = Fp8ScaleRule::kAmaxDiv;
       c.options.fp8_eps = 0.0F;
     },
     {"fp8_eps", "at least", "got 0"}},
    {"eps_fast", kF1, kPlain,
     [](C& c, const W&) {
       c.options.math = MathMode::kFast;
       c.options.fp8_eps = 1e-4F;
     },
     {"fp8_eps", "expected 0", "fast"}},
};
INSTANTIATE_TEST_SUITE_P(OptionValues, QuantizeChecks, ::testing::ValuesIn(kOptionValues),
                         name_of);

const std::vector<Violation> kRowOptions{
    {"list_dtype", kTok, kPlain,
     [](C& c, const W& w) {
       c.options.row_list = w.rows.view();
       c.options.row_list.dtype = DType::kI64;
     },
     {"row_list", "I32", "I64"}},
    {"list_null", kTok, kPlain,
     [](C& c, const W& w) {
       c.options.row_list = w.rows.view();
       c.options.row_list.data = nullptr;
     },
     {"row_list", "null"}},
    {"valid_count", kNv, kPlain,
     [](C& c, const W& w) {
       c.options.valid_rows = w.rows.view();
       c.options.valid_rows.shape[0] = 1;
     },
     {"valid_rows", "2 values", "I32[1]"}},
    {"valid_dtype", kNv, kPlain,
     [](C& c, const W& w) {
       c.options.valid_rows = w.rows.view();
       c.options.valid_rows.dtype = DType::kU32;
     },
     {"valid_rows", "I32", "U32"}},
    {"valid_and_list", kTok, kPlain,
     [](C& c, const W& w) {
       c.options.valid_rows = w.rows.view();
       c.options.valid_rows.shape[0] = 1;
       c.options.row_list = w.rows.view();
     },
     {"valid_rows", "row_list", "both"}},
    {"valid_norm", kNv, kNorm, [](C& c, const W& w) { c.options.valid_rows = w.rows.view(); },
     {"valid_rows", "norm"}},
    {"offsets_rank", kF1, kPlain,
     [](C& c, const W& w) {
       c.options.row_offsets = w.offsets.view();
       c.options.row_offsets.rank = 2;
     },
     {"row_offsets", "groups + 1"}},
    {"offsets_count", kF1, kPlain,
     [](C& c, const W& w) {
       c.options.row_offsets = w.offsets.view();
       c.options.row_offsets.shape[0] = 1;
     },
     {"row_offsets", "at least one group", "I64[1]"}},
    {"offsets_dtype", kF1, kPlain,
     [](C& c, const W& w) {
       c.options.row_offsets = w.offsets.view();
       c.options.row_offsets.dtype = DType::kU64;
     },
     {"row_offsets", "I64", "U64"}},
    {"offsets_start", kF1, kPlain,
     [](C& c, const W& w) {
       c.options.row_offsets = w.offsets.view();
       c.options.row_offsets.data = w.offsets.buffer().data<int64_t>() + 1;
       c.options.row_offsets.shape[0] = 2;
     },
     {"row_offsets", "0 to 6", "2 to 6"}},
    {"offsets_end", kF1, kPlain,
     [](C& c, const W& w) {
       c.options.row_offsets = w.offsets.view();
       c.options.row_offsets.shape[0] = 2;
     },
     {"row_offsets", "0 to 6", "0 to 2"}},
    {"offsets_layout", kF1, kPlain,
     [](C& c, const W& w) {
       c.options.row_offsets = w.offsets.view();
       c.output.scales.layout = ScaleLayoutId::kLinear;
     },
     {"row_offsets", "mn_major", "linear"}},
    {"offsets_image", kF1, kPlain,
     [](C& c, const W& w) { c.options.row_offsets = w.offsets.view(); },
     {"output.scales", "1 x 64 x 1", "1 x 6 x 1"}},
};
INSTANTIATE_TEST_SUITE_P(RowOptions, QuantizeChecks, ::testing::ValuesIn(kRowOptions), name_of);

const std::vector<Violation> kNormOptions{
    {"eps_negative", kNv, kNorm, [](C& c, const W&) { c.norm.eps = -1.0F; },
     {"norm.eps", ">= 0", "-1"}},
    {"eps_nan", kNv, kAdd, [](C& c, const W&) { c.norm.eps = kNan; }, {"norm.eps", "nan"}},
    {"output_dtype", kNv, kNorm,
     [](C& c, const W& w) {
       c.norm.norm_output = w.norm_output.view(3);
       c.norm.norm_output.dtype = DType::kF16;
     },
     {"norm.norm_output", "BF16", "F16"}},
    {"output_count", kNv, kNorm,
     [](C& c, const W& w) {
       c.norm.norm_output = w.norm_output.view(3);
       c.norm.norm_output.shape[1] = 5;
     },
     {"norm.norm_output", "1536", "2, 5, 128"}},
    {"output_dense", kNv, kNorm,
     [](C& c, const W& w) {
       c.norm.norm_output = w.norm_output.view(3);
       c.norm.norm_output.strides[1] = 130;
     },
     {"norm.norm_output", "dense", "130"}},
    {"output_device", kNv, kNorm,
     [](C& c, const W& w) {
       c.norm.norm_output = w.norm_output.view(3);
       c.norm.norm_output.device = kGpu;
     },
     {"norm.norm_output", "cpu", "cuda:1"}},
    {"extra_type", kNv, kNorm,
     [](C& c, const W& w) {
       c.norm.extra_scales = w.extra.view.scales;
       c.norm.extra_scales.type = ScaleType::kF32;
     },
     {"norm.extra_scales", "E4M3", "F32"}},
    {"extra_layout", kNv, kNorm,
     [](C& c, const W& w) {
       c.norm.extra_scales = w.extra.view.scales;
       c.norm.extra_scales.layout = ScaleLayoutId::kMnMajor;
     },
     {"norm.extra_scales", "mn_major"}},
    {"extra_device", kNv, kNorm,
     [](C& c, const W& w) {
       c.norm.extra_scales = w.extra.view.scales;
       c.norm.extra_scales.device = kGpu;
     },
     {"norm.extra_scales", "cpu", "cuda:1"}},
    {"extra_extents", kNv, kNorm,
     [](C& c, const W& w) {
       c.norm.extra_scales = w.extra.view.scales;
       c.norm.extra_scales.rows = 7;
     },
     {"norm.extra_scales", "2 x 6 x 8"}},
};
INSTANTIATE_TEST_SUITE_P(NormOptions, QuantizeChecks, ::testing::ValuesIn(kNormOptions), name_of);

// Requirements whose working call is not one of Working's.
TEST(QuantizeChecksMore, RowListAndOffsetsNeedOneBatch) {
  const Matrix input = Matrix::filled(
      {.dtype = DType::kBF16, .batch = 2, .rows = 3, .cols = 128}, Fill::kNormal, 1);
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

TEST(QuantizeChecksMore, RowOffsetsMustAscend) {
  const Matrix input = Matrix::filled({.dtype = DType::kBF16, .rows = 6, .cols = 128},
                                      Fill::kNormal, 1);
  const Vector offsets = Vector::of<int64_t>(DType::kI64, {0, 4, 3, 6});
  const QuantizedTensor output(quantized_layout(kF1, 6, 128, {.groups = 3}));
  QuantizeOptions options;
  options.row_offsets = offsets.view();
  expect_error(ErrorKind::kInvalidArgument, {"row_offsets", "ascending", "4", "3"},
               [&] { quantize(input.view(), output.view, options); });
  EXPECT_EQ(output.scales.copy(), std::vector<uint8_t>(output.scales.span().size(), 0xCC));
}

TEST(QuantizeChecksMore, E4m3InputExcludesFourOverSixAndOtherRoundings) {
  const Matrix input = Matrix::filled({.dtype = DType::kF8E4M3, .rows = 2, .cols = 64},
                                      Fill::kNormal, 1);
  const QuantizedTensor nvfp4(quantized_layout(kNv, 2, 64));
  expect_error(ErrorKind::kInvalidArgument, {"four_over_six", "F8_E4M3"}, [&] {
    quantize(input.view(), nvfp4.view, {.four_over_six = {.enabled = true}});
  });
  const QuantizedTensor mxfp4(quantized_layout(kMx4, 2, 64));
  expect_error(ErrorKind::kInvalidArgument, {"mx_scale", "up", "floor"}, [&] {
    quantize(input.view(), mxfp4.view, {.mx_scale = Ue8m0Rounding::kFloor});
  });
}

TEST(QuantizeChecksMore, NormsNeedSixtyFourColumns) {
  const Matrix input = Matrix::filled({.dtype = DType::kBF16, .rows = 2, .cols = 48},
                                      Fill::kNormal, 1);
  const TensorView weight = TensorView::contiguous(input.row(0), DType::kBF16, {48});
  const QuantizedTensor output(quantized_layout(kNv, 2, 48));
  expect_error(ErrorKind::kInvalidArgument, {"64", "48"},
               [&] { rmsnorm_quantize(input.view(), weight, output.view); });
}

TEST(QuantizeChecksMore, ConvertersRefuseOtherMaxima) {
  expect_error(ErrorKind::kInvalidArgument, {"e4m3_max", "448 or 256", "240"},
               [] { encode_scale_from_amax(1.0F, 240); });
  EXPECT_EQ(encode_scale_from_amax(0.0F), 1.0F);
  EXPECT_EQ(encode_scale_from_amax(kInf), 1.0F);
  EXPECT_EQ(encode_scale_from_amax(0x1p-149F), std::numeric_limits<float>::max());
  EXPECT_EQ(encode_scale_from_amax(3.0F, 256), 512.0F);
}

// All tensors of a call moved to a GPU that this build knows nothing of.
TEST(QuantizeChecksMore, UnsupportedDevicesAreRefusedWithEveryCandidatesReason) {
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

}  // namespace
}  // namespace narrowfloat::testing
