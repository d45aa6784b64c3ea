// The MoE layer against tests/golden/vectors/moe, which come from an independent NumPy model of the
// specification: every operation on its own, then the layer. With sums in fp64 codes and rows are
// the model's, but for numbers that sit on a rounding boundary; with sums in fp32 they are within
// the tolerances of moe spec 12.3.
#include <cmath>
#include <filesystem>
#include <set>

#include <gtest/gtest.h>

#include "golden/moe_golden_compare.h"
#include "golden/moe_stages.h"
#include "golden/vector_line.h"
#include "support/moe_modes.h"

namespace narrowfloat {
namespace {

using testing::AlignedBytes;
using testing::count_codes;
using testing::count_unequal;
using testing::distance;
using testing::Distance;
using testing::expect_integers;
using testing::expect_weights;
using testing::Json;
using testing::MoeGoldenCase;
using testing::MoeGoldenFile;
using testing::MoeStages;
using testing::num_codes;
using testing::OwnedPermutation;
using testing::OwnedTensor;

constexpr size_t kCases = 12;  // Cases per mode.

// Tolerance of sums in fp32 (moe spec 12.3, the rows of paths that lose nothing but the order of
// sums).
struct Tolerance {
  double codes;  // Share that may differ.
  double layer;
  double layer_row;
};
constexpr double kFc1 = 5e-5;
constexpr double kFc2 = 1e-3;
constexpr double kFc2Row = 3e-3;

Tolerance tolerance_of(RowFormat intermediate) {
  switch (intermediate) {
    case RowFormat::kNvfp4:
      return {0.005, 1.5e-2, 8e-2};
    case RowFormat::kNvfp4PerToken:
      return {0.04, 3e-2, 1.5e-1};
    case RowFormat::kFp8Token:
      return {0.04, 5e-3, 4e-2};
    case RowFormat::kFp8Static:
    case RowFormat::kFp8Group:
    case RowFormat::kMxfp8:
      return {0.01, 5e-3, 4e-2};
    // An fp32 intermediate has no codes; nearly all of its numbers differ in the last bit.
    case RowFormat::kFp32:
      return {1, 3e-3, 1e-2};
    case RowFormat::kBf16:
      return {0.03, 3e-3, 1e-2};
  }
  return {};
}

// Elements or codes that differ, of all cases of a file.
struct Count {
  int64_t unequal = 0;
  int64_t all = 0;
  void add(int64_t more_unequal, int64_t more) {
    unequal += more_unequal;
    all += more;
  }
  void expect_at_most(double share, std::string_view what) const {
    EXPECT_LE(static_cast<double>(unequal), share * static_cast<double>(all))
        << what << ": " << unequal << " of " << all << " differ";
  }
};

struct Counts {
  Count codes;
  Count scales;
  Count rows;
  Count out;
};

void check_permutation(const OwnedPermutation& maps, const Json& expect) {
  expect_integers("slot_to_row", maps.slot_to_row, expect.at("slot_to_row"), 0);
  expect_integers("row_to_token", maps.row_to_token, expect.at("row_to_token"), -1);
  expect_integers("row_to_slot", maps.row_to_slot, expect.at("row_to_slot"), -1);
  expect_integers("tile_to_expert", maps.tile_to_expert, expect.at("tile_to_expert"), 0);
  expect_integers("tile_row_end", maps.tile_row_end, expect.at("tile_row_end"), 0);
  EXPECT_EQ(maps.num_rows.at(0), expect.at("num_rows").get<double>());
  EXPECT_EQ(maps.num_tiles.at(0), static_cast<double>(expect.at("tile_to_expert").size()));
  EXPECT_EQ(maps.tile_to_expert.count(), expect.at("max_tiles").get<int64_t>());
}

void check_routing(const MoeGoldenCase& given, MoeStages& stages) {
  stages.route_tokens();
  expect_integers("topk_ids", stages.ids, given.expect().at("topk_ids"), 0);
  expect_weights(stages.weights, given.tensor("expert_weights"));
  stages.permute_slots();
  check_permutation(stages.maps, given.expect());
}

// The golden file has the first rows.
OwnedTensor leading_rows(const OwnedTensor& tensor, int64_t rows) {
  std::vector<int64_t> source(static_cast<size_t>(rows));
  for (size_t i = 0; i < source.size(); ++i) source[i] = static_cast<int64_t>(i);
  return tensor.gathered(source);
}

void check_first_gemm(const MoeGoldenCase& given, MoeStages& stages, Accumulation accumulation) {
  stages.multiply_first();
  const OwnedTensor& expected = given.tensor("fc1");
  const Distance d = distance("fc1", leading_rows(stages.fc1, expected.shape.at(0)), expected);
  // The file has float32.
  EXPECT_LE(d.all, accumulation == Accumulation::kFp64 ? 6e-8 : kFc1);
}

void check_intermediate(const MoeGoldenCase& given, MoeStages& stages, Accumulation accumulation,
                        Counts& counts) {
  stages.activate_rows();
  const OwnedTensor& codes = given.tensor("h");
  if (accumulation == Accumulation::kFp32 && given.intermediate() == RowFormat::kFp32) {
    // No codes: nearly all of these numbers differ in the last bit.
    EXPECT_LE(distance("h", stages.h, codes).all, 2 * kFc1);
    return;
  }
  counts.codes.add(count_codes(stages.h, codes), num_codes(codes));
  if (given.has("h_scales")) {
    const OwnedTensor& scales = given.tensor("h_scales");
    counts.scales.add(count_codes(stages.h_scales, scales), scales.count());
    EXPECT_LE(distance("h_scales", stages.h_scales, scales).all, 0.2);
  }
  if (given.has("h_row_scale")) {
    EXPECT_LE(distance("h_row_scale", stages.h_row_scale, given.tensor("h_row_scale")).row, 1e-2);
  }
}

void check_second_gemm(const MoeGoldenCase& given, MoeStages& stages, Accumulation accumulation,
                       Counts& counts) {
  stages.multiply_second();
  const OwnedTensor& expected = given.tensor("y");
  if (accumulation == Accumulation::kFp64) {
    counts.rows.add(count_unequal("y", stages.y, expected), expected.count());
  } else {
    const Distance d = distance("y", stages.y, expected);
    EXPECT_LE(d.all, kFc2);
    EXPECT_LE(d.row, kFc2Row);
  }
  stages.combine_slots();
  EXPECT_EQ(count_unequal("combined", stages.out, given.tensor("out")), 0);
}

void check_stages(const MoeGoldenCase& given, Accumulation accumulation, Counts& counts) {
  MoeStages stages(given, accumulation);
  ASSERT_NO_FATAL_FAILURE(check_routing(given, stages));
  // The layer alone quantizes unquantized rows, and the first GEMM's rows twice.
  if (given.has_coded_input() && !given.plan().value("double_quantize_fc1", false)) {
    check_first_gemm(given, stages, accumulation);
    check_intermediate(given, stages, accumulation, counts);
  }
  check_second_gemm(given, stages, accumulation, counts);
}

// The part of an output's tolerance that comes from routing weights: the sum over slots of their
// tolerance times |y|, and of the roundings of a sum that is formed from others, 2^-23 |w y| each.
std::vector<double> weight_slack(const MoeGoldenCase& given) {
  const OwnedTensor& out = given.tensor("out");
  const OwnedTensor& y = given.tensor("y");
  const OwnedTensor& weights = given.tensor("expert_weights");
  const auto slot_to_row = given.expect().at("slot_to_row").get<std::vector<int32_t>>();
  const auto all_slots = static_cast<int64_t>(slot_to_row.size());
  const int64_t tokens = out.shape.at(0);
  const int64_t cols = out.shape.at(1);
  const int64_t hidden = y.shape.at(1);
  std::vector<double> slack(static_cast<size_t>(out.count()));
  int64_t row = 0;
  for (int64_t slot = 0; slot < all_slots; ++slot) {
    if (slot_to_row[static_cast<size_t>(slot)] < 0) continue;
    const int64_t token = slot / (all_slots / tokens);
    const double slot_error =
        weights.at(all_slots + slot) + std::ldexp(std::abs(weights.at(slot)), -23);
    for (int64_t o = 0; o < cols; ++o) {
      slack[static_cast<size_t>(token * cols + o)] += slot_error * std::abs(y.at(row * hidden + o));
    }
    ++row;
  }
  return slack;
}

struct LayerRun {
  OwnedTensor out;
  OwnedTensor y;  // Local slots, in the order of slot indexes.
};

void run_layer(const MoeGoldenCase& given, Accumulation accumulation, LayerRun& run) {
  const MoeConfig config = given.config();
  const auto layer =
      MoeLayer::prepare_reference(given.weights(), config, given.reference(accumulation));
  const OwnedTensor& expected = given.tensor("out");
  const int64_t tokens = expected.shape.at(0);
  const int64_t slots = config.routing.top_k + config.routing.shared_experts;
  run.out = OwnedTensor(config.out_dtype, expected.shape, 0xFF);
  const OwnedTensor rows(config.slot_dtype, {layer.max_rows(tokens), config.hidden}, 0xFF);
  const OwnedTensor ids(DType::kI32, {tokens, slots}, 0xFF);
  const OwnedTensor weights(DType::kF32, {tokens, slots}, 0xFF);
  const OwnedTensor slot_to_row(DType::kI32, {tokens * slots}, 0xFF);
  const AlignedBytes workspace(layer.required_workspace(tokens));
  const MoeOutputs outputs{.out = run.out.view(),
                           .slot_out = rows.view(),
                           .expert_weights = weights.view(),
                           .slot_to_row = slot_to_row.view(),
                           .topk_ids = ids.view(),
                           .routing_replay = {},
                           .errors = nullptr};
  layer.run(given.inputs(), given.routing(), outputs, workspace.view());
  expect_integers("topk_ids", ids, given.expect().at("topk_ids"), 0);
  expect_integers("slot_to_row", slot_to_row, given.expect().at("slot_to_row"), 0);
  expect_weights(weights, given.tensor("expert_weights"));
  std::vector<int64_t> local;
  for (int64_t i = 0; i < slot_to_row.count(); ++i) {
    if (slot_to_row.at(i) >= 0) local.push_back(static_cast<int64_t>(slot_to_row.at(i)));
  }
  run.y = rows.gathered(local);
}

void check_layer(const MoeGoldenCase& given, Accumulation accumulation, Counts& counts) {
  LayerRun run;
  ASSERT_NO_FATAL_FAILURE(run_layer(given, accumulation, run));
  const OwnedTensor& out = given.tensor("out");
  const OwnedTensor& y = given.tensor("y");
  // FC1's second quantization takes fp32 rows, and what follows it computes in fp32.
  const bool is_exact = !given.plan().value("double_quantize_fc1", false);
  if (accumulation == Accumulation::kFp64 && is_exact) {
    counts.rows.add(count_unequal("slot_out", run.y, y), y.count());
    const int64_t unequal = count_unequal("out", run.out, out, weight_slack(given));
    // Routing weights that differ in the last bit show in fp32, seldom in narrower types.
    if (out.dtype != DType::kF32) counts.out.add(unequal, out.count());
    return;
  }
  const Tolerance tolerance = tolerance_of(given.intermediate());
  for (const Distance& d : {distance("slot_out", run.y, y), distance("out", run.out, out)}) {
    EXPECT_LE(d.all, tolerance.layer);
    EXPECT_LE(d.row, tolerance.layer_row);
  }
}

class MoeVectors : public ::testing::TestWithParam<MoeMode> {
 protected:
  using Check = void (*)(const MoeGoldenCase&, Accumulation, Counts&);

  // Runs every case of the mode's file.
  static void check_cases(Accumulation accumulation, Check check, Counts& counts) {
    const MoeGoldenFile file(name(GetParam()));
    ASSERT_EQ(file.cases().size(), kCases);
    for (const std::string& implementation : judged_implementations()) {
      const PinnedImplementation pinned(implementation);
      for (size_t i = 0; i < kCases; ++i) {
        SCOPED_TRACE(implementation + " case " + std::to_string(i));
        const MoeGoldenCase given(file, i);
        ASSERT_NO_THROW(check(given, accumulation, counts));
        if (HasFailure()) return;
      }
    }
  }
};

constexpr double kOnBoundary = 0.001;  // Share of numbers that may sit on a rounding boundary.

TEST_P(MoeVectors, EveryStageInFp64IsTheModel) {
  Counts counts;
  check_cases(Accumulation::kFp64, check_stages, counts);
  counts.codes.expect_at_most(0, "codes of the intermediate");
  counts.scales.expect_at_most(0, "scales of the intermediate");
  counts.rows.expect_at_most(kOnBoundary, "elements of y");
}

TEST_P(MoeVectors, EveryStageInFp32IsCloseToTheModel) {
  Counts counts;
  check_cases(Accumulation::kFp32, check_stages, counts);
  const double share = tolerance_of(moe_mode_info(GetParam()).intermediate).codes;
  counts.codes.expect_at_most(share, "codes of the intermediate");
}

TEST_P(MoeVectors, TheLayerInFp64IsTheModel) {
  Counts counts;
  check_cases(Accumulation::kFp64, check_layer, counts);
  counts.rows.expect_at_most(kOnBoundary, "elements of slot_out");
  counts.out.expect_at_most(kOnBoundary, "elements of out");
}

TEST_P(MoeVectors, TheLayerInFp32IsCloseToTheModel) {
  Counts counts;
  check_cases(Accumulation::kFp32, check_layer, counts);
}

INSTANTIATE_TEST_SUITE_P(All, MoeVectors, ::testing::ValuesIn(testing::every_moe_mode()),
                         [](const auto& mode) { return std::string(name(mode.param)); });

void check_routing_case(const MoeGoldenFile& file, size_t index) {
  const Json& plan = file.cases()[index];
  const Json& expect = plan.at("expect");
  const std::string prefix = std::to_string(index) + ".";
  Routing routing;
  routing.logits = file.tensor(prefix + "logits").view();
  if (file.has(prefix + "bias")) routing.bias = file.tensor(prefix + "bias").view();
  const RoutingConfig config = testing::routing_config(plan.at("router"));
  const int64_t tokens = routing.logits.shape[0];
  const int64_t slots = config.top_k + config.shared_experts;
  RouteOutputs outputs;
  const OwnedTensor ids(DType::kI32, {tokens, slots}, 0xFF);
  const OwnedTensor weights(DType::kF32, {tokens, slots}, 0xFF);
  outputs.ids = ids.view();
  outputs.weights = weights.view();
  route(routing, config, outputs);
  expect_integers("topk_ids", ids, expect.at("topk_ids"), 0);
  expect_weights(weights, file.tensor(prefix + "expert_weights"));
  if (!plan.contains("token_tile")) return;
  const auto experts = plan.at("local_experts").get<int32_t>();
  const OwnedPermutation maps(
      permutation_layout(tokens, slots, experts, plan.at("token_tile").get<int32_t>()));
  permute(ids.view(), plan.at("expert_offset").get<int32_t>(), experts, maps.view());
  check_permutation(maps, expect);
}

TEST(RoutingVectors, IdsWeightsAndPermutationsAreTheModels) {
  const MoeGoldenFile file("routing");
  ASSERT_GE(file.cases().size(), 250U);
  for (const std::string& implementation : judged_implementations()) {
    const PinnedImplementation pinned(implementation);
    for (size_t i = 0; i < file.cases().size(); ++i) {
      SCOPED_TRACE(implementation + " " + file.cases()[i].dump());
      ASSERT_NO_THROW(check_routing_case(file, i));
      if (HasFailure()) return;
    }
  }
}

TEST(MoeVectorFiles, AreAllRun) {
  std::set<std::string> listed{"routing"};
  for (const MoeModeInfo& info : all_moe_modes()) listed.insert(std::string(info.name));
  std::set<std::string> present;
  for (const auto& entry :
       std::filesystem::directory_iterator(NARROWFLOAT_SOURCE_DIR "/tests/golden/vectors/moe")) {
    present.insert(entry.path().stem());
  }
  EXPECT_EQ(present, listed);
}

}  // namespace
}  // namespace narrowfloat
