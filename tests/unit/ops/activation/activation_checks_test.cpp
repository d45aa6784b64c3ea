// Every check at the door of activate(): the message names the argument, and nothing is written.
#include <ostream>

#include <gtest/gtest.h>

#include "narrowfloat/activation.h"
#include "support/expect_error.h"
#include "support/rows_tensor.h"
#include "support/tensors.h"

namespace narrowfloat::testing {
namespace {

constexpr int32_t kSlots[] = {2, -1, 0};
constexpr int32_t kTiles[] = {1, 0};
constexpr float kPair[] = {1.0F, 2.0F};
constexpr int32_t kFour[] = {4};
constexpr int32_t kInverse[] = {2, -1, 0, -1};
constexpr int32_t kSwapped[] = {0, -1, 2, -1};
constexpr int32_t kTooMany[] = {2, 1, 0, -1};

PerExpert pair_of_values() { return PerExpert(TensorView::contiguous(kPair, DType::kF32, {2})); }

struct ActivateViolation {
  const char* name;
  RowFormat format;
  void (*apply)(ActivateArgs& args);
  std::vector<std::string> fragments;
};
void PrintTo(const ActivateViolation& violation, std::ostream* out) { *out << violation.name; }

class ActivateChecks : public ::testing::TestWithParam<ActivateViolation> {};

TEST_P(ActivateChecks, ThrowAndWriteNothing) {
  const Matrix input =
      Matrix::filled({.dtype = DType::kF32, .rows = 4, .cols = 64}, Fill::kNormal, 1);
  const RowsTensor output(GetParam().format, 4, 32, {.poison = 0xFF});
  const ActivateArgs good{.input = {.values = input.view()},
                          .slot_to_row = TensorView::contiguous(kSlots, DType::kI32, {3}),
                          .format = GetParam().format,
                          .output = output.view};
  ActivateArgs bad = good;
  GetParam().apply(bad);
  expect_error(ErrorKind::kInvalidArgument, GetParam().fragments, [&] { activate(bad); });
  EXPECT_EQ(output.bytes(), RowsTensor(GetParam().format, 4, 32, {.poison = 0xFF}).bytes());
  EXPECT_NO_THROW(activate(good));
}

using Args = ActivateArgs;
constexpr auto kBf16 = RowFormat::kBf16;
constexpr auto kGroup = RowFormat::kFp8Group;
constexpr auto kNvfp4 = RowFormat::kNvfp4;

INSTANTIATE_TEST_SUITE_P(
    Tensors, ActivateChecks,
    ::testing::ValuesIn(std::vector<ActivateViolation>{
        {"input_dtype",
         kBf16,
         [](Args& a) { a.input.values.dtype = DType::kF16; },
         {"input.values", "F32 or F64 or BF16 or F8_E4M3", "F16"}},
        {"input_rank", kBf16, [](Args& a) { a.input.values.rank = 1; }, {"input.values", "rows"}},
        {"input_cols_gated",
         kBf16,
         [](Args& a) { a.input.values.shape[1] = 32; },
         {"input.values", "swiglu of 32 columns reads 64 (u and g)", "[4, 32]"}},
        {"input_cols_plain",
         kBf16,
         [](Args& a) { a.activation = Activation::plain(ActivationKind::kSilu); },
         {"input.values", "silu of 32 columns reads 32 (u)", "[4, 64]"}},
        {"input_gaps",
         kBf16,
         [](Args& a) { a.input.values.strides[0] = 65; },
         {"input.values", "dense"}},
        {"input_null",
         kBf16,
         [](Args& a) { a.input.values.data = nullptr; },
         {"input.values", "null"}},
        {"input_scales_unused",
         kBf16,
         [](Args& a) { a.input.scales = a.input.values; },
         {"input.scales", "F32 input has none"}},
        {"input_scales_missing",
         kBf16,
         [](Args& a) { a.input.values.dtype = DType::kF8E4M3; },
         {"input.scales", "[4, 1]"}},
        {"input_row_scale",
         kBf16,
         [](Args& a) { a.input.row_scale = a.input.values; },
         {"input.row_scale", "not read"}},
        {"output_rows",
         kBf16,
         [](Args& a) { a.output.values.shape[0] = 3; },
         {"output.values", "[4, 32]", "[3, 32]"}},
        {"output_dtype",
         kBf16,
         [](Args& a) { a.output.values.dtype = DType::kF16; },
         {"output.values", "BF16", "F16"}},
        {"output_device",
         kBf16,
         [](Args& a) { a.output.values.device.type = DeviceType::kCuda; },
         {"output.values", "cpu", "cuda:0"}},
        {"output_scales_missing",
         kGroup,
         [](Args& a) { a.output.scales = {}; },
         {"output.scales", "[4, 1]"}},
        {"output_scales_type",
         kNvfp4,
         [](Args& a) { a.output.scales.dtype = DType::kF8E8M0; },
         {"output.scales", "F8_E4M3 or U8", "F8_E8M0"}},
        {"output_scales_shared",
         kNvfp4,
         [](Args& a) {
           a.output.scales.strides = {1, 1};
         },
         {"output.scales", "1 and 1", "a place of its own"}},
        {"output_scales_unused",
         kBf16,
         [](Args& a) { a.output.scales = a.output.values; },
         {"output.scales", "bf16 has none"}},
        {"output_row_scale_missing",
         RowFormat::kNvfp4PerToken,
         [](Args& a) { a.output.row_scale = {}; },
         {"output.row_scale", "4 values"}},
        {"output_cols",
         RowFormat::kMxfp8,
         [](Args& a) {
           a.output.values.shape[1] = 16;
           a.output.values.strides[0] = 16;
           a.input.values.shape[1] = 32;
           a.input.values.strides[0] = 32;
         },
         {"output.values", "mxfp8", "multiples of 32", "16"}},
        {"overlap",
         kBf16,
         [](Args& a) { a.output.values.data = a.input.values.data; },
         {"output.values", "overlaps input.values"}},
    }),
    [](const auto& test) { return test.param.name; });

INSTANTIATE_TEST_SUITE_P(
    Parameters, ActivateChecks,
    ::testing::ValuesIn(std::vector<ActivateViolation>{
        {"unused_beta",
         kBf16,
         [](Args& a) { a.activation = {.kind = ActivationKind::kGegluErf, .beta = 1.0F}; },
         {"activation.beta", "geglu_erf", "does not read"}},
        {"multiplier_unused",
         kGroup,
         [](Args& a) { a.multiplier = 2.0F; },
         {"multiplier", "fp8_1x128", "2"}},
        {"multiplier_values_unused",
         kGroup,
         [](Args& a) { a.multiplier = pair_of_values(); },
         {"multiplier", "fp8_1x128"}},
        {"multiplier_zero",
         kNvfp4,
         [](Args& a) { a.multiplier = 0.0F; },
         {"multiplier", "> 0", "0"}},
        {"gate_order",
         kBf16,
         [](Args& a) { a.gate_order = static_cast<GateOrder>(3); },
         {"gate order", "3"}},
        {"format",
         kBf16,
         [](Args& a) { a.format = static_cast<RowFormat>(9); },
         {"row format", "9"}},
        {"slot_too_large",
         kBf16,
         [](Args& a) { a.slot_to_row = TensorView::contiguous(kFour, DType::kI32, {1}); },
         {"slot_to_row", "below 4", "got 4 at 0"}},
        {"slot_dtype",
         kBf16,
         [](Args& a) { a.slot_to_row.dtype = DType::kI64; },
         {"slot_to_row", "I32", "I64"}},
        {"tiles_missing",
         kBf16,
         [](Args& a) { a.activation.alpha = pair_of_values(); },
         {"tile_to_expert", "per expert"}},
        {"token_tile",
         kBf16,
         [](Args& a) {
           a.activation.alpha = pair_of_values();
           a.tile_to_expert = TensorView::contiguous(kTiles, DType::kI32, {2});
         },
         {"token_tile", "> 0", "0"}},
        {"too_few_tiles",
         kBf16,
         [](Args& a) {
           a.activation.alpha = pair_of_values();
           a.tile_to_expert = TensorView::contiguous(kTiles, DType::kI32, {1});
           a.token_tile = 2;
         },
         {"tile_to_expert", "at least 2", "1"}},
        {"expert_too_large",
         kBf16,
         [](Args& a) {
           a.activation.beta = pair_of_values();
           a.tile_to_expert = TensorView::contiguous(kFour, DType::kI32, {1});
           a.token_tile = 8;
         },
         {"tile_to_expert", "below 2", "got 4 at 0"}},
        {"counts_differ",
         kNvfp4,
         [](Args& a) {
           a.activation.alpha = pair_of_values();
           a.multiplier = PerExpert(TensorView::contiguous(kPair, DType::kF32, {1}));
           a.tile_to_expert = TensorView::contiguous(kTiles, DType::kI32, {2});
           a.token_tile = 2;
         },
         {"multiplier", "2 values", "F32[1]"}},
        {"inverse_map_count",
         kBf16,
         [](Args& a) { a.row_to_slot = TensorView::contiguous(kInverse, DType::kI32, {3}); },
         {"row_to_slot", "4 values", "I32[3]"}},
        {"inverse_map_of_other_slots",
         kBf16,
         [](Args& a) { a.row_to_slot = TensorView::contiguous(kSwapped, DType::kI32, {4}); },
         {"row_to_slot", "slot 0 at row 2", "got 2"}},
        {"inverse_map_of_more_rows",
         kBf16,
         [](Args& a) { a.row_to_slot = TensorView::contiguous(kTooMany, DType::kI32, {4}); },
         {"row_to_slot", "2 rows", "got 3"}},
        {"num_rows_unused",
         kBf16,
         [](Args& a) { a.num_rows = TensorView::contiguous(kFour, DType::kI32, {1}); },
         {"num_rows", "1x128"}},
        {"num_rows_too_large",
         kGroup,
         [](Args& a) {
           static const int32_t kFive[] = {5};
           a.num_rows = TensorView::contiguous(kFive, DType::kI32, {1});
         },
         {"num_rows", "0 to 4", "5"}},
        {"slot_beyond_num_rows",
         kGroup,
         [](Args& a) {
           static const int32_t kTwo[] = {2};
           a.num_rows = TensorView::contiguous(kTwo, DType::kI32, {1});
         },
         {"slot_to_row", "below 2", "got 2 at 0"}},
    }),
    [](const auto& test) { return test.param.name; });

TEST(Activate, RefusesDevicesItCannotDoWithEveryCandidatesReason) {
  if (build_has_cuda()) GTEST_SKIP() << "this build has implementations for CUDA";
  const Matrix input({.dtype = DType::kF32, .rows = 4, .cols = 64});
  const RowsTensor output(RowFormat::kBf16, 4, 32);
  ActivateArgs args{.input = {.values = input.view()},
                    .slot_to_row = TensorView::contiguous(kSlots, DType::kI32, {3}),
                    .output = output.view};
  for (TensorView* view : {&args.input.values, &args.slot_to_row, &args.output.values}) {
    view->device = {.type = DeviceType::kCuda, .index = 1};
  }
  expect_error(ErrorKind::kUnsupported,
               {"activation", "swiglu up_gate F32 4x64 -> bf16 4x32", "cuda:1", "cpu_baseline",
                "cpu_reference", "runs on the CPU only"},
               [&] { activate(args); });
}

// Every view of a call on CUDA; the data stays where it is and must not be looked at.
ActivateArgs on_cuda(const ActivateArgs& host) {
  ActivateArgs args = host;
  for (TensorView* view : {&args.input.values, &args.slot_to_row, &args.output.values}) {
    view->device = {.type = DeviceType::kCuda, .index = 0};
  }
  return args;
}

TEST(Activate, WantsRowsOf16BytePiecesOnCuda) {
  const Matrix input({.dtype = DType::kF32, .rows = 4, .cols = 48});
  const RowsTensor output(RowFormat::kBf16, 4, 24);
  const ActivateArgs host{.input = {.values = input.view()},
                          .slot_to_row = TensorView::contiguous(kSlots, DType::kI32, {3}),
                          .output = output.view};
  ActivateArgs shifted = on_cuda(host);
  shifted.input.values.data = static_cast<float*>(host.input.values.data) + 2;
  expect_error(ErrorKind::kInvalidArgument, {"input.values", "aligned to 16 bytes", "cuda:0"},
               [&] { activate(shifted); });
  shifted = on_cuda(host);
  shifted.output.values.data = static_cast<uint16_t*>(host.output.values.data) + 4;
  expect_error(ErrorKind::kInvalidArgument, {"output.values", "aligned to 16 bytes"},
               [&] { activate(shifted); });
  ActivateArgs narrow = on_cuda(host);
  narrow.output.values.shape[1] = narrow.output.values.strides[0] = 12;
  narrow.input.values.shape[1] = narrow.input.values.strides[0] = 24;
  expect_error(ErrorKind::kInvalidArgument, {"output.values", "multiple of 16 bytes", "24"},
               [&] { activate(narrow); });
}

}  // namespace
}  // namespace narrowfloat::testing
