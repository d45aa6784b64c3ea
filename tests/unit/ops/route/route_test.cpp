// The properties of every method: shared experts, rounding, replay, types and strides of the
// logits, independence of threads and of the caller's floating-point environment.
#include <gtest/gtest.h>

#include "base/host_device.h"
#include "formats/float16.h"
#include "route_call.h"
#include "support/environment.h"
#include "support/random.h"

namespace narrowfloat::testing {
namespace {

Rows random_rows(int64_t tokens, int64_t experts, uint64_t seed) {
  Random random(seed);
  Rows rows(static_cast<size_t>(tokens));
  for (auto& row : rows) {
    for (int64_t e = 0; e < experts; ++e) {
      row.push_back(static_cast<float>(random.range(-64, 64)) / 16.0F);
    }
  }
  return rows;
}

TEST(Route, ConstantLogitsSelectTheFirstExpertsInOrder) {
  for (const RoutingMethodInfo& info : all_routing_methods()) {
    for (const float logit : {0.0F, 1.5F, -40.0F, 40.0F}) {
      for (const int32_t top_k : {1, 2, 5, 12}) {
        if (info.id == RoutingMethod::kLlama4 && top_k > 1) continue;
        const Routed routed =
            route_row(std::vector<float>(12, logit), config_of(info.id, 12, top_k));
        for (int32_t s = 0; s < top_k; ++s) {
          ASSERT_EQ(routed.ids[static_cast<size_t>(s)], s) << info.name << " " << logit;
        }
      }
    }
  }
}

TEST(Route, NoTokensIsASuccess) {
  for (const RoutingMethodInfo& info : all_routing_methods()) {
    const RoutingConfig config = config_of(info.id, 8, 1);
    const Routing routing{.logits = TensorView::contiguous(nullptr, DType::kF32, {0, 8})};
    EXPECT_TRUE(route_everywhere(routing, config, 0).ids.empty());
    // Rows of the replay buffer beyond T stay as they were.
    EXPECT_EQ(route_everywhere(routing, config, 2).replay, (std::vector<uint16_t>{0xFFFF, 0xFFFF}));
  }
}

TEST(Route, SixteenBitLogitsRouteLikeTheirValuesInFp32) {
  const Rows rows = random_rows(5, 24, 1);
  for (const RoutingMethodInfo& info : all_routing_methods()) {
    const RoutingConfig config = config_of(info.id, 24, 1);
    const Routed wide = route_rows(rows, config);
    for (const DType dtype : {DType::kBF16, DType::kF16}) {
      // Multiples of 1/16 below 4 are exact in both types.
      const Matrix logits = logits_of(dtype, rows);
      EXPECT_EQ(wide, route_everywhere({.logits = logits.view()}, config)) << info.name;
    }
  }
}

TEST(Route, GapsBetweenRowsOfLogitsAreNotRead) {
  const Rows rows = random_rows(7, 9, 2);
  const RoutingConfig config = config_of(RoutingMethod::kDefault, 9, 4);
  const Routed dense = route_rows(rows, config);
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    // Poison is NaN: it would rank first.
    const Matrix logits = logits_of(dtype, rows, 5);
    EXPECT_EQ(dense, route_everywhere({.logits = logits.view()}, config));
  }
}

TEST(Route, ABf16BiasActsLikeItsValuesInFp32) {
  const Rows rows = random_rows(6, 16, 3);
  Random random(4);
  std::vector<float> bias;
  std::vector<uint16_t> codes;
  for (int e = 0; e < 16; ++e) {
    codes.push_back(float_to_bf16(random.normal()));
    bias.push_back(bf16_to_float(codes.back()));
  }
  const Vector narrow = Vector::of(DType::kBF16, codes);
  const Matrix logits = logits_of(DType::kF32, rows);
  for (const auto method : {RoutingMethod::kDeepSeekV3, RoutingMethod::kMiniMax2}) {
    const RoutingConfig config = config_of(method, 16, 5);
    const Routed wide = route_rows(rows, config, bias);
    EXPECT_EQ(wide, route_everywhere({.logits = logits.view(), .bias = narrow.view()}, config));
    EXPECT_NE(wide.ids, route_rows(rows, config).ids) << "the bias changes nothing";
  }
}

TEST(Route, SharedExpertsFollowTheRoutedOnesWithWeightOne) {
  const Rows rows = random_rows(3, 8, 5);
  for (const RoutingMethodInfo& info : all_routing_methods()) {
    RoutingConfig config = config_of(info.id, 8, 1);
    const Routed plain = route_rows(rows, config);
    config.shared_experts = 2;
    const Routed shared = route_rows(rows, config);
    for (int64_t token = 0; token < 3; ++token) {
      EXPECT_EQ(shared.ids_of(token), (Ids{plain.ids_of(token)[0], 8, 9})) << info.name;
      EXPECT_EQ(shared.weights_of(token),
                (std::vector<float>{plain.weights_of(token)[0], 1.0F, 1.0F}));
    }
  }
}

TEST(Route, TheLargestNumberOfExpertsFits) {
  RoutingConfig config = config_of(RoutingMethod::kTopK, 4095, 4095);
  config.shared_experts = 1;
  std::vector<float> logits;
  for (int e = 0; e < 4095; ++e) logits.push_back(static_cast<float>(e));
  const std::vector<int32_t> ids = route_row(logits, config).ids;
  for (int32_t s = 0; s < 4095; ++s) ASSERT_EQ(ids[static_cast<size_t>(s)], 4094 - s);
  EXPECT_EQ(ids.back(), 4095);
}

TEST(Route, WeightsAreRoundedToBf16OnlyWhenAsked) {
  const Rows rows = random_rows(9, 32, 6);
  RoutingConfig config = config_of(RoutingMethod::kRenormalize, 32, 6);
  const Routed exact = route_rows(rows, config);
  config.options.weights_bf16 = true;
  const Routed rounded = route_rows(rows, config);
  EXPECT_EQ(exact.ids, rounded.ids);
  EXPECT_NE(exact.weights, rounded.weights);
  for (size_t i = 0; i < exact.weights.size(); ++i) {
    // To nearest, ties to even, by adding half a unit.
    const uint32_t bits = exact.weights[i];
    EXPECT_EQ(rounded.weights[i], (bits + 0x7FFFU + ((bits >> 16) & 1U)) & 0xFFFF0000U);
  }
}

TEST(Route, ReplayHoldsTheIdsAndLeavesLaterRowsAlone) {
  const Rows rows = random_rows(3, 40, 7);
  const Matrix logits = logits_of(DType::kF32, rows);
  const RoutingConfig config = config_of(RoutingMethod::kSigmoid, 40, 2);
  const Routed routed = route_everywhere({.logits = logits.view()}, config, 5);
  ASSERT_EQ(routed.replay.size(), 10U);
  for (size_t i = 0; i < 10; ++i) {
    EXPECT_EQ(routed.replay[i], i < 6 ? static_cast<uint16_t>(routed.ids[i]) : 0xFFFFU) << i;
  }
}

TEST(Route, ResultsDoNotDependOnTheNumberOfThreads) {
  const Rows rows = random_rows(300, 64, 8);
  const RoutingConfig config = config_of(RoutingMethod::kRenormalize, 64, 8);
  const Routed parallel = route_rows(rows, config);
  const ThreadLimit one(1);
  EXPECT_EQ(parallel, route_rows(rows, config));
}

TEST(Route, ResultsDoNotDependOnTheCallersFloatingPointEnvironment) {
  Rows rows = random_rows(20, 16, 9);
  rows[0][3] = 0x1p-140F;  // Denormal weights of kTopK.
  for (const RoutingMethodInfo& info : all_routing_methods()) {
    const RoutingConfig config = config_of(info.id, 16, 1);
    const Routed normal = route_rows(rows, config);
    for (const unsigned word :
         {kFlushToZero | kDenormalsAreZero, kRoundUp, kRoundDown, kRoundToZero}) {
      const ControlWord control(word);
      EXPECT_EQ(normal, route_rows(rows, config)) << info.name << " " << word;
    }
  }
}

}  // namespace
}  // namespace narrowfloat::testing
