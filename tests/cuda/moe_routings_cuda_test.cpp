// Layers on a GPU under the routings of moe spec 13.2: skewed ones, weights of every kind, ids that
// do not exist, duplicates on both sides of every number of slots at which other kernels take over.
#include <algorithm>
#include <limits>

#include <gtest/gtest.h>

#include "cuda/gpu_test.h"
#include "support/gpu_moe.h"
#include "support/moe_batch.h"
#include "support/moe_routings.h"

namespace narrowfloat::testing {
namespace {

constexpr MoeShape kRoutingsShape{
    .tokens = 80, .hidden = 256, .inter = 128, .experts = 16, .top_k = 2, .shared_experts = 0};

class MoeRoutingsOnTheGpu : public GpuTestWith<MoeMode> {};
INSTANTIATE_TEST_SUITE_P(Moe, MoeRoutingsOnTheGpu, ::testing::ValuesIn(every_gpu_moe_mode()),
                         mode_test_name);

// Tokens, and k, as many as the routing has.
void give(MoeCase& layer_case, const GivenRouting& routing) {
  layer_case.inputs().values.shape[0] = routing.tokens();
  layer_case.routing() = routing.view();
}

TEST_P(MoeRoutingsOnTheGpu, SkewedOnesAgreeWithTheCpu) {
  MoeCase layer_case(GetParam(), kRoutingsShape, Activation::swiglu(), 51);
  MoeConfig& config = layer_case.config();
  config.routing.options.negative_one_is_empty = true;
  const MoeLayer reference = layer_case.prepare_reference({.accumulation = Accumulation::kFp64});
  for (const int32_t tile : {8, 0}) {
    if (tile > 0) config.token_tile = tile;
    const MoeLayer layer = prepare_on_gpu(layer_case);
    for (const GivenRouting& routing : skewed_routings()) {
      SCOPED_TRACE(routing.name + ", tile " + std::to_string(tile));
      give(layer_case, routing);
      const MoeResult oracle = layer_case.run(reference);
      const MoeResult result = run_on_gpu(layer, layer_case);
      expect_batch_close(layer_case, layer, oracle, result);
    }
    config.token_tile.reset();
  }
}

// Rows do not depend on weights, and the combine is exact for all of them.
TEST_P(MoeRoutingsOnTheGpu, WeightsOfEveryKindAreCombinedExactly) {
  MoeCase layer_case(GetParam(), kRoutingsShape, Activation::swiglu(), 52);
  layer_case.config().out_dtype = DType::kF32;
  const MoeLayer layer = prepare_on_gpu(layer_case);
  GivenRouting routing = same_experts("weights", 24, {3, 9});
  give(layer_case, routing);
  const MoeResult plain = run_on_gpu(layer, layer_case);
  constexpr std::array kWeights{0.0F, -0.0F, -1.5F, 1e-40F, -1e-45F, 1e30F, -1e30F, 1.0F};
  for (size_t i = 0; i < routing.weights.size(); ++i) {
    routing.weights[i] = kWeights[(i / 2 + i % 2 * 3) % kWeights.size()];
  }
  const MoeResult result = run_on_gpu(layer, layer_case);
  EXPECT_EQ(result.slot_rows, plain.slot_rows);
  EXPECT_NE(result.out, plain.out);
  EXPECT_EQ(combined_slots(result, layer_case.config()), result.out);
}

// A weight of zero takes its slot away, and no other one.
TEST_P(MoeRoutingsOnTheGpu, AZeroWeightMakesItsTermVanish) {
  MoeCase layer_case(GetParam(), kRoutingsShape, Activation::swiglu(), 53);
  layer_case.config().routing.options.negative_one_is_empty = true;
  const MoeLayer layer = prepare_on_gpu(layer_case);
  GivenRouting routing = same_experts("weights", 9, {3, 9});
  give(layer_case, routing);
  for (size_t i = 1; i < routing.weights.size(); i += 2) routing.weights[i] = 0.0F;
  const MoeResult zero = run_on_gpu(layer, layer_case);
  for (size_t i = 1; i < routing.ids.size(); i += 2) routing.ids[i] = -1;
  EXPECT_EQ(run_on_gpu(layer, layer_case).out, zero.out);
}

// An id that does not exist is an empty slot: all other slots are as if they were alone.
TEST_P(MoeRoutingsOnTheGpu, IdsThatDoNotExistLeaveOthersAlone) {
  constexpr int32_t kLowest = std::numeric_limits<int32_t>::min();
  MoeCase layer_case(GetParam(), kRoutingsShape, Activation::swiglu(), 54);
  MoeConfig& config = layer_case.config();
  const MoeLayer reports = prepare_on_gpu(layer_case);
  config.routing.options.negative_one_is_empty = true;
  const MoeLayer allows = prepare_on_gpu(layer_case);
  GivenRouting routing = same_experts("bad ids", 30, {4, 11});
  give(layer_case, routing);
  const std::vector<std::pair<size_t, int32_t>> bad{{3, 16},     {8, kLowest},  {9, -1},
                                                    {20, 32767}, {21, 1 << 30}, {59, -2}};
  for (const auto& [slot, id] : bad) routing.ids[slot] = -1;
  const MoeResult expected = run_on_gpu(allows, layer_case);
  for (const auto& [slot, id] : bad) routing.ids[slot] = id;
  EXPECT_EQ(run_on_gpu(reports, layer_case), expected);
  std::vector<int32_t> packed;
  for (size_t i = 0; i < routing.ids.size(); ++i) {
    const auto id = static_cast<uint32_t>(static_cast<int16_t>(routing.ids[i]));
    // 0.5 and 0.75 in bf16. Ids of 32 bits that fit 16 become others.
    const uint32_t weight = i % 2 == 0 ? 0x3F00U : 0x3F40U;
    packed.push_back(static_cast<int32_t>(id << 16 | weight));
  }
  packed[8] = static_cast<int32_t>(0x80003F00U);   // -32768
  packed[21] = static_cast<int32_t>(0x7FFF3F40U);  // 32767
  layer_case.routing() = {};
  layer_case.routing().packed = TensorView::contiguous(packed.data(), DType::kI32, {30, 2});
  EXPECT_EQ(run_on_gpu(reports, layer_case), expected);
}

// Numbers of slots at which routing, permutation, rows and tiles go to other kernels: one block of
// given ids 2048, of the permutation 4096; its chunks 512 and 32768; tiles 8 to 128 a mean expert.
// Every pair of slots has some tokens with one expert twice; all slots are equal in some.
class MoeThresholds : public GpuTest {};

void add_duplicates(GivenRouting& routing) {
  for (int64_t token = 0; token < routing.tokens(); ++token) {
    int32_t* const ids = &routing.ids[static_cast<size_t>(token * routing.top_k)];
    const auto pairs = routing.top_k * (routing.top_k - 1) / 2;
    int64_t pair = token % (pairs + 2);
    if (pair == 0) continue;
    if (pair == 1) std::fill_n(ids, routing.top_k, ids[0]);
    pair -= 2;
    for (int64_t i = 0; i < routing.top_k && pair >= 0; ++i) {
      for (int64_t j = i + 1; j < routing.top_k; ++j, --pair) {
        if (pair == 0) ids[j] = ids[i];
      }
    }
  }
}

void expect_duplicates_work(MoeMode mode, const std::vector<int64_t>& slots) {
  constexpr int64_t kOwnTokens = 67;
  for (const int32_t top_k : {1, 4}) {
    const MoeShape shape{
        .tokens = kOwnTokens, .hidden = 128, .inter = 128, .experts = 32, .top_k = top_k};
    MoeCase layer_case(mode, shape, Activation::swiglu(), 55);
    Random random(55);
    GivenRouting routing{.name = "duplicates", .top_k = top_k, .ids = {}, .weights = {}};
    for (int64_t slot = 0; slot < kOwnTokens * top_k; ++slot) {
      routing.ids.push_back(static_cast<int32_t>(random.range(0, 31)));
      routing.weights.push_back(random.normal());
    }
    add_duplicates(routing);
    give(layer_case, routing);
    const MoeResult oracle = fp64_reference(layer_case);
    const MoeLayer layer = prepare_on_gpu(layer_case);
    for (const int64_t around : slots) {
      for (int64_t tokens = around / top_k - 1; tokens <= around / top_k + 1; ++tokens) {
        SCOPED_TRACE(std::to_string(tokens) + " tokens, k " + std::to_string(top_k));
        const RepeatedTokens batch(layer_case, tokens);
        const MoeResult result = run_on_gpu(layer, layer_case);
        expect_batch_close(layer_case, layer, oracle, result);
      }
    }
  }
}

TEST_F(MoeThresholds, DuplicatesOnBothSidesOfEachInBf16) {
  expect_duplicates_work(MoeMode::kBf16, {256, 512, 1024, 2048, 4096, 8192, 32768});
}

TEST_F(MoeThresholds, DuplicatesOnBothSidesOfEachInFourBits) {
  expect_duplicates_work(MoeMode::kMxfp4Fp8, {256, 2048, 4096, 8192});
  expect_duplicates_work(MoeMode::kNvfp4, {256, 2048, 4096, 8192});
}

// Experts and slots at which the router sorts instead of reducing in a warp (512, 32), the
// permutation counts in global memory, the combine unrolls (2, 8).
TEST_F(MoeThresholds, ExpertsAndSlotsOnBothSidesOfEach) {
  const std::vector<std::pair<int32_t, int32_t>> shapes{
      {511, 9}, {512, 8}, {513, 7}, {64, 31}, {64, 32}, {64, 33}, {1025, 3},
      {8, 2},   {8, 3},   {1, 1},   {31, 2},  {32, 2},  {33, 2},  {4096, 2}};
  for (const auto& [experts, top_k] : shapes) {
    SCOPED_TRACE(std::to_string(experts) + " experts, k " + std::to_string(top_k));
    const MoeShape shape{
        .tokens = 19, .hidden = 32, .inter = 32, .experts = experts, .top_k = top_k};
    MoeCase layer_case(MoeMode::kMxfp4Bf16, shape, Activation::swiglu(), 56);
    const MoeResult result = run_on_gpu(prepare_on_gpu(layer_case), layer_case);
    expect_close(layer_case, layer_case.config(), fp64_reference(layer_case), result);
  }
}

// Widths of a unit of weights, of what a block takes, of groups of scales, one block of scales less
// and more.
TEST_F(MoeThresholds, WidthsOnBothSidesOfEach) {
  for (const MoeMode mode : {MoeMode::kBf16, MoeMode::kMxfp4Fp8, MoeMode::kNvfp4Fp8Rounded}) {
    const int64_t unit = moe_mode_info(mode).multiple;
    for (const int64_t width : {64, 128, 256, 512, 1024}) {
      for (int64_t hidden = width - unit; hidden <= width + unit; hidden += unit) {
        const MoeShape shape{
            .tokens = 70, .hidden = hidden, .inter = 2 * width - hidden, .experts = 2, .top_k = 1};
        SCOPED_TRACE(std::string(name(mode)) + " " + std::to_string(hidden));
        MoeCase layer_case(mode, shape, Activation::swiglu(), 57);
        const MoeResult result = run_on_gpu(prepare_on_gpu(layer_case), layer_case);
        expect_close(layer_case, layer_case.config(), fp64_reference(layer_case), result);
      }
    }
  }
}

// 65536 tokens, in all kinds of skew, in a workspace of exactly the bytes asked for.
TEST_F(MoeThresholds, ManyTokensOnFewExperts) {
  constexpr int64_t kOwnTokens = 61;
  constexpr int64_t kTokens = 65536;
  const MoeShape shape{.tokens = kOwnTokens, .hidden = 64, .inter = 64, .experts = 16, .top_k = 2};
  MoeCase layer_case(MoeMode::kNvfp4Bf16, shape, Activation::swiglu(), 58);
  const MoeLayer layer = prepare_on_gpu(layer_case);
  for (GivenRouting routing :
       {same_experts("first", kOwnTokens, {0, 0}), same_experts("last", kOwnTokens, {15, 15}),
        same_experts("two", kOwnTokens, {7, 3})}) {
    SCOPED_TRACE(routing.name);
    give(layer_case, routing);
    const MoeResult oracle = fp64_reference(layer_case);
    const RepeatedTokens batch(layer_case, kTokens);
    const MoeResult result = run_on_gpu(layer, layer_case);
    expect_batch_close(layer_case, layer, oracle, result);
  }
}

}  // namespace
}  // namespace narrowfloat::testing
