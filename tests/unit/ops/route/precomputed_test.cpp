// Routings that were made elsewhere: packed, or ids with weights (moe spec 1.7, 4.5).
#include <limits>

#include <gtest/gtest.h>

#include "base/host_device.h"
#include "formats/float16.h"
#include "narrowfloat/error.h"
#include "route_call.h"
#include "support/expect_error.h"
#include "support/random.h"

namespace narrowfloat::testing {
namespace {

RoutingConfig precomputed_config(int32_t experts, int32_t top_k) {
  return {.method = RoutingMethod::kRenormalize, .experts = experts, .top_k = top_k};
}

int32_t pack(int32_t id, uint16_t weight) {
  return static_cast<int32_t>((static_cast<uint32_t>(id) << 16) | weight);
}

Routed route_packed(const Ids& packed, const RoutingConfig& config) {
  const Vector values = Vector::of(DType::kI32, packed);
  return route_everywhere({.packed = matrix_view(values, DType::kI32, config.top_k)}, config);
}

Routed route_ids(const Ids& ids, const std::vector<float>& weights, const RoutingConfig& config) {
  const Vector id_values = Vector::of(DType::kI32, ids);
  const Vector weight_values = Vector::of(DType::kF32, weights);
  Routing routing{.ids = matrix_view(id_values, DType::kI32, config.top_k)};
  if (!weights.empty()) routing.weights = matrix_view(weight_values, DType::kF32, config.top_k);
  return route_everywhere(routing, config);
}

TEST(RoutePacked, SplitsIdAndWeight) {
  const Ids packed{pack(3, 0x3F80), pack(0, 0x3F00), pack(7, 0), pack(3, 0x0001)};
  const Routed routed = route_packed(packed, precomputed_config(8, 2));
  EXPECT_EQ(routed.ids, (Ids{3, 0, 7, 3}));
  EXPECT_EQ(routed.weights, (Bits{0x3F800000U, 0x3F000000U, 0, 0x00010000U}));
}

TEST(RoutePacked, ANegativeWeightLeavesTheIdAlone) {
  const Ids packed{pack(5, 0xBF80), pack(4095, 0x8000)};
  const Routed routed = route_packed(packed, precomputed_config(4096, 1));
  EXPECT_EQ(routed.ids, (Ids{5, 4095}));
  EXPECT_EQ(routed.weights, (Bits{0xBF800000U, 0x80000000U}));
}

TEST(RouteIds, KeepWeightsAsTheyAre) {
  const std::vector<float> weights{-1.5F,     0.0F,  -0.0F,
                                   0x1p-149F, 1e30F, std::numeric_limits<float>::infinity()};
  const Routed routed = route_ids({0, 1, 2, 2, 1, 1}, weights, precomputed_config(3, 3));
  EXPECT_EQ(routed.ids, (Ids{0, 1, 2, 2, 1, 1}));
  for (size_t i = 0; i < weights.size(); ++i) EXPECT_EQ(routed.weights[i], float_bits(weights[i]));
}

TEST(RouteIds, WithoutWeightsWeighOne) {
  const Routed routed = route_ids({1, 0}, {}, precomputed_config(2, 2));
  EXPECT_EQ(routed.weights_of(0), (std::vector<float>{1, 1}));
}

TEST(RouteIds, TakeBf16WeightsToo) {
  const Vector ids = Vector::of(DType::kI32, Ids{1, 0});
  const Vector weights = Vector::of(DType::kBF16, std::vector<uint16_t>{0x3E80, 0xC000});
  const Routed routed = route_everywhere(
      {.ids = matrix_view(ids, DType::kI32, 2), .weights = matrix_view(weights, DType::kBF16, 2)},
      precomputed_config(2, 2));
  EXPECT_EQ(routed.weights_of(0), (std::vector<float>{0.25F, -2.0F}));
}

TEST(RouteIds, TakeIdsOf64BitsAndRefuseWhatIsBeyond32) {
  const Vector ids = Vector::of(DType::kI64, std::vector<int64_t>{1, 0});
  const Routed routed =
      route_everywhere({.ids = matrix_view(ids, DType::kI64, 2)}, precomputed_config(2, 2));
  EXPECT_EQ(routed.ids, (Ids{1, 0}));
  // The lower 32 bits of each are an id, or -1.
  for (const int64_t id : {int64_t{1} << 32, -(int64_t{1} << 40), int64_t{0xFFFFFFFF}}) {
    const Vector wide = Vector::of(DType::kI64, std::vector<int64_t>{1, id});
    RoutingConfig config = precomputed_config(2, 2);
    config.options.negative_one_is_empty = true;
    expect_error(ErrorKind::kInvalidArgument,
                 {"routing.ids: expected expert ids from 0 to 1 or -1, got " + std::to_string(id) +
                  " at index 1 (token 0)"},
                 [&] { route_everywhere({.ids = matrix_view(wide, DType::kI64, 2)}, config); });
  }
}

TEST(RouteIds, RoundWeightsToBf16OnlyWhenAsked) {
  RoutingConfig config = precomputed_config(4, 2);
  const std::vector<float> weights{1 + 0x1p-8F, 1 + 0x1.8p-7F};  // Both ties.
  EXPECT_EQ(route_ids({0, 1}, weights, config).weights_of(0), weights);
  config.options.weights_bf16 = true;
  EXPECT_EQ(route_ids({0, 1}, weights, config).weights_of(0),
            (std::vector<float>{1.0F, 1 + 0x1p-6F}));
}

TEST(RoutePrecomputed, MethodScaleAndNormHaveNoEffect) {
  const Ids ids{2, 0, 1, 3};
  const std::vector<float> weights{0.25F, 3, -1, 0};
  const Routed expected = route_ids(ids, weights, precomputed_config(8, 2));
  RoutingConfig grouped{.method = RoutingMethod::kDeepSeekV3,
                        .experts = 8,
                        .top_k = 2,
                        .n_group = 4,
                        .topk_group = 1,
                        .routed_scale = 2.5F};
  grouped.options.grouped_bias_bf16 = true;
  EXPECT_EQ(route_ids(ids, weights, grouped), expected);
  const RoutingConfig plain_sigmoid{
      .method = RoutingMethod::kSigmoidRenorm, .experts = 8, .top_k = 2, .norm_topk = false};
  EXPECT_EQ(route_ids(ids, weights, plain_sigmoid), expected);
}

TEST(RoutePrecomputed, SharedExpertsAreAppended) {
  RoutingConfig config = precomputed_config(4, 1);
  config.shared_experts = 2;
  const Routed routed = route_ids({3, 0}, {0.5F, 0.25F}, config);
  EXPECT_EQ(routed.ids, (Ids{3, 4, 5, 0, 4, 5}));
  EXPECT_EQ(routed.weights_of(1), (std::vector<float>{0.25F, 1, 1}));
}

TEST(RoutePrecomputed, ReplayRepeatsTheIdsEmptyOnesIncluded) {
  RoutingConfig config = precomputed_config(4, 2);
  config.options.negative_one_is_empty = true;
  const Vector ids = Vector::of(DType::kI32, Ids{3, -1});
  const Routed routed =
      route_everywhere({.ids = matrix_view(ids, DType::kI32, 2)}, config, /*replay_rows=*/2);
  EXPECT_EQ(routed.replay, (std::vector<uint16_t>{3, 0xFFFF, 0xFFFF, 0xFFFF}));
}

TEST(RoutePrecomputed, MinusOneIsAnEmptySlotOnlyWhenAllowed) {
  RoutingConfig config = precomputed_config(4, 2);
  const Ids ids{2, -1};
  const std::vector<float> weights{0.5F, 7};
  const Ids packed{pack(2, 0x3F00), pack(-1, 0x40E0)};
  expect_error(ErrorKind::kInvalidArgument, {"routing.ids", "0 to 3", "got -1", "index 1"},
               [&] { route_ids(ids, weights, config); });
  expect_error(ErrorKind::kInvalidArgument, {"routing.packed", "0 to 3", "got -1", "index 1"},
               [&] { route_packed(packed, config); });
  config.options.negative_one_is_empty = true;
  EXPECT_EQ(route_ids(ids, weights, config).ids, ids);
  EXPECT_EQ(route_ids(ids, weights, config).weights_of(0), weights);
  EXPECT_EQ(route_packed(packed, config), route_ids(ids, weights, config));
}

TEST(RoutePrecomputed, IdsOutOfRangeAreRefusedBeforeAnythingIsWritten) {
  for (const bool allows_empty : {false, true}) {
    for (const int32_t id : {4, 5, -2, 32767, 65536, std::numeric_limits<int32_t>::min(),
                             std::numeric_limits<int32_t>::max()}) {
      RoutingConfig config = precomputed_config(4, 2);
      config.options.negative_one_is_empty = allows_empty;
      config.shared_experts = 1;  // Id 4 exists, but not as a routed expert.
      const Vector ids = Vector::of(DType::kI32, Ids{0, 1, 2, id, 9, 9});
      const GuardedBuffer out_ids(36, {.poison = 0xFF});
      const GuardedBuffer out_weights(36, {.poison = 0xFF});
      const RouteOutputs outputs{
          .ids = TensorView::contiguous(out_ids.data(), DType::kI32, {3, 3}),
          .weights = TensorView::contiguous(out_weights.data(), DType::kF32, {3, 3})};
      expect_error(ErrorKind::kInvalidArgument,
                   {"routing.ids", "0 to 3", "got " + std::to_string(id), "index 3", "token 1"},
                   [&] { route({.ids = matrix_view(ids, DType::kI32, 2)}, config, outputs); });
      EXPECT_EQ(out_ids.copy(), std::vector<uint8_t>(36, 0xFF));
      EXPECT_EQ(out_weights.copy(), std::vector<uint8_t>(36, 0xFF));
    }
  }
}

TEST(RoutePacked, IdsOutOfRangeAreRefused) {
  for (const int32_t id : {8, 32767, -2, -32768}) {
    expect_error(
        ErrorKind::kInvalidArgument,
        {"routing.packed", "0 to 7", "got " + std::to_string(id), "index 2"}, [&] {
          route_packed({pack(0, 1), pack(7, 1), pack(id, 0xBF80)}, precomputed_config(8, 1));
        });
  }
}

TEST(RoutePrecomputed, NoTokensIsASuccess) {
  const RoutingConfig config = precomputed_config(8, 2);
  const TensorView none = TensorView::contiguous(nullptr, DType::kI32, {0, 2});
  EXPECT_TRUE(route_everywhere({.packed = none}, config).ids.empty());
  EXPECT_TRUE(route_everywhere({.ids = none}, config).ids.empty());
}

TEST(RoutePrecomputed, AgreesWithLogitsToTheBit) {
  Random random(11);
  for (const RoutingMethodInfo& info : all_routing_methods()) {
    RoutingConfig config{.method = info.id, .experts = 32, .top_k = 4};
    if (info.id == RoutingMethod::kLlama4) config.top_k = 1;
    config.options.weights_bf16 = true;
    Rows rows(10, std::vector<float>(32));
    for (auto& row : rows) {
      for (float& x : row) x = random.normal();
    }
    rows[0].assign(32, bits_float(0x7FC00000U));
    const Routed from_logits = route_rows(rows, config);
    Ids packed;
    std::vector<float> weights;
    for (size_t i = 0; i < from_logits.ids.size(); ++i) {
      weights.push_back(bits_float(from_logits.weights[i]));
      packed.push_back(pack(from_logits.ids[i], float_to_bf16(weights.back())));
    }
    EXPECT_EQ(from_logits, route_packed(packed, config)) << info.name;
    EXPECT_EQ(from_logits, route_ids(from_logits.ids, weights, config)) << info.name;
    config.options.weights_bf16 = false;
    EXPECT_EQ(from_logits, route_packed(packed, config)) << info.name;
  }
}

}  // namespace
}  // namespace narrowfloat::testing
