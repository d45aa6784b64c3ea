// grouped_gemm on a GPU against exact sums in fp64: every mode over generated shapes, tiles and
// epilogues within the tolerances of moe spec 12, and to the bit where all sums are exact.
#include <cmath>
#include <cstring>
#include <ostream>

#include <gtest/gtest.h>

#include "conformance/case_sampling.h"
#include "cuda/gpu_test.h"
#include "formats/float16.h"
#include "narrowfloat/error.h"
#include "ops/grouped_gemm/packed/packed_weights.h"
#include "support/environment.h"
#include "support/expect_error.h"
#include "support/gemm_device_run.h"
#include "support/moe_modes.h"

namespace narrowfloat::testing {
namespace {

constexpr int64_t kGemmCases = 20;

int64_t sample_gemm_cols(Random& random, int64_t multiple) {
  if (multiple == 128) return random.pick({128, 256, 384, 640, 1152});
  if (multiple == 32) return random.pick({32, 64, 96, 128, 160, 288, 544, 2880});
  return random.pick({16, 48, 80, 128, 144, 272, 400, 2880});
}

GemmCaseSpec sample_gemm(MoeMode mode, GemmData data, Random& random) {
  GemmCaseSpec spec{.mode = mode};
  spec.cols = sample_gemm_cols(random, moe_mode_info(mode).multiple);
  spec.weight_rows = random.pick({16, 32, 48, 64, 144, 256, 288});
  spec.expert_rows.clear();
  const int64_t experts = random.range(1, 6);
  int64_t left = kMaxProducts / (spec.cols * spec.weight_rows);
  for (int64_t i = 0; i < experts; ++i) {
    const int64_t rows =
        std::min(left, random.pick<int64_t>({0, 1, 2, 3, 5, 17, 36, 64, 140, 300}));
    spec.expert_rows.push_back(rows);
    left -= rows;
  }
  spec.token_tile = random.pick({1, 2, 4, 8, 16, 32, 64, 128, 256});
  spec.gathers = random.chance(50);
  spec.transposed_scales = random.chance(50);
  spec.has_slot_weights = random.chance(50);
  if (random.chance(60)) spec.bias = random.pick({DType::kF32, DType::kBF16});
  if (random.chance(60)) {
    spec.gate_order =
        random.pick({GateOrder::kUpGate, GateOrder::kGateUp, GateOrder::kInterleaved});
  }
  const bool has_halves = spec.weight_rows % (2 * moe_mode_info(mode).multiple) == 0;
  spec.knows_halves = spec.gate_order && has_halves && random.chance(70);
  spec.has_scale = random.chance(60);
  spec.data = data;
  spec.wide_scales = random.chance(50);
  spec.seed = random.bits();
  return spec;
}

bool has_byte_scales(MoeMode mode) {
  const WeightFormat format = moe_mode_info(mode).weights;
  return format >= WeightFormat::kMxfp8;
}

ScaleLayoutId sample_layout(MoeMode mode, Random& random) {
  if (!has_byte_scales(mode)) return ScaleLayoutId::kLinear;
  return random.pick({ScaleLayoutId::kLinear, ScaleLayoutId::kSwizzled128x4});
}

// NaN scales for every row of `a` that no row reads; its codes are NaN already.
void poison_scales_of_unread_rows(GemmCase& gemm) {
  std::vector<bool> is_read(static_cast<size_t>(gemm.input_rows()));
  for (const GemmCase::Row& row : gemm.rows()) is_read[static_cast<size_t>(row.source)] = true;
  const TensorView scales = gemm.args().a.scales;
  if (scales.is_absent()) return;
  const int64_t bytes = bits(scales.dtype) / 8;
  for (int64_t row = 0; row < scales.shape[0]; ++row) {
    if (is_read[static_cast<size_t>(row)]) continue;
    for (int64_t block = 0; block < scales.shape[1]; ++block) {
      const int64_t at = row * scales.strides[0] + block * scales.strides[1];
      std::fill_n(gemm.input_scales.begin() + at * bytes, bytes, uint8_t{0xFF});
    }
  }
}

void expect_exact(const GemmCase& gemm, DType dtype, const std::vector<uint8_t>& output) {
  for (const GemmCase::Row& row : gemm.rows()) {
    for (int64_t col = 0; col < gemm.spec().weight_rows; ++col) {
      const auto value = static_cast<float>(gemm.expected(row, col).value);
      const double expected = dtype == DType::kBF16 ? bf16_to_float(float_to_bf16(value)) : value;
      const double got = output_element(dtype, output, row.row * gemm.spec().weight_rows + col);
      ASSERT_EQ(got, expected) << "row " << row.row << " col " << col;
    }
  }
}

// The weight encoding that was chosen, where there are several.
WeightEncoding encoding_of(const GemmOnDevice& device) {
  return static_cast<WeightEncoding>(packed_weights(device.weights()).data.encoding);
}

bool is_for_hopper(const GemmOnDevice& device) {
  return device.weights().implementation() == kGroupedGemmSm90.name;
}

std::string note_of(const GemmCase& gemm, DType output, int64_t index) {
  return repro_line("grouped_gemm", "sm90_wgmma", index) + "\n  " + to_string(gemm.spec()) +
         " -> " + std::string(name(output));
}

// Tests the implementation that the GPU and NARROWFLOAT_FORCE choose.
class GroupedGemmCuda : public GpuTestWith<MoeMode> {};

TEST_P(GroupedGemmCuda, IsWithinTheTolerance) {
  for_cases(kGemmCases, [&](int64_t index) {
    Random random(case_seed("grouped_gemm_cuda " + std::string(name(GetParam())), index));
    GemmCase gemm(sample_gemm(GetParam(), GemmData::kRandom, random));
    const DType dtype = random.pick({DType::kF32, DType::kBF16});
    const ScaleLayoutId layout = sample_layout(GetParam(), random);
    const bool programmatic_launch = random.chance(50);
    if (!gemm.spec().gathers) poison_scales_of_unread_rows(gemm);
    SCOPED_TRACE(note_of(gemm, dtype, index));
    const GemmOnDevice device(gemm, dtype, layout);
    if (is_for_hopper(device) && !gemm.spec().wide_scales) {
      EXPECT_EQ(encoding_of(device), encoding_of(GetParam()));
    }
    const std::vector<uint8_t> output = device.run(programmatic_launch);
    expect_near(gemm, dtype, output);
    expect_padding_untouched(gemm, dtype, output);
  });
}

TEST_P(GroupedGemmCuda, IsExactForIntegers) {
  for_cases(kGemmCases, [&](int64_t index) {
    Random random(case_seed("grouped_gemm_integers " + std::string(name(GetParam())), index));
    GemmCase gemm(sample_gemm(GetParam(), GemmData::kIntegers, random));
    const DType dtype = random.pick({DType::kF32, DType::kBF16});
    SCOPED_TRACE(note_of(gemm, dtype, index));
    const GemmOnDevice device(gemm, dtype, sample_layout(GetParam(), random));
    if (is_for_hopper(device)) {
      EXPECT_EQ(encoding_of(device), encoding_of(GetParam()));
    }
    expect_exact(gemm, dtype, device.run());
  });
}

// Each CTA goes through many tiles, and graphs give the bytes of a single call.
TEST_P(GroupedGemmCuda, RepeatsItselfOverManyTiles) {
  const GemmCase gemm({.mode = GetParam(),
                       .weight_rows = 1040,
                       .cols = 640,
                       .expert_rows = {70, 0, 1, 33, 5},
                       .token_tile = 1,
                       .gathers = true,
                       .seed = 7});
  const GemmOnDevice device(gemm);
  const std::vector<uint8_t> output = device.run();
  expect_near(gemm, DType::kF32, output);
  EXPECT_EQ(device.run(true), output);
  EXPECT_EQ(device.replay(), output);
}

// Output tiles are as wide as their rows need, and the ragged remainder of an expert is computed
// with the m tile before it; rows that are not gathered come as boxes, which have rows of other
// tiles, too. None of this changes a bit, or writes outside.
TEST_P(GroupedGemmCuda, RaggedRemaindersHaveTheBitsOfSmallTiles) {
  for (const bool gathers : {true, false}) {
    const GemmCase gemm(
        {.mode = GetParam(),
         .weight_rows = 96,
         .cols = 384,
         .expert_rows = {129, 7, 140, 150, 160, 161, 33, 45, 0, 56, 288, 300, 81, 100, 70, 120},
         .token_tile = 256,
         .gathers = gathers,
         .has_slot_weights = true,
         .wide_scales = false,
         .seed = 8});
    GemmOnDevice device(gemm);
    const std::vector<uint8_t> output = device.run();
    expect_near(gemm, DType::kF32, output);
    expect_padding_untouched(gemm, DType::kF32, output);
    for (const int32_t tile : {128, 64, 32, 8}) {
      divide_tiles(gemm, tile, device);
      EXPECT_TRUE(device.run() == output) << "tile " << tile << ", gathers " << gathers;
    }
  }
}

// Kernels for many tokens copy biases by words of two; a caller's may begin in the middle of one.
TEST_P(GroupedGemmCuda, ABiasBetweenWordsGivesTheBitsOfAnAlignedOne) {
  const GemmCase gemm({.mode = GetParam(),
                       .weight_rows = 336,
                       .cols = 256,
                       .expert_rows = {129, 40, 1},
                       .token_tile = 128,
                       .gathers = true,
                       .bias = DType::kBF16,
                       .wide_scales = false,
                       .seed = 28});
  GemmOnDevice device(gemm, DType::kBF16);
  const TensorView bias = gemm.args().bias;
  std::vector<uint16_t> moved(static_cast<size_t>(bias.num_elements() + 1));
  std::memcpy(moved.data() + 1, bias.data, static_cast<size_t>(bias.num_elements()) * 2);
  const TensorView copy =
      device.copy(TensorView::contiguous(moved.data(), DType::kBF16, {bias.num_elements() + 1}));
  const TensorView aligned = device.args.bias;
  for (const int32_t tile : {128, 64}) {
    divide_tiles(gemm, tile, device);
    device.args.bias = aligned;
    const std::vector<uint8_t> output = device.run();
    expect_near(gemm, DType::kBF16, output);
    device.args.bias.data = static_cast<uint16_t*>(copy.data) + 1;
    EXPECT_TRUE(device.run() == output) << "tile " << tile;
  }
}

// Results do not depend on the CTA that computes an output tile, nor on when its weights are
// requested. The dynamic schedule takes every tile once from the counter; the schedule is static
// where two weight encodings have a kernel each.
TEST_P(GroupedGemmCuda, DynamicScheduleGivesTheBitsOfTheStaticOne) {
  const GemmCase gemm({.mode = GetParam(),
                       .weight_rows = 1040,
                       .cols = 640,
                       .expert_rows = {70, 0, 1, 33, 5},
                       .token_tile = 1,
                       .gathers = true,
                       .seed = 7});
  GemmOnDevice device(gemm);
  if (!is_for_hopper(device)) GTEST_SKIP() << "it has one schedule";
  const std::vector<uint8_t> static_output = device.run();
  const DeviceBuffer counter(sizeof(uint32_t));
  const bool is_dynamic = packed_weights(device.weights()).data.tables.expert_encodings == nullptr;
  device.layer.next_tile = reinterpret_cast<uint32_t*>(counter.data());
  for (const bool tiles_are_complete : {false, true}) {
    device.layer.tiles_are_complete = tiles_are_complete;
    counter.fill(0);
    EXPECT_EQ(device.run(tiles_are_complete), static_output);
    uint32_t taken = 0;
    std::memcpy(&taken, counter.copy().data(), sizeof(taken));
    // A tile a row, 9 tiles of 128 weight rows.
    EXPECT_EQ(taken, is_dynamic ? 109U * 9U : 0U);
  }
  // The counter is past the last tile: a CTA computes its first tile only.
  counter.fill(0x7F);
  EXPECT_EQ(device.run() == static_output, !is_dynamic);
}

// Tiles whose neighbours have the same expert or another one, and tiles without neighbours, with
// the static and the dynamic schedule. With FP8 weights two CTAs compute neighbours together and
// share weights; with an expert less there are few enough rows for ragged remainders.
void compute_neighbouring_tma_tiles(MoeMode mode, bool gathers, bool has_another) {
  std::vector<int64_t> expert_rows{130, 5, 260, 0, 1};
  if (has_another) expert_rows.push_back(0);
  const GemmCase gemm({.mode = mode,
                       .weight_rows = 528,
                       .cols = 640,
                       .expert_rows = expert_rows,
                       .token_tile = 128,
                       .gathers = gathers,
                       .seed = 17});
  GemmOnDevice device(gemm);
  const std::vector<uint8_t> static_output = device.run();
  expect_near(gemm, DType::kF32, static_output);
  expect_padding_untouched(gemm, DType::kF32, static_output);
  EXPECT_EQ(device.replay(), static_output);
  const DeviceBuffer counter(sizeof(uint32_t));
  device.layer.next_tile = reinterpret_cast<uint32_t*>(counter.data());
  for (const bool tiles_are_complete : {false, true}) {
    device.layer.tiles_are_complete = tiles_are_complete;
    counter.fill(0);
    EXPECT_EQ(device.run(tiles_are_complete), static_output);
  }
}

TEST_P(GroupedGemmCuda, NeighbouringTmaTilesKeepTheirBits) {
  for (const bool gathers : {true, false}) {
    for (const bool has_another : {true, false}) {
      SCOPED_TRACE(::testing::Message() << "gathers " << gathers << ", another " << has_another);
      compute_neighbouring_tma_tiles(GetParam(), gathers, has_another);
    }
  }
}

void keep_nan_in_its_row(MoeMode mode, int32_t token_tile) {
  GemmCase gemm({.mode = mode, .expert_rows = {9, 4}, .token_tile = token_tile, .seed = 11});
  const size_t row_bytes = gemm.input_codes.size() / static_cast<size_t>(gemm.input_rows());
  const RowFormat format = moe_mode_info(mode).input;
  const int64_t nan_row = gemm.rows()[3].row;
  if (format == RowFormat::kNvfp4 || format == RowFormat::kNvfp4PerToken) {
    gemm.input_scales[static_cast<size_t>(nan_row) * 8 + 3] = 0x7F;
  } else {
    const size_t code = static_cast<size_t>(nan_row) * row_bytes + 40;
    std::fill_n(gemm.input_codes.begin() + static_cast<std::ptrdiff_t>(code), 2, uint8_t{0x7F});
    if (format == RowFormat::kBf16) gemm.input_codes[code] = 0xFF;
  }
  const std::vector<uint8_t> output = GemmOnDevice(gemm).run();
  for (const GemmCase::Row& row : gemm.rows()) {
    for (int64_t col = 0; col < gemm.spec().weight_rows; ++col) {
      const double got =
          output_element(DType::kF32, output, row.row * gemm.spec().weight_rows + col);
      ASSERT_EQ(std::isnan(got), row.row == nan_row) << "row " << row.row << " col " << col;
    }
  }
}

TEST_P(GroupedGemmCuda, NanStaysInItsRow) {
  for (const int32_t token_tile : {16, 128}) {
    SCOPED_TRACE(token_tile);
    keep_nan_in_its_row(GetParam(), token_tile);
  }
}

TEST_P(GroupedGemmCuda, NanScaleOfZerosStaysInItsWeightRow) {
  GemmCase gemm({.mode = GetParam(), .expert_rows = {9, 4}, .token_tile = 16, .seed = 12});
  if (!gemm.plant_nan_scale_of_zeros(5)) GTEST_SKIP() << "no block scales in bytes";
  const std::vector<uint8_t> output = GemmOnDevice(gemm).run();
  for (const GemmCase::Row& row : gemm.rows()) {
    for (int64_t col = 0; col < gemm.spec().weight_rows; ++col) {
      const double got =
          output_element(DType::kF32, output, row.row * gemm.spec().weight_rows + col);
      ASSERT_EQ(std::isnan(got), row.expert == 0 && col == 5)
          << "row " << row.row << " col " << col;
    }
  }
}

// Counts, experts and rows on the device that fit nothing, with everything that is read for an
// expert or a row.
void access_nothing_outside(MoeMode mode, const std::vector<int64_t>& expert_rows,
                            int32_t token_tile, bool gathers) {
  GemmCase gemm({.mode = mode,
                 .expert_rows = expert_rows,
                 .token_tile = token_tile,
                 .gathers = gathers,
                 .has_slot_weights = true,
                 .bias = DType::kF32,
                 .gate_order = GateOrder::kUpGate,
                 .has_scale = true,
                 .seed = 13});
  GemmOnDevice device(gemm);
  const auto replaced = [&](TensorView& view, const std::vector<int32_t>& pattern) {
    std::vector<int32_t> values(static_cast<size_t>(view.num_elements()));
    for (size_t i = 0; i < values.size(); ++i) values[i] = pattern[i % pattern.size()];
    view = device.copy(
        TensorView::contiguous(values.data(), DType::kI32, {static_cast<int64_t>(values.size())}));
  };
  Permutation& permutation = device.args.permutation;
  replaced(permutation.num_tiles, {1'000'000});
  replaced(permutation.tile_row_end, {2'000'000'000, -5, 9});
  replaced(permutation.row_to_token, {-7, 2'000'000'000, 1});
  replaced(permutation.row_to_slot, {-7, 2'000'000'000, 1});
  static_cast<void>(device.run());
  replaced(permutation.tile_to_expert, {0, 2'000'000'000, -3});
  static_cast<void>(device.run());
  // Whatever the counter holds.
  const DeviceBuffer counter(sizeof(uint32_t));
  device.layer = {.next_tile = reinterpret_cast<uint32_t*>(counter.data()),
                  .tiles_are_complete = true};
  for (const int byte : {0x00, 0xFF, 0x7F}) {
    counter.fill(static_cast<uint8_t>(byte));
    static_cast<void>(device.run());
  }
  replaced(permutation.num_tiles, {-1});
  for (const uint8_t byte : device.run()) ASSERT_EQ(byte, 0xFF);
}

TEST_P(GroupedGemmCuda, AccessesNothingOutsideForBadPermutations) {
  for (const int32_t token_tile : {8, 64, 128}) {
    for (const bool gathers : {true, false}) {
      SCOPED_TRACE(::testing::Message() << token_tile << " gathers " << gathers);
      access_nothing_outside(GetParam(), {9, 4}, token_tile, gathers);
      // So few rows per expert that tiles of 128 of FP8 weights have no ragged remainders.
      if (token_tile == 128) access_nothing_outside(GetParam(), {9, 4, 0}, token_tile, gathers);
    }
  }
}

TEST_P(GroupedGemmCuda, PackedWeightsOfAllEncodingsAreLittleLargerThanTheWeights) {
  for (const bool has_misfit : {false, true}) {
    GemmCase gemm({.mode = GetParam(),
                   .weight_rows = 256,
                   .cols = 1280,
                   .expert_rows = {1},
                   .wide_scales = false});
    if (has_misfit && !gemm.plant_nan_scale_of_zeros(3)) continue;
    const GemmOnDevice device(gemm);
    // The portable kernels have rounded weights in 8 bits.
    const bool has_wider_codes =
        !is_for_hopper(device) &&
        (GetParam() == MoeMode::kNvfp4Fp8Rounded || GetParam() == MoeMode::kNvfp4Fp8Token);
    EXPECT_LE(static_cast<double>(device.weights().bytes()),
              (has_wider_codes ? 1.85 : 1.05) * static_cast<double>(gemm.weight_bytes()));
    if (!is_for_hopper(device)) continue;
    const WeightEncoding first = encoding_of(GetParam());
    const bool is_wide = has_misfit && may_not_fit(first);
    EXPECT_EQ(encoding_of(device), is_wide ? wide_encoding(first) : first);
    const PackedWeights& state = packed_weights(device.weights());
    const int64_t powers = state.data.tables.row_powers == nullptr ? 0 : 256 * sizeof(float);
    EXPECT_EQ(powers > 0, has_row_powers(first) && !has_ue8m0_scales(first) && !is_wide);
    EXPECT_EQ(device.weights().bytes(), expert_image_bytes(state.problem) + powers);
  }
}

INSTANTIATE_TEST_SUITE_P(All, GroupedGemmCuda, ::testing::ValuesIn(every_gpu_moe_mode()),
                         [](const auto& test) { return std::string(name(test.param)); });

// The portable kernel for each number of rows, in small, on every GPU.
class GroupedGemmPortable : public GpuTestWith<MoeMode> {};

TEST_P(GroupedGemmPortable, IsExactForIntegersAndNearForOthers) {
  const ForcedImplementation forced("grouped_gemm", kGroupedGemmSm80.name);
  for (const int32_t token_tile : {8, 16, 32, 64, 128}) {
    const bool is_large = token_tile >= 32;
    for (const GemmData data : {GemmData::kIntegers, GemmData::kRandom}) {
      if (data == GemmData::kRandom && token_tile != 8 && token_tile != 64) continue;
      SCOPED_TRACE(::testing::Message() << token_tile << " data " << static_cast<int>(data));
      const GemmCase gemm({.mode = GetParam(),
                           .weight_rows = 160,
                           .cols = round_up(int64_t{144}, moe_mode_info(GetParam()).multiple),
                           .expert_rows = {token_tile == 128 ? 520
                                           : is_large        ? 70
                                                             : 18,
                                           0, 3},
                           .token_tile = token_tile,
                           .gathers = is_large,
                           .has_slot_weights = true,
                           .bias = DType::kBF16,
                           .gate_order = GateOrder::kGateUp,
                           .has_scale = true,
                           .data = data,
                           .wide_scales = false,
                           .seed = 21});
      const DType dtype = is_large ? DType::kBF16 : DType::kF32;
      const GemmOnDevice device(gemm, dtype);
      const std::vector<uint8_t> output = device.run(is_large);
      if (data == GemmData::kIntegers) {
        expect_exact(gemm, dtype, output);
      } else {
        expect_near(gemm, dtype, output);
      }
      expect_padding_untouched(gemm, dtype, output);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, GroupedGemmPortable, ::testing::ValuesIn(every_gpu_moe_mode()),
                         [](const auto& test) { return std::string(name(test.param)); });

// Reads problems alone, so nothing here needs a GPU.
TEST(GroupedGemmSm90, TakesFewerThanTwoToThe31Tiles) {
  const GroupedGemmProblem problem{
      .mode = MoeMode::kNvfp4, .device = {DeviceType::kCuda, 0}, .experts = 8, .rows = 4096};
  constexpr int64_t kMost = (int64_t{1} << 31) / 32 - 1;  // 32 times 128 weight rows.
  EXPECT_TRUE(kGroupedGemmSm90.supports_tiles(problem, kMost, 128).ok());
  EXPECT_FALSE(kGroupedGemmSm90.supports_tiles(problem, kMost + 1, 128).ok());
  // A tile of 256 rows is two of the kernel.
  EXPECT_TRUE(kGroupedGemmSm90.supports_tiles(problem, kMost / 2, 256).ok());
  const Support refused = kGroupedGemmSm90.supports_tiles(problem, kMost / 2 + 1, 256);
  EXPECT_NE(refused.reason().find("2^31"), std::string_view::npos) << refused.reason();
}

class GroupedGemmCudaChecks : public OwnCodeTest {};

TEST_F(GroupedGemmCudaChecks, RefuseWhatOnlyTheCpuDoes) {
  const GemmCase gemm({.fp32_rows = true});
  const GemmOnDevice fp32_rows(gemm);
  expect_error(ErrorKind::kUnsupported, {"a.values: fp32 rows"},
               [&] { static_cast<void>(fp32_rows.run()); });
  const GemmCase plain({});
  GemmOnDevice fp64(plain);
  fp64.args.accumulation = Accumulation::kFp64;
  expect_error(ErrorKind::kUnsupported, {"accumulation: fp64"},
               [&] { static_cast<void>(fp64.run()); });
  for (const MoeMode mode : {MoeMode::kMxfp4Int8, MoeMode::kNvfp4Int8}) {
    const GemmCase int8({.mode = mode});
    expect_error(ErrorKind::kUnsupported,
                 {"grouped_gemm", name(mode).data(), "int8 rows run on the CPU only"},
                 [&] { const GemmOnDevice refused(int8); });
  }
}

}  // namespace
}  // namespace narrowfloat::testing
