// Every method on cases small enough to compute by hand (moe spec 4.2, 4.3).
#include <cmath>

#include <gtest/gtest.h>

#include "base/host_device.h"
#include "route_call.h"
#include "support/special_floats.h"

namespace narrowfloat::testing {
namespace {

using Weights = std::vector<float>;

const float kNan = bits_float(0x7FC00000U);
const float kNegativeNan = bits_float(0xFFC00000U);
constexpr uint32_t kCanonicalNan = 0x7FFFFFFFU;
// exp(-100), rounded to a denormal.
constexpr float kExpMinus100 = 0x1.bp-145F;

RoutingConfig deepseek(size_t experts, int32_t top_k, float scale) {
  RoutingConfig config = config_of(RoutingMethod::kDeepSeekV3, experts, top_k);
  config.routed_scale = scale;
  return config;
}

// Keys as biases of saturated sigmoids: sigmoid(-30) = 0.
std::vector<float> logits_of_zero(size_t experts) { return std::vector<float>(experts, -30.0F); }

TEST(RouteDefault, DividesByTheSumOverAllExperts) {
  const Routed routed = route_row({0, 100, 0, 100}, config_of(RoutingMethod::kDefault, 4, 3));
  EXPECT_EQ(routed.ids_of(0), (Ids{1, 3, 0}));
  EXPECT_EQ(routed.weights_of(0), (Weights{0.5F, 0.5F, kExpMinus100 / 2}));
  const Routed equal = route_row({7, 7, 7, 7}, config_of(RoutingMethod::kDefault, 4, 2));
  EXPECT_EQ(equal.ids_of(0), (Ids{0, 1}));
  EXPECT_EQ(equal.weights_of(0), (Weights{0.25F, 0.25F}));
}

TEST(RouteDefault, OrdersByLogitsWhereProbabilitiesAreEqual) {
  // exp(-200) and exp(-300) are both 0 in fp32.
  const Routed routed = route_row({-300, 0, -200}, config_of(RoutingMethod::kDefault, 3, 3));
  EXPECT_EQ(routed.ids_of(0), (Ids{1, 2, 0}));
  EXPECT_EQ(routed.weights_of(0), (Weights{1, 0, 0}));
}

TEST(RouteRenormalize, DividesByTheSumOverTheSelected) {
  for (const auto method : {RoutingMethod::kRenormalize, RoutingMethod::kRenormalizeNaive}) {
    const Routed routed = route_row({0, 100, 100, -5}, config_of(method, 4, 3));
    EXPECT_EQ(routed.ids_of(0), (Ids{1, 2, 0}));
    EXPECT_EQ(routed.weights_of(0), (Weights{0.5F, 0.5F, kExpMinus100 / 2}));
    const Routed equal = route_row({7, 7, 7, 7}, config_of(method, 4, 2));
    EXPECT_EQ(equal.weights_of(0), (Weights{0.5F, 0.5F}));
  }
}

TEST(RouteLlama4, TakesTheSigmoidOfTheLargestLogit) {
  const RoutingConfig config = config_of(RoutingMethod::kLlama4, 3, 1);
  const Routed routed = route_rows({{-4, 0, 0}, {20, 17, 30}, {-30, -40, -25}}, config);
  EXPECT_EQ(routed.ids, (Ids{1, 2, 2}));
  EXPECT_EQ(routed.weights_of(0), Weights{0.5F});
  EXPECT_EQ(routed.weights_of(1), Weights{1.0F});
  EXPECT_EQ(routed.weight_bits_of(2), Bits{0});
}

TEST(RouteTopK, KeepsTheLogits) {
  const Routed routed = route_row({-1.5F, 2.25F, 0.75F}, config_of(RoutingMethod::kTopK, 3, 3));
  EXPECT_EQ(routed.ids_of(0), (Ids{1, 2, 0}));
  EXPECT_EQ(routed.weights_of(0), (Weights{2.25F, 0.75F, -1.5F}));
}

TEST(RouteSigmoidRenorm, DividesByTheSumUnlessToldNotTo) {
  RoutingConfig config = config_of(RoutingMethod::kSigmoidRenorm, 4, 3);
  const Rows rows{{0, 0, 20, -20}};
  EXPECT_EQ(route_rows(rows, config).ids, (Ids{2, 0, 1}));
  EXPECT_EQ(route_rows(rows, config).weights_of(0), (Weights{0.5F, 0.25F, 0.25F}));
  config.norm_topk = false;
  EXPECT_EQ(route_rows(rows, config).weights_of(0), (Weights{1.0F, 0.5F, 0.5F}));
}

TEST(RouteSigmoidRenorm, GivesZeroWeightsWhereAllSigmoidsVanish) {
  const Routed routed = route_row({-20, -30, -19}, config_of(RoutingMethod::kSigmoidRenorm, 3, 2));
  EXPECT_EQ(routed.ids_of(0), (Ids{0, 1}));
  EXPECT_EQ(routed.weight_bits_of(0), (Bits{0, 0}));
}

TEST(RouteSigmoid, TiesWhereTheSigmoidSaturatesAndTopKSigmoidDoesNot) {
  const Rows rows{{17, 30, 18}, {-20, -19, -30}};
  const Routed by_sigmoid = route_rows(rows, config_of(RoutingMethod::kSigmoid, 3, 2));
  EXPECT_EQ(by_sigmoid.ids, (Ids{0, 1, 0, 1}));
  const Routed by_logit = route_rows(rows, config_of(RoutingMethod::kTopKSigmoid, 3, 2));
  EXPECT_EQ(by_logit.ids, (Ids{1, 2, 1, 0}));
  for (const Routed& routed : {by_sigmoid, by_logit}) {
    EXPECT_EQ(routed.weights_of(0), (Weights{1, 1}));
    EXPECT_EQ(routed.weight_bits_of(1), (Bits{0, 0}));
  }
}

TEST(RouteWithBias, SelectsByTheBiasedSigmoidAndWeighsByTheUnbiasedOne) {
  for (const auto method : {RoutingMethod::kDeepSeekV3, RoutingMethod::kMiniMax2}) {
    RoutingConfig config = config_of(method, 4, 2);
    config.routed_scale = 2.5F;
    // Keys 0.5, 0, 0.75, 0.5.
    const Routed routed = route_row({0, 20, 0, 0}, config, {0, -1, 0.25F, 0});
    EXPECT_EQ(routed.ids_of(0), (Ids{2, 0}));
    EXPECT_EQ(routed.weights_of(0), (Weights{1.25F, 1.25F}));
  }
}

TEST(RouteWithBias, ALargeBiasDoesNotCancelTheSigmoid) {
  // Near 1e4 floats are 2^-10 apart: key - bias would have lost sigmoid(-8) = 3.4e-4.
  const Routed routed = route_row({-8, 20, -9}, deepseek(3, 2, 1.0F), {1e4F, 1e4F, 0});
  EXPECT_EQ(routed.ids_of(0), (Ids{1, 0}));
  const double s = 1 / (1 + std::exp(8.0));
  EXPECT_NEAR(routed.weights_of(0)[0], 1 / (1 + s), 1e-7);
  EXPECT_NEAR(routed.weights_of(0)[1], s / (1 + s), 1e-7);
}

TEST(RouteWithBias, AMissingBiasIsZeros) {
  const std::vector<float> logits{0.5F, -1, 3, 0.25F, 3};
  const RoutingConfig config = deepseek(5, 4, 2.0F);
  const Routed without = route_row(logits, config);
  EXPECT_EQ(without.ids_of(0), (Ids{2, 4, 0, 3}));
  EXPECT_EQ(without, route_row(logits, config, std::vector<float>(5, 0.0F)));
}

TEST(RouteGroups, KeepsTheGroupsWithTheLargestSumsOfTwo) {
  // Groups of two with sums 1, 3, 3, 3: of equal ones the lower groups stay.
  const std::vector<float> keys{4, -3, 2, 1, 3, 0, 2.5F, 0.5F};
  RoutingConfig config = grouped(8, 3, 4, 2);
  config.routed_scale = 3.0F;
  const Routed routed = route_row(logits_of_zero(8), config, keys);
  EXPECT_EQ(routed.ids_of(0), (Ids{4, 2, 3}));
  // All sigmoids are 0: 0 * 3 / 1e-20.
  EXPECT_EQ(routed.weight_bits_of(0), (Bits{0, 0, 0}));
  const Routed saturated = route_row(std::vector<float>(8, 20.0F), config, keys);
  EXPECT_EQ(saturated.ids_of(0), (Ids{4, 2, 3}));
  EXPECT_EQ(saturated.weights_of(0), (Weights{1, 1, 1}));
}

TEST(RouteGroups, CountTheTwoLargestKeysAndNoMore) {
  // Sums of two: 5 and 6; of three: 9 and 6.
  const std::vector<float> keys{3, 2, 4, 4, 0, 2};
  EXPECT_EQ(route_row(logits_of_zero(6), grouped(6, 2, 2, 1), {3, 2, 2, 2, 0, 4}).ids_of(0),
            (Ids{5, 3}));
  EXPECT_EQ(route_row(logits_of_zero(6), grouped(6, 2, 2, 1), keys).ids_of(0), (Ids{2, 0}));
}

TEST(RouteGroups, AMaskedExpertNeverBeatsANegativeKey) {
  const Routed routed = route_row(logits_of_zero(4), grouped(4, 2, 2, 1), {-1, -2, -5, -6});
  EXPECT_EQ(routed.ids_of(0), (Ids{0, 1}));
}

TEST(RouteGroups, KeptKeysOfNegativeInfinityComeBeforeMaskedExperts) {
  const std::vector<float> keys{5, 5, -kFloatInfinity, 9, -1, -1};
  const Routed routed = route_row(logits_of_zero(6), grouped(6, 3, 2, 1), keys);
  EXPECT_EQ(routed.ids_of(0), (Ids{0, 1, 2}));
  // Both groups at -Inf: the first stays.
  const std::vector<float> none(6, -kFloatInfinity);
  EXPECT_EQ(route_row(logits_of_zero(6), grouped(6, 3, 2, 1), none).ids_of(0), (Ids{0, 1, 2}));
}

TEST(RouteGroups, TiesAcrossTheirBoundariesGoToTheLowerId) {
  const std::vector<float> keys{1, 2, 2, 1, 1, 2, 0, 0};
  const Routed routed = route_row(logits_of_zero(8), grouped(8, 6, 4, 3), keys);
  EXPECT_EQ(routed.ids_of(0), (Ids{1, 2, 5, 0, 3, 4}));
}

TEST(RouteGroups, RoundTheBiasToBf16OnlyWhenAsked) {
  // 1 + 2^-9 rounds to 1 in bf16, and then expert 0 wins the tie.
  const std::vector<float> bias{1, 1 + 0x1p-9F, 0, 0};
  RoutingConfig config = grouped(4, 1, 2, 1);
  EXPECT_EQ(route_row(logits_of_zero(4), config, bias).ids_of(0), Ids{1});
  config.options.grouped_bias_bf16 = true;
  EXPECT_EQ(route_row(logits_of_zero(4), config, bias).ids_of(0), Ids{0});
  config.n_group = config.topk_group = 1;
  EXPECT_EQ(route_row(logits_of_zero(4), config, bias).ids_of(0), Ids{1}) << "not without groups";
}

TEST(RouteOrder, NegativeZeroRanksBelowPositiveZero) {
  for (const auto method : {RoutingMethod::kTopK, RoutingMethod::kTopKSigmoid}) {
    const Routed routed = route_row({-0.0F, 0.0F, -1}, config_of(method, 3, 2));
    EXPECT_EQ(routed.ids_of(0), (Ids{1, 0}));
  }
  const Routed logits = route_row({-0.0F, 0.0F}, config_of(RoutingMethod::kTopK, 2, 2));
  EXPECT_EQ(logits.weight_bits_of(0), (Bits{0, 0x80000000U}));
}

TEST(RouteOrder, NanLogitsRankBeyondTheInfinitiesBySign) {
  const std::vector<float> logits{1, kNan, kFloatInfinity, kNegativeNan, -kFloatInfinity};
  const Routed routed = route_row(logits, config_of(RoutingMethod::kTopK, 5, 5));
  EXPECT_EQ(routed.ids_of(0), (Ids{1, 2, 0, 4, 3}));
  EXPECT_EQ(routed.weight_bits_of(0),
            (Bits{kCanonicalNan, 0x7F800000U, 0x3F800000U, 0xFF800000U, kCanonicalNan}));
}

TEST(RouteOrder, TheSigmoidOfAnyNanRanksFirst) {
  const std::vector<float> logits{1, kNegativeNan, 50, kNan};
  const Routed routed = route_row(logits, config_of(RoutingMethod::kSigmoid, 4, 3));
  EXPECT_EQ(routed.ids_of(0), (Ids{1, 3, 2}));
  const Routed biased = route_row(logits, deepseek(4, 3, 1.0F), {0, 0, kNegativeNan, 0});
  EXPECT_EQ(biased.ids_of(0), (Ids{1, 2, 3}));
  EXPECT_EQ(biased.weight_bits_of(0), Bits(3, kCanonicalNan));
}

TEST(RouteSoftmax, ARowOfNegativeInfinityGivesNanWeightsAndValidIds) {
  const std::vector<float> logits(5, -kFloatInfinity);
  for (const auto method :
       {RoutingMethod::kDefault, RoutingMethod::kRenormalize, RoutingMethod::kRenormalizeNaive}) {
    const Routed routed = route_row(logits, config_of(method, 5, 3));
    EXPECT_EQ(routed.ids_of(0), (Ids{0, 1, 2}));
    EXPECT_EQ(routed.weight_bits_of(0), Bits(3, kCanonicalNan));
  }
}

TEST(RouteSoftmax, ASelectedNegativeInfinityWeighsZeroBesideNumbers) {
  const std::vector<float> logits{-kFloatInfinity, 2, -kFloatInfinity};
  for (const auto method : {RoutingMethod::kDefault, RoutingMethod::kRenormalize}) {
    const Routed routed = route_row(logits, config_of(method, 3, 2));
    EXPECT_EQ(routed.ids_of(0), (Ids{1, 0}));
    EXPECT_EQ(routed.weight_bits_of(0), (Bits{0x3F800000U, 0}));
  }
}

TEST(RouteSoftmax, ANanOutsideTheSelectionShowsInDefaultOnly) {
  const std::vector<float> logits{1, kNegativeNan, 1};
  const Routed over_all = route_row(logits, config_of(RoutingMethod::kDefault, 3, 2));
  EXPECT_EQ(over_all.ids_of(0), (Ids{0, 2}));
  EXPECT_EQ(over_all.weight_bits_of(0), Bits(2, kCanonicalNan));
  const Routed selected = route_row(logits, config_of(RoutingMethod::kRenormalize, 3, 2));
  EXPECT_EQ(selected.weights_of(0), (Weights{0.5F, 0.5F}));
}

TEST(RouteOrder, ATokenOfNanChangesNoOtherRow) {
  for (const RoutingMethodInfo& info : all_routing_methods()) {
    const RoutingConfig config = config_of(info.id, 3, 1);
    const Routed clean = route_rows({{1, 2, 3}, {0, 0, 0}, {3, 2, 1}}, config);
    const Routed dirty = route_rows({{1, 2, 3}, {kNan, kNan, kNan}, {3, 2, 1}}, config);
    for (const int64_t token : {0, 2}) {
      EXPECT_EQ(clean.ids_of(token), dirty.ids_of(token)) << info.name;
      EXPECT_EQ(clean.weight_bits_of(token), dirty.weight_bits_of(token)) << info.name;
    }
  }
}

}  // namespace
}  // namespace narrowfloat::testing
