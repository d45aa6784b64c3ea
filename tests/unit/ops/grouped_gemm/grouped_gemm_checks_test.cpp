// Every check at the doors of GroupedWeights::prepare and grouped_gemm: the message names argument,
// expected and got, and nothing has been written.
#include <functional>
#include <limits>
#include <ostream>

#include <gtest/gtest.h>

#include "support/environment.h"
#include "support/expect_error.h"
#include "support/gemm_case.h"

namespace narrowfloat::testing {
namespace {

// A valid call that a violation spoils.
struct GemmCall {
  GroupedGemmArgs args;
  TensorView workspace;
  std::vector<int32_t> indexes;  // For a buffer with other contents.

  // Replaces a permutation's buffer by a copy with one entry changed.
  void change(TensorView& view, int64_t index, int32_t value) {
    const auto* from = static_cast<const int32_t*>(view.data);
    indexes.assign(from, from + view.num_elements());
    indexes[static_cast<size_t>(index)] = value;
    view.data = indexes.data();
  }
};

struct GemmViolation {
  const char* name;
  void (*apply)(GemmCall& call);
  std::vector<std::string> fragments;
};

void PrintTo(const GemmViolation& violation, std::ostream* out) { *out << violation.name; }

GemmCaseSpec valid_spec(MoeMode mode) {
  return {.mode = mode,
          .weight_rows = 128,
          .cols = 256,
          .expert_rows = {3, 5},
          .token_tile = 4,
          .gathers = true,
          .has_slot_weights = true,
          .bias = DType::kF32,
          .gate_order = GateOrder::kUpGate,
          .has_scale = true};
}

class GroupedGemmChecks : public ::testing::TestWithParam<GemmViolation> {};

TEST_P(GroupedGemmChecks, ThrowAndWriteNothing) {
  const GemmCase gemm(valid_spec(MoeMode::kFp8Block));
  const GroupedWeights weights = GroupedWeights::prepare(gemm.weights(), MoeMode::kFp8Block);
  const GuardedBuffer output(gemm.max_rows() * 128 * 4, {.poison = 0xFF});
  const int64_t size = grouped_gemm_workspace(weights, gemm.input_rows(), Accumulation::kFp32);
  const GuardedBuffer workspace(size, {.poison = 0xFF, .guard = Guard::kPage});
  GemmCall call{.args = gemm.args(),
                .workspace = TensorView::contiguous(workspace.data(), DType::kU8, {size}),
                .indexes = {}};
  call.args.output = TensorView::contiguous(output.data(), DType::kF32, {gemm.max_rows(), 128});
  GetParam().apply(call);
  expect_error(ErrorKind::kInvalidArgument, GetParam().fragments,
               [&] { grouped_gemm(call.args, weights, call.workspace); });
  EXPECT_EQ(output.copy(), std::vector<uint8_t>(static_cast<size_t>(output.size()), 0xFF));
  EXPECT_EQ(workspace.copy(), std::vector<uint8_t>(static_cast<size_t>(size), 0xFF));
}

const std::vector<GemmViolation> kViolations{
    {"InputType",
     [](GemmCall& c) { c.args.a.values.dtype = DType::kU8; },
     {"a.values", "F8_E4M3", "U8"}},
    {"InputColumns", [](GemmCall& c) { c.args.a.values.shape[1] = 255; }, {"a.values", "[4, 256]"}},
    {"InputStride", [](GemmCall& c) { c.args.a.values.strides[0] = 512; }, {"a.values", "dense"}},
    {"InputNull", [](GemmCall& c) { c.args.a.values.data = nullptr; }, {"a.values", "null"}},
    {"InputDevice",
     [](GemmCall& c) {
       c.args.a.values.device = {DeviceType::kCuda, 0};
     },
     {"a.values", "cpu", "cuda:0"}},
    {"InputScalesAbsent", [](GemmCall& c) { c.args.a.scales = {}; }, {"a.scales", "[4, 2]"}},
    {"InputScaleType",
     [](GemmCall& c) { c.args.a.scales.dtype = DType::kU8; },
     {"a.scales", "F32"}},
    {"InputScaleBlocks", [](GemmCall& c) { c.args.a.scales.shape[1] = 3; }, {"a.scales", "[4, 2]"}},
    {"InputScaleStride", [](GemmCall& c) { c.args.a.scales.strides[0] = -1; }, {"a.scales", "-1"}},
    {"RowScale",
     [](GemmCall& c) { c.args.a.row_scale = c.args.scale.values; },
     {"a.row_scale", "fp8_1x128"}},
    {"TokenTile", [](GemmCall& c) { c.args.permutation.token_tile = 0; }, {"token_tile", "got 0"}},
    {"TileType",
     [](GemmCall& c) { c.args.permutation.tile_to_expert.dtype = DType::kI64; },
     {"tile_to_expert", "I32", "I64"}},
    {"TileCounts",
     [](GemmCall& c) { c.args.permutation.tile_row_end.shape[0] -= 1; },
     {"tile_row_end", "expected 4", "I32[3]"}},
    {"NumTiles",
     [](GemmCall& c) { c.change(c.args.permutation.num_tiles, 0, 5); },
     {"num_tiles", "0 to 4", "got 5"}},
    {"NegativeNumTiles",
     [](GemmCall& c) { c.change(c.args.permutation.num_tiles, 0, -1); },
     {"num_tiles", "got -1"}},
    {"ExpertTooLarge",
     [](GemmCall& c) { c.change(c.args.permutation.tile_to_expert, 2, 2); },
     {"tile_to_expert", "below 2", "got 2", "tile 2"}},
    {"ExpertNegative",
     [](GemmCall& c) { c.change(c.args.permutation.tile_to_expert, 0, -1); },
     {"tile_to_expert", "got -1"}},
    {"ExpertsDescend",
     [](GemmCall& c) { c.change(c.args.permutation.tile_to_expert, 2, 0); },
     {"tile_to_expert", "ascending", "got 0 after 1"}},
    {"RowEndTooSmall",
     [](GemmCall& c) { c.change(c.args.permutation.tile_row_end, 1, 3); },
     {"tile_row_end", "4 to 8", "got 3"}},
    {"RowEndTooLarge",
     [](GemmCall& c) { c.change(c.args.permutation.tile_row_end, 1, 9); },
     {"tile_row_end", "4 to 8", "got 9"}},
    {"TokenTooLarge",
     [](GemmCall& c) { c.change(c.args.permutation.row_to_token, 1, 4); },
     {"row_to_token", "0 to 3", "got 4", "row 1"}},
    {"TokenNegative",
     [](GemmCall& c) { c.change(c.args.permutation.row_to_token, 8, -1); },
     {"row_to_token", "got -1", "row 8"}},
    {"TokensTooFew",
     [](GemmCall& c) { c.args.permutation.row_to_token.shape[0] = 8; },
     {"row_to_token", "at least 9"}},
    {"SlotTooLarge",
     [](GemmCall& c) { c.change(c.args.permutation.row_to_slot, 1, 8); },
     {"row_to_slot", "0 to 7", "got 8"}},
    {"SlotsTooFew",
     [](GemmCall& c) { c.args.permutation.row_to_slot.shape[0] = 8; },
     {"row_to_slot", "at least 9"}},
    {"ScatteredInputTooShort",
     [](GemmCall& c) { c.args.gather_tokens = false; },
     {"a.values", "at least 8 rows"}},
    {"SlotWeightType",
     [](GemmCall& c) { c.args.slot_weights.dtype = DType::kI32; },
     {"slot_weights", "F32"}},
    {"ScaleCount", [](GemmCall& c) { c.args.scale.values.shape[0] = 1; }, {"scale", "expected 2"}},
    {"GateScaleCount",
     [](GemmCall& c) { c.args.gate_scale.values.shape[0] = 1; },
     {"gate_scale", "expected 2"}},
    {"GateScaleWithoutOrder",
     [](GemmCall& c) { c.args.gate_order.reset(); },
     {"gate_scale", "gate_order"}},
    {"BiasShape", [](GemmCall& c) { c.args.bias.shape[1] = 64; }, {"bias", "[2, 128]"}},
    {"BiasType",
     [](GemmCall& c) { c.args.bias.dtype = DType::kF16; },
     {"bias", "F32 or BF16", "F16"}},
    {"OutputType",
     [](GemmCall& c) { c.args.output.dtype = DType::kF64; },
     {"output", "F32 or BF16"}},
    {"OutputColumns", [](GemmCall& c) { c.args.output.shape[1] = 64; }, {"output", "128"}},
    {"OutputRows", [](GemmCall& c) { c.args.output.shape[0] = 8; }, {"output", "at least 9 rows"}},
    {"OutputIsInput",
     [](GemmCall& c) { c.args.output.data = c.args.bias.data; },
     {"output", "overlaps"}},
    {"WorkspaceIsOutput",
     [](GemmCall& c) { c.args.output.data = c.workspace.data; },
     {"output", "overlaps workspace"}},
    {"WorkspaceSize",
     [](GemmCall& c) { c.workspace.shape[0] -= 1; },
     {"workspace", "at least", "bytes", "got"}},
    {"WorkspaceAbsent", [](GemmCall& c) { c.workspace = {}; }, {"workspace"}},
    {"WorkspaceType",
     [](GemmCall& c) { c.workspace.dtype = DType::kI8; },
     {"workspace", "U8", "I8"}},
    {"WorkspaceAlignment",
     [](GemmCall& c) { c.workspace.data = static_cast<uint8_t*>(c.workspace.data) - 64; },
     {"workspace", "256 bytes"}},
};

INSTANTIATE_TEST_SUITE_P(All, GroupedGemmChecks, ::testing::ValuesIn(kViolations),
                         [](const auto& test) { return test.param.name; });

TEST(GroupedGemmChecksByMode, PerTokenRowsNeedTheirScale) {
  const GemmCase gemm(valid_spec(MoeMode::kNvfp4PerToken));
  const GroupedWeights weights = GroupedWeights::prepare(gemm.weights(), MoeMode::kNvfp4PerToken);
  GroupedGemmArgs args = gemm.args();
  args.a.row_scale = {};
  expect_error(ErrorKind::kInvalidArgument, {"a.row_scale", "expected 4"},
               [&] { grouped_gemm(args, weights, {}); });
}

TEST(GroupedGemmChecksByMode, RowsWithoutBlockScalesRefuseThem) {
  const GemmCase gemm(valid_spec(MoeMode::kBf16));
  const GroupedWeights weights = GroupedWeights::prepare(gemm.weights(), MoeMode::kBf16);
  GroupedGemmArgs args = gemm.args();
  args.a.scales = args.scale.values;
  expect_error(ErrorKind::kInvalidArgument, {"a.scales", "bf16"},
               [&] { grouped_gemm(args, weights, {}); });
}

struct WeightViolation {
  const char* name;
  MoeMode mode;
  void (*apply)(WeightView& weights);
  std::vector<std::string> fragments;
};

void PrintTo(const WeightViolation& violation, std::ostream* out) { *out << violation.name; }

class GroupedWeightsChecks : public ::testing::TestWithParam<WeightViolation> {};

TEST_P(GroupedWeightsChecks, Throw) {
  const GemmCase gemm(valid_spec(GetParam().mode));
  WeightView weights = gemm.weights();
  GetParam().apply(weights);
  expect_error(ErrorKind::kInvalidArgument, GetParam().fragments,
               [&] { GroupedWeights::prepare(weights, GetParam().mode); });
}

void set_columns(WeightView& weights, int64_t cols) {
  const TensorView& values = weights.values;
  weights.values =
      TensorView::contiguous(values.data, values.dtype, {values.shape[0], values.shape[1], cols});
}

const std::vector<WeightViolation> kWeightViolations{
    {"Type",
     MoeMode::kBf16,
     [](WeightView& w) { w.values.dtype = DType::kF16; },
     {"weights.values", "BF16", "F16"}},
    {"Rank",
     MoeMode::kNvfp4,
     [](WeightView& w) { w.values.rank = 2; },
     {"weights.values", "cols / 2"}},
    {"Rows",
     MoeMode::kBf16,
     [](WeightView& w) { w.values.shape[1] = 120; },
     {"weights.values", "multiples of 16"}},
    {"NoExperts",
     MoeMode::kBf16,
     [](WeightView& w) { w.values.shape[0] = 0; },
     {"weights.values", "at least one expert"}},
    {"Columns",
     MoeMode::kMxfp8,
     [](WeightView& w) { set_columns(w, 240); },
     {"weights.values", "mxfp8", "multiples of 32", "240"}},
    {"PackedColumns",
     MoeMode::kNvfp4,
     [](WeightView& w) { set_columns(w, 124); },
     {"weights.values", "nvfp4", "multiples of 16", "248"}},
    {"Stride",
     MoeMode::kBf16,
     [](WeightView& w) { w.values.strides[1] = 512; },
     {"weights.values", "dense"}},
    {"Null",
     MoeMode::kBf16,
     [](WeightView& w) { w.values.data = nullptr; },
     {"weights.values", "null"}},
    {"Device",
     MoeMode::kBf16,
     [](WeightView& w) {
       w.values.device = {DeviceType::kCuda, 0};
     },
     {"weights.values", "cuda:0"}},
    {"ScalesAbsent", MoeMode::kMxfp8, [](WeightView& w) { w.scales = {}; }, {"weights.scales"}},
    {"ScalesNull",
     MoeMode::kMxfp8,
     [](WeightView& w) { w.scales.data = nullptr; },
     {"weights.scales", "null"}},
    {"ScalesOfPlainWeights",
     MoeMode::kFp8Tensor,
     [](WeightView& w) { w.scales.data = &w; },
     {"weights.scales", "fp8_tensor", "none"}},
    {"ScaleType",
     MoeMode::kMxfp4Bf16,
     [](WeightView& w) { w.scales.type = ScaleType::kE4M3; },
     {"weights.scales", "UE8M0", "E4M3"}},
    {"ScaleBatch",
     MoeMode::kMxfp8,
     [](WeightView& w) { w.scales.batch = 1; },
     {"weights.scales", "2 x 128 x 8", "1 x 128 x 8"}},
    {"ScaleBlocks",
     MoeMode::kFp8Block,
     [](WeightView& w) { w.scales.blocks = 3; },
     {"weights.scales", "2 x 1 x 2", "2 x 1 x 3"}},
    {"ScaleCapacity",
     MoeMode::kMxfp8,
     [](WeightView& w) { w.scales.capacity -= 1; },
     {"weights.scales", "2048", "2047"}},
    {"GridLayout",
     MoeMode::kFp8Block,
     [](WeightView& w) { w.scales.layout = ScaleLayoutId::kMnMajor; },
     {"weights.scales", "linear", "mn_major"}},
    {"ByteLayout",
     MoeMode::kNvfp4,
     [](WeightView& w) { w.scales.layout = ScaleLayoutId::kSwizzled8x4; },
     {"weights.scales", "linear or swizzled_128x4", "swizzled_8x4"}},
};

INSTANTIATE_TEST_SUITE_P(All, GroupedWeightsChecks, ::testing::ValuesIn(kWeightViolations),
                         [](const auto& test) { return test.param.name; });

TEST(GroupedWeights, KnowTheirShapeAndTakeNoMoreBytesThanTheyWereGiven) {
  for (const MoeModeInfo& info : all_moe_modes()) {
    const GemmCase gemm(valid_spec(info.id));
    for (const auto* implementation : {"cpu_baseline", "cpu_reference"}) {
      const ForcedImplementation forced("grouped_gemm", implementation);
      const GroupedWeights weights = GroupedWeights::prepare(gemm.weights(), info.id);
      EXPECT_EQ(weights.implementation(), implementation);
      EXPECT_EQ(weights.mode(), info.id);
      EXPECT_EQ(weights.experts(), 2);
      EXPECT_EQ(weights.rows(), 128);
      EXPECT_EQ(weights.cols(), 256);
      EXPECT_EQ(weights.bytes(), gemm.weight_bytes()) << info.name;
      EXPECT_EQ(weights.device(), Device{});
    }
  }
}

TEST(GroupedWeights, RefuseEverythingWhereEmpty) {
  const GemmCase gemm(valid_spec(MoeMode::kFp8Block));
  const GroupedWeights empty;
  const auto refuses = [](const std::function<void()>& call) {
    expect_error(ErrorKind::kInvalidArgument, {"weights", "empty", "prepare"}, call);
  };
  refuses([&] { (void)empty.mode(); });
  refuses([&] { (void)empty.bytes(); });
  refuses([&] { (void)empty.implementation(); });
  refuses([&] { (void)grouped_gemm_workspace(empty, 1, Accumulation::kFp32); });
  refuses([&] { grouped_gemm(gemm.args(), empty, {}); });
}

TEST(GroupedWeights, RefuseMoreExpertsThanNumbers) {
  const auto source = [](int64_t /*expert*/) -> WeightView {
    ADD_FAILURE() << "asked";
    return {};
  };
  expect_error(ErrorKind::kInvalidArgument, {"experts", "at least 1", "0"},
               [&] { GroupedWeights::prepare(source, 0, MoeMode::kBf16); });
  expect_error(ErrorKind::kInvalidArgument, {"experts", "fewer than 2^31", "2147483648"},
               [&] { GroupedWeights::prepare(source, int64_t{1} << 31, MoeMode::kBf16); });
}

TEST(GroupedWeights, RefuseDevicesWithoutAnImplementation) {
  const GemmCase gemm(valid_spec(MoeMode::kBf16));
  WeightView weights = gemm.weights();
  weights.values.device = {DeviceType::kCuda, 0};
  if (build_has_cuda()) GTEST_SKIP() << "this build may have one";
  expect_error(ErrorKind::kUnsupported, {"grouped_gemm", "cpu_baseline", "CPU only"}, [&] {
    GroupedWeights::prepare(weights, MoeMode::kBf16, {DeviceType::kCuda, 0});
  });
}

// Halves are bounds of packed weights; the CPU packs the same with them and without.
TEST(GroupedWeights, TakeAGateOrder) {
  for (const MoeModeInfo& info : all_moe_modes()) {
    GemmCaseSpec spec = valid_spec(info.id);
    spec.weight_rows = 256;
    const GemmCase gemm(spec);
    const GroupedWeights weights =
        GroupedWeights::prepare(gemm.weights(), info.id, {}, {}, GateOrder::kInterleaved);
    EXPECT_EQ(weights.bytes(), GroupedWeights::prepare(gemm.weights(), info.id).bytes());
    EXPECT_FALSE(weights.fuses_activation(ActivationKind::kSwiglu, info.intermediate, 8));
    GroupedGemmArgs args = gemm.args();
    args.activation.emplace();
    expect_error(ErrorKind::kUnsupported, {"activation: cpu_", "activate()"},
                 [&] { grouped_gemm(args, weights, {}); });
  }
  const GemmCase odd(valid_spec(MoeMode::kFp8Block));  // 64 rows of u and of g.
  expect_error(
      ErrorKind::kInvalidArgument, {"weights.values", "multiples of 128", "128 in all"}, [&] {
        GroupedWeights::prepare(odd.weights(), MoeMode::kFp8Block, {}, {}, GateOrder::kUpGate);
      });
}

TEST(GroupedGemmWorkspace, NeverShrinksWithMoreRows) {
  for (const MoeModeInfo& info : all_moe_modes()) {
    const GemmCase gemm(valid_spec(info.id));
    const GroupedWeights weights = GroupedWeights::prepare(gemm.weights(), info.id);
    for (const Accumulation accumulation : {Accumulation::kFp32, Accumulation::kFp64}) {
      int64_t previous = 0;
      for (int64_t rows = 0; rows < 300; ++rows) {
        const int64_t bytes = grouped_gemm_workspace(weights, rows, accumulation);
        EXPECT_GE(bytes, previous);
        EXPECT_EQ(bytes % 256, 0);
        previous = bytes;
      }
    }
  }
}

// docs/kernels/cpu_grouped_gemm.md: 2 segments of 24 bytes; (256 values + 2 factors) * 4 bytes.
TEST(GroupedGemmWorkspace, IsWhatTheDocumentSays) {
  const GemmCase gemm(valid_spec(MoeMode::kFp8Block));
  const GroupedWeights weights = GroupedWeights::prepare(gemm.weights(), MoeMode::kFp8Block);
  EXPECT_EQ(grouped_gemm_workspace(weights, 0, Accumulation::kFp32), 256);
  EXPECT_EQ(grouped_gemm_workspace(weights, 5, Accumulation::kFp32), 256 + 5632);
  EXPECT_EQ(grouped_gemm_workspace(weights, 5, Accumulation::kFp64), 256 + 10752);
  expect_error(ErrorKind::kInvalidArgument, {"a_rows", "-1"},
               [&] { grouped_gemm_workspace(weights, -1, Accumulation::kFp32); });
  expect_error(ErrorKind::kInvalidArgument, {"a_rows"}, [&] {
    grouped_gemm_workspace(weights, std::numeric_limits<int64_t>::max(), Accumulation::kFp32);
  });
}

}  // namespace
}  // namespace narrowfloat::testing
