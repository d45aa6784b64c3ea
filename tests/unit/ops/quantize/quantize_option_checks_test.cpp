// Each requirement on the options of a quantizer call violated once (see quantize_checks_test.cpp).
#include <gtest/gtest.h>

#include "support/special_floats.h"
#include "unit/ops/quantize/refused_call.h"

namespace narrowfloat::testing {
namespace {

class QuantizeOptionChecks : public ::testing::TestWithParam<Violation> {};

TEST_P(QuantizeOptionChecks, ThrowAndWriteNothing) { expect_refused(GetParam()); }

const std::vector<Violation> kUnusedOptions{
    {"encode_scale",
     kMx4,
     kPlain,
     [](C& c, const W&) { c.options.encode_scale = 1.0F; },
     {"encode_scale", "mxfp4"}},
    {"encode_scale_per_token",
     kTok,
     kPlain,
     [](C& c, const W&) { c.options.encode_scale = 1.0F; },
     {"encode_scale", "nvfp4_per_token"}},
    {"encode_scales",
     kMx8,
     kPlain,
     [](C& c, const W& w) { c.options.encode_scales = w.scale_view(1); },
     {"encode_scales", "mxfp8"}},
    {"four_over_six",
     kMx8,
     kPlain,
     [](C& c, const W&) { c.options.four_over_six.enabled = true; },
     {"four_over_six", "mxfp8"}},
    {"base_decode_scale",
     kNv,
     kPlain,
     [](C& c, const W&) { c.options.base_decode_scale = 1.0F; },
     {"base_decode_scale", "nvfp4"}},
    {"base_decode_scales",
     kNv,
     kPlain,
     [](C& c, const W& w) { c.options.base_decode_scales = w.scale_view(1); },
     {"base_decode_scales", "nvfp4"}},
    {"row_list",
     kNv,
     kPlain,
     [](C& c, const W& w) { c.options.row_list = w.rows.view(); },
     {"row_list", "nvfp4"}},
    {"mx_scale",
     kNv,
     kPlain,
     [](C& c, const W&) { c.options.mx_scale = Ue8m0Rounding::kEven; },
     {"mx_scale", "nvfp4"}},
    {"fp8_rule",
     kMx8,
     kPlain,
     [](C& c, const W&) { c.options.fp8_rule = Fp8ScaleRule::kAmaxDiv; },
     {"fp8_rule", "mxfp8"}},
    {"fp8_eps",
     kNv,
     kPlain,
     [](C& c, const W&) { c.options.fp8_eps = 1.0F; },
     {"fp8_eps", "nvfp4"}},
    {"fp8_decode_scale",
     kF1,
     kPlain,
     [](C& c, const W&) { c.options.fp8_decode_scale = 1.0F; },
     {"fp8_decode_scale", "fp8_1x128"}},
    {"valid_rows",
     kF128,
     kPlain,
     [](C& c, const W& w) { c.options.valid_rows = w.rows.view(); },
     {"valid_rows", "fp8_128x128"}},
    {"row_offsets",
     kFt,
     kPlain,
     [](C& c, const W& w) { c.options.row_offsets = w.offsets.view(); },
     {"row_offsets", "fp8_tensor"}},
};
INSTANTIATE_TEST_SUITE_P(UnusedOptions, QuantizeOptionChecks, ::testing::ValuesIn(kUnusedOptions),
                         name_of);

const std::vector<Violation> kOptionValues{
    {"encode_scale_zero",
     kNv,
     kPlain,
     [](C& c, const W&) { c.options.encode_scale = 0.0F; },
     {"encode_scale", "> 0", "got 0"}},
    {"encode_scale_negative",
     kNv,
     kPlain,
     [](C& c, const W&) { c.options.encode_scale = -2.0F; },
     {"encode_scale", "got -2"}},
    {"encode_scale_infinite",
     kNv,
     kPlain,
     [](C& c, const W&) { c.options.encode_scale = kFloatInfinity; },
     {"encode_scale", "inf"}},
    {"encode_scale_nan",
     kNv,
     kPlain,
     [](C& c, const W&) { c.options.encode_scale = kFloatNan; },
     {"encode_scale", "nan"}},
    {"both_scales",
     kNv,
     kPlain,
     [](C& c, const W& w) {
       c.options.encode_scale = 1.0F;
       c.options.encode_scales = w.scale_view(1);
     },
     {"encode_scale", "encode_scales", "both"}},
    {"both_bases",
     kTok,
     kPlain,
     [](C& c, const W& w) {
       c.options.base_decode_scale = 1.0F;
       c.options.base_decode_scales = w.scale_view(1);
     },
     {"base_decode_scale", "base_decode_scales", "both"}},
    {"base_decode_scales_count",
     kTok,
     kPlain,
     [](C& c, const W& w) { c.options.base_decode_scales = w.scale_view(2); },
     {"base_decode_scales", "F32[2]"}},
    {"base_decode_scales_device",
     kTok,
     kPlain,
     [](C& c, const W& w) {
       c.options.base_decode_scales = w.scale_view(1);
       c.options.base_decode_scales.device = kGpu;
     },
     {"base_decode_scales", "cpu", "cuda:1"}},
    {"encode_scales_count",
     kNv,
     kPlain,
     [](C& c, const W& w) { c.options.encode_scales = w.scale_view(5); },
     {"encode_scales", "1 or 6", "F32[5]"}},
    {"encode_scales_dtype",
     kNv,
     kPlain,
     [](C& c, const W& w) {
       c.options.encode_scales = w.scale_view(1);
       c.options.encode_scales.dtype = DType::kF16;
     },
     {"encode_scales", "F32", "F16"}},
    {"encode_scales_device",
     kNv,
     kPlain,
     [](C& c, const W& w) {
       c.options.encode_scales = w.scale_view(1);
       c.options.encode_scales.device = kGpu;
     },
     {"encode_scales", "cpu", "cuda:1"}},
    {"encode_scales_of_batches",
     kNv,
     kPlain,
     [](C& c, const W& w) {
       c.options.valid_rows = w.rows.view();
       c.options.encode_scales = w.scale_view(kCallRows);
     },
     {"encode_scales", "1 or 2", "F32[6]"}},
    {"base_decode_scale_zero",
     kTok,
     kPlain,
     [](C& c, const W&) { c.options.base_decode_scale = 0.0F; },
     {"base_decode_scale", "got 0"}},
    {"base_decode_scale_nan",
     kTok,
     kPlain,
     [](C& c, const W&) { c.options.base_decode_scale = kFloatNan; },
     {"base_decode_scale", "nan"}},
    {"base_decode_scales_zero",
     kTok,
     kPlain,
     [](C& c, const W& w) {
       c.options.base_decode_scales = w.scale_view(1);
       *static_cast<float*>(c.options.base_decode_scales.data) = 0.0F;
     },
     {"base_decode_scales", "got 0"}},
    {"base_decode_scales_infinite",
     kTok,
     kPlain,
     [](C& c, const W& w) {
       c.options.base_decode_scales = w.scale_view(1);
       *static_cast<float*>(c.options.base_decode_scales.data) = kFloatInfinity;
     },
     {"base_decode_scales", "inf"}},
    {"fp8_decode_scale_zero",
     kFt,
     kPlain,
     [](C& c, const W&) { c.options.fp8_decode_scale = 0.0F; },
     {"fp8_decode_scale", "got 0"}},
    {"fp8_decode_scale_infinite",
     kFt,
     kPlain,
     [](C& c, const W&) { c.options.fp8_decode_scale = kFloatInfinity; },
     {"fp8_decode_scale", "inf"}},
    {"e4m3_max",
     kNv,
     kPlain,
     [](C& c, const W&) { c.options.four_over_six = {.enabled = true, .e4m3_max = 300}; },
     {"e4m3_max", "448 or 256", "300"}},
    {"e4m3_max_alone",
     kNv,
     kPlain,
     [](C& c, const W&) { c.options.four_over_six.e4m3_max = 256; },
     {"four_over_six", "enabled"}},
    {"eps_negative",
     kF1,
     kPlain,
     [](C& c, const W&) { c.options.fp8_eps = -1.0F; },
     {"fp8_eps", ">= 0", "-1"}},
    {"eps_nan",
     kF1,
     kPlain,
     [](C& c, const W&) { c.options.fp8_eps = kFloatNan; },
     {"fp8_eps", "nan"}},
    {"eps_tiny",
     kF1,
     kPlain,
     [](C& c, const W&) {
       c.options.fp8_rule = Fp8ScaleRule::kAmaxDiv;
       c.options.fp8_eps = 0.0F;
     },
     {"fp8_eps", "at least", "got 0"}},
    {"eps_fast",
     kF1,
     kPlain,
     [](C& c, const W&) {
       c.options.math = MathMode::kFast;
       c.options.fp8_eps = 1e-4F;
     },
     {"fp8_eps", "expected 0", "fast"}},
};
INSTANTIATE_TEST_SUITE_P(OptionValues, QuantizeOptionChecks, ::testing::ValuesIn(kOptionValues),
                         name_of);

const std::vector<Violation> kRowOptions{
    {"list_dtype",
     kTok,
     kPlain,
     [](C& c, const W& w) {
       c.options.row_list = w.rows.view();
       c.options.row_list.dtype = DType::kI64;
     },
     {"row_list", "I32", "I64"}},
    {"list_null",
     kTok,
     kPlain,
     [](C& c, const W& w) {
       c.options.row_list = w.rows.view();
       c.options.row_list.data = nullptr;
     },
     {"row_list", "null"}},
    {"valid_count",
     kNv,
     kPlain,
     [](C& c, const W& w) {
       c.options.valid_rows = w.rows.view();
       c.options.valid_rows.shape[0] = 1;
     },
     {"valid_rows", "2 values", "I32[1]"}},
    {"valid_dtype",
     kNv,
     kPlain,
     [](C& c, const W& w) {
       c.options.valid_rows = w.rows.view();
       c.options.valid_rows.dtype = DType::kU32;
     },
     {"valid_rows", "I32", "U32"}},
    {"valid_and_list",
     kTok,
     kPlain,
     [](C& c, const W& w) {
       c.options.valid_rows = w.rows.view();
       c.options.valid_rows.shape[0] = 1;
       c.options.row_list = w.rows.view();
     },
     {"valid_rows", "row_list", "both"}},
    {"valid_norm",
     kNv,
     kNorm,
     [](C& c, const W& w) { c.options.valid_rows = w.rows.view(); },
     {"valid_rows", "norm"}},
    {"offsets_rank",
     kF1,
     kPlain,
     [](C& c, const W& w) {
       c.options.row_offsets = w.offsets.view();
       c.options.row_offsets.rank = 2;
     },
     {"row_offsets", "groups + 1"}},
    {"offsets_count",
     kF1,
     kPlain,
     [](C& c, const W& w) {
       c.options.row_offsets = w.offsets.view();
       c.options.row_offsets.shape[0] = 1;
     },
     {"row_offsets", "at least one group", "I64[1]"}},
    {"offsets_dtype",
     kF1,
     kPlain,
     [](C& c, const W& w) {
       c.options.row_offsets = w.offsets.view();
       c.options.row_offsets.dtype = DType::kU64;
     },
     {"row_offsets", "I64", "U64"}},
    {"offsets_start",
     kF1,
     kPlain,
     [](C& c, const W& w) {
       c.options.row_offsets = w.offsets.view();
       c.options.row_offsets.data = w.offsets.buffer().data<int64_t>() + 1;
       c.options.row_offsets.shape[0] = 2;
     },
     {"row_offsets", "0 to 6", "2 to 6"}},
    {"offsets_end",
     kF1,
     kPlain,
     [](C& c, const W& w) {
       c.options.row_offsets = w.offsets.view();
       c.options.row_offsets.shape[0] = 2;
     },
     {"row_offsets", "0 to 6", "0 to 2"}},
    {"offsets_layout",
     kF1,
     kPlain,
     [](C& c, const W& w) {
       c.options.row_offsets = w.offsets.view();
       c.output.scales.layout = ScaleLayoutId::kLinear;
     },
     {"row_offsets", "mn_major", "linear"}},
    {"offsets_scales",
     kF1,
     kPlain,
     [](C& c, const W& w) { c.options.row_offsets = w.offsets.view(); },
     {"output.scales", "1 x 64 x 1", "1 x 6 x 1"}},
};
INSTANTIATE_TEST_SUITE_P(RowOptions, QuantizeOptionChecks, ::testing::ValuesIn(kRowOptions),
                         name_of);

const std::vector<Violation> kNormOptions{
    {"eps_negative",
     kNv,
     kNorm,
     [](C& c, const W&) { c.norm.eps = -1.0F; },
     {"norm.eps", ">= 0", "-1"}},
    {"eps_nan", kNv, kAdd, [](C& c, const W&) { c.norm.eps = kFloatNan; }, {"norm.eps", "nan"}},
    {"output_dtype",
     kNv,
     kNorm,
     [](C& c, const W& w) {
       c.norm.norm_output = w.norm_output.view(3);
       c.norm.norm_output.dtype = DType::kF16;
     },
     {"norm.norm_output", "BF16", "F16"}},
    {"output_count",
     kNv,
     kNorm,
     [](C& c, const W& w) {
       c.norm.norm_output = w.norm_output.view(3);
       c.norm.norm_output.shape[1] = 5;
     },
     {"norm.norm_output", "1536", "2, 5, 128"}},
    {"output_dense",
     kNv,
     kNorm,
     [](C& c, const W& w) {
       c.norm.norm_output = w.norm_output.view(3);
       c.norm.norm_output.strides[1] = 130;
     },
     {"norm.norm_output", "dense", "130"}},
    {"output_device",
     kNv,
     kNorm,
     [](C& c, const W& w) {
       c.norm.norm_output = w.norm_output.view(3);
       c.norm.norm_output.device = kGpu;
     },
     {"norm.norm_output", "cpu", "cuda:1"}},
    {"extra_type",
     kNv,
     kNorm,
     [](C& c, const W& w) {
       c.norm.extra_scales = w.extra.view.scales;
       c.norm.extra_scales.type = ScaleType::kF32;
     },
     {"norm.extra_scales", "E4M3", "F32"}},
    {"extra_layout",
     kNv,
     kNorm,
     [](C& c, const W& w) {
       c.norm.extra_scales = w.extra.view.scales;
       c.norm.extra_scales.layout = ScaleLayoutId::kMnMajor;
     },
     {"norm.extra_scales", "mn_major"}},
    {"extra_device",
     kNv,
     kNorm,
     [](C& c, const W& w) {
       c.norm.extra_scales = w.extra.view.scales;
       c.norm.extra_scales.device = kGpu;
     },
     {"norm.extra_scales", "cpu", "cuda:1"}},
    {"extra_extents",
     kNv,
     kNorm,
     [](C& c, const W& w) {
       c.norm.extra_scales = w.extra.view.scales;
       c.norm.extra_scales.rows = 7;
     },
     {"norm.extra_scales", "2 x 6 x 8"}},
};
INSTANTIATE_TEST_SUITE_P(NormOptions, QuantizeOptionChecks, ::testing::ValuesIn(kNormOptions),
                         name_of);

}  // namespace
}  // namespace narrowfloat::testing
