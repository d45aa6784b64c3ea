// The whole layer over a covering set: every pair of mode, routing method, activation and gate
// order occurs. For each case the fast implementations give the bytes of the reference, and fp32
// sums, fast ones too, stay within moe spec 12.3 of fp64 ones.
#include <gtest/gtest.h>

#include "base/int_math.h"
#include "conformance/case_sampling.h"
#include "support/environment.h"
#include "support/moe_batch.h"
#include "support/moe_exact_case.h"
#include "support/moe_sampling.h"
#include "support/moved_weights.h"

namespace narrowfloat::testing {
namespace {

double end_to_end_bound(MoeMode mode) {
  const RowFormat intermediate = moe_mode_info(mode).intermediate;
  return intermediate == RowFormat::kBf16 ? 3e-3 : 3e-2;
}

void check_case(const LayerAxes& axes, int64_t index) {
  const std::string combination = to_string(axes);
  SCOPED_TRACE(combination + " case " + std::to_string(index));
  const uint64_t seed = case_seed(combination, index);
  Random random(seed);
  const auto sampled = sample_moe_case(axes, sample_moe_shape(axes.mode, random), random, seed);
  MoeCase& layer_case = *sampled;
  const MoeConfig& config = layer_case.config();
  std::optional<MoeResult> fp32;
  // The fp64 reference: ids and weights are equal, rows near.
  const auto expect_near = [&](const MoeResult& result, const MoeResult& expected) {
    EXPECT_EQ(result.topk_ids, expected.topk_ids);
    EXPECT_EQ(result.expert_weights, expected.expert_weights);
    const Distance apart =
        distance(as_floats(result.slot_rows, config.slot_dtype),
                 as_floats(expected.slot_rows, config.slot_dtype), config.hidden);
    EXPECT_LT(apart.rel, end_to_end_bound(axes.mode));
  };
  for (const Accumulation accumulation : {Accumulation::kFp32, Accumulation::kFp64}) {
    const MoeReferenceOptions options{.accumulation = accumulation};
    const std::string reference = force_moe("cpu_reference");
    MoeResult expected;
    {
      const ForcedImplementation forced(reference.substr(0, 5), reference.substr(6));
      expected = layer_case.run_reference(options);
    }
    EXPECT_EQ(layer_case.run_reference(options), expected);
    if (!fp32) {
      fp32 = expected;
      continue;
    }
    expect_near(*fp32, expected);
    layer_case.config().fast_sums = true;
    expect_near(layer_case.run(), expected);
    EXPECT_EQ(layer_case.run_reference(options), expected) << "a reference ignores fast_sums";
  }
}

class MoeLayerConformance : public ::testing::TestWithParam<MoeMode> {};
INSTANTIATE_TEST_SUITE_P(Moe, MoeLayerConformance, ::testing::ValuesIn(every_moe_mode()),
                         mode_test_name);

// Modes x 11 activations; method (i + j) mod 10 and order (i + 2 j) mod 3 then meet every mode,
// every activation and each other.
TEST_P(MoeLayerConformance, EveryImplementationGivesTheBytesOfTheReference) {
  const auto mode = static_cast<size_t>(GetParam());
  const auto activations = all_activations();
  const auto methods = all_routing_methods();
  for (size_t j = 0; j < activations.size(); ++j) {
    const LayerAxes axes{.mode = GetParam(),
                         .activation = activations[j].id,
                         .method = methods[(mode + j) % methods.size()].id,
                         .order = static_cast<GateOrder>((mode + 2 * j) % 3)};
    for_cases(1, [&](int64_t index) { check_case(axes, index); });
  }
}

// Integers and scales of 1: sums in fp32 lose nothing (moe spec 12.4).
TEST_P(MoeLayerConformance, ExactCasesHaveTheBitsOfDoublePrecision) {
  const int64_t unit = std::max<int64_t>(16, moe_mode_info(GetParam()).multiple);
  for (const int64_t blocks : {2, 3, 5}) {
    const MoeShape shape{.tokens = 9,
                         .hidden = unit * blocks,
                         .inter = unit * (blocks + 1),
                         .experts = 5,
                         .top_k = 3,
                         .shared_experts = static_cast<int32_t>(blocks % 2)};
    ExactMoe exact(GetParam(), shape, static_cast<uint64_t>(blocks));
    const MoeResult result = exact.layer_case().run();
    EXPECT_EQ(fp64_reference(exact.layer_case()), result) << blocks << " blocks";
  }
}

// A gate order is where rows lie, not what they mean.
TEST_P(MoeLayerConformance, GateOrdersOfTheSameWeightsGiveEqualBits) {
  // 128x128 blocks can change places as a whole; interleaved, they would hold rows of both halves.
  const bool has_tiles = GetParam() == MoeMode::kFp8Block;
  const MoeShape shape{.tokens = 6,
                       .hidden = has_tiles ? 256 : 160,
                       .inter = has_tiles ? 128 : 96,
                       .experts = 4,
                       .top_k = 2};
  MoeCase layer_case(GetParam(), shape, Activation::swiglu_oai(1.702F, 1.0F, 2.0F), 1);
  layer_case.add_biases();
  const MoeWeights original = layer_case.weights();
  const MoeResult expected = layer_case.run();
  for (const GateOrder order : {GateOrder::kGateUp, GateOrder::kInterleaved}) {
    if (has_tiles && order == GateOrder::kInterleaved) continue;
    MovedWeights moved(original);
    moved.reorder_gate(order);
    layer_case.weights() = moved.weights();
    layer_case.config().gate_order = order;
    EXPECT_EQ(layer_case.run(), expected) << name(order);
  }
}

}  // namespace
}  // namespace narrowfloat::testing
