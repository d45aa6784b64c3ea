// Every method against the model of route_model.h, over shapes, types and logits on a coarse grid,
// where ties are the rule (moe spec 12.2 G0, 13.2).
#include "route_model.h"

#include <numeric>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "base/host_device.h"
#include "route_call.h"
#include "support/environment.h"
#include "support/random.h"

namespace narrowfloat::testing {
namespace {

struct LogitStyle {
  DType dtype = DType::kF32;
  int32_t steps = 8;  // Grid points on either side of 0.
  float step = 0.25F;
  bool specials = false;
};

float draw(Random& random, const LogitStyle& style) {
  if (style.specials && random.chance(3)) {
    return bits_float(random.pick({0x7F800000U, 0xFF800000U, 0x7FC00000U, 0xFFC00001U, 0x80000000U,
                                   0x00000001U, 0x42000000U, 0xC2000000U}));
  }
  return static_cast<float>(random.range(-style.steps, style.steps)) * style.step;
}

std::vector<float> bias_of(Random& random, const RoutingConfig& config) {
  const bool takes_bias =
      config.method == RoutingMethod::kDeepSeekV3 || config.method == RoutingMethod::kMiniMax2;
  if (!takes_bias || random.chance(20)) return {};
  const float scale = random.pick({0.25F, 0.0625F, -1.0F, 1e4F});
  std::vector<float> bias;
  for (int32_t e = 0; e < config.experts; ++e) {
    bias.push_back(static_cast<float>(random.range(0, 4)) * scale);
  }
  return bias;
}

// Routes `tokens` random rows and compares each with the model.
void compare(const RoutingConfig& config, int64_t tokens, const LogitStyle& style, uint64_t seed) {
  Random random(seed);
  const Matrix logits({.dtype = style.dtype,
                       .rows = tokens,
                       .cols = config.experts,
                       .gap = random.chance(50) ? random.range(1, 9) : 0},
                      {.poison = 0xFF});
  for (int64_t token = 0; token < tokens; ++token) {
    for (int64_t e = 0; e < config.experts; ++e) logits.set(token, e, draw(random, style));
  }
  std::vector<float> bias = bias_of(random, config);
  const Vector bias_vector = Vector::of(DType::kF32, bias);
  Routing routing{.logits = logits.view()};
  if (!bias.empty()) routing.bias = bias_vector.view();
  const Routed routed = route_everywhere(routing, config);
  bias.resize(static_cast<size_t>(config.experts));
  for (int64_t token = 0; token < tokens; ++token) {
    std::vector<float> row;
    for (int64_t e = 0; e < config.experts; ++e) row.push_back(logits.at(token, e));
    const ModelRow expected = model_row(row, bias, config);
    const std::string where =
        fmt::format("{} E {} k {} groups {}/{} token {} seed {}", name(config.method),
                    config.experts, config.top_k, config.n_group, config.topk_group, token, seed);
    ASSERT_EQ(routed.ids_of(token), expected.ids) << where;
    const std::vector<float> weights = routed.weights_of(token);
    for (size_t s = 0; s < weights.size(); ++s) {
      ASSERT_TRUE(weight_matches(config, weights[s], expected.weights[s]))
          << where << " slot " << s << ": " << weights[s] << " for " << expected.weights[s];
    }
  }
}

RoutingConfig sample_config(RoutingMethod method, Random& random) {
  RoutingConfig config{.method = method};
  config.experts = random.pick({1, 3, 8, 8, 16, 32, 32, 72, 90, 96});
  config.top_k =
      static_cast<int32_t>(random.chance(70) ? random.range(1, std::min(8, config.experts))
                                             : random.range(1, config.experts));
  if (method == RoutingMethod::kLlama4) config.top_k = 1;
  if (method == RoutingMethod::kSigmoidRenorm) config.norm_topk = random.chance(50);
  const bool has_groups = method == RoutingMethod::kDeepSeekV3;
  if (has_groups || method == RoutingMethod::kMiniMax2) {
    config.routed_scale = random.pick({1.0F, 2.5F, 2.827F});
  }
  if (has_groups && config.experts % 8 == 0 && random.chance(80)) {
    config.n_group = random.pick({2, 4, config.experts / 2});
    config.topk_group = static_cast<int32_t>(random.range(1, config.n_group));
    const int32_t kept = config.topk_group * (config.experts / config.n_group);
    config.top_k = std::min(config.top_k, kept);
  }
  return config;
}

class RouteAgainstModel : public ::testing::TestWithParam<RoutingMethod> {};

// 10 methods x 50 configurations x 200 rows: 1e5 rows.
TEST_P(RouteAgainstModel, OnACoarseGrid) {
  Random random(100 + static_cast<uint64_t>(GetParam()));
  for (int i = 0; i < 50; ++i) {
    const LogitStyle style{.dtype = random.pick({DType::kF32, DType::kBF16, DType::kF16}),
                           .steps = random.pick({0, 1, 8, 80}),
                           .step = random.pick({0.25F, 1.0F}),
                           .specials = random.chance(30)};
    compare(sample_config(GetParam(), random), 200, style, random.bits());
    if (HasFatalFailure()) return;
  }
}

TEST_P(RouteAgainstModel, OnFineLogits) {
  Random random(200 + static_cast<uint64_t>(GetParam()));
  for (int i = 0; i < 10; ++i) {
    const LogitStyle style{.steps = 1 << 22, .step = random.pick({0x1p-22F, 0x1p-18F})};
    compare(sample_config(GetParam(), random), 50, style, random.bits());
    if (HasFatalFailure()) return;
  }
}

// Expert counts of real models and odd ones, with few and many selected.
TEST_P(RouteAgainstModel, AtEveryExpertCount) {
  Random random(300 + static_cast<uint64_t>(GetParam()));
  for (const int32_t experts : {1, 2, 3, 72, 90, 96, 128, 160, 256, 384, 512, 4096}) {
    for (const int32_t top_k : {1, 2, 6, 8, 22, experts}) {
      if (top_k > experts || (top_k > 22 && experts > 512)) continue;
      RoutingConfig config{.method = GetParam(), .experts = experts, .top_k = top_k};
      if (GetParam() == RoutingMethod::kLlama4) config.top_k = 1;
      compare(config, 3, {.steps = 40}, random.bits());
      if (HasFatalFailure()) return;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, RouteAgainstModel, ::testing::ValuesIn([] {
                           std::vector<RoutingMethod> methods;
                           for (const RoutingMethodInfo& method : all_routing_methods())
                             methods.push_back(method.id);
                           return methods;
                         }()),
                         [](const auto& test) { return std::string(name(test.param)); });

TEST(RouteModelShapes, GroupsOfRealModels) {
  for (const auto& [experts, top_k, groups, kept] :
       {std::array{256, 8, 8, 4}, std::array{512, 22, 16, 4}, std::array{256, 128, 8, 4},
        std::array{4096, 8, 2048, 7}, std::array{96, 6, 3, 2}}) {
    RoutingConfig config{.method = RoutingMethod::kDeepSeekV3,
                         .experts = experts,
                         .top_k = top_k,
                         .n_group = groups,
                         .topk_group = kept,
                         .routed_scale = 2.5F};
    compare(config, 20, {.dtype = DType::kBF16, .steps = 12}, 41);
    compare(config, 20, {.steps = 1 << 20, .step = 0x1p-18F}, 42);
  }
}

TEST(RouteModelShapes, EveryKIsAPrefixOfTheFullOrder) {
  Random random(7);
  Rows rows(4);
  for (auto& row : rows) {
    for (int e = 0; e < 24; ++e) row.push_back(static_cast<float>(random.range(-3, 3)));
  }
  for (const RoutingMethodInfo& info : all_routing_methods()) {
    if (info.id == RoutingMethod::kLlama4) continue;
    RoutingConfig config{.method = info.id, .experts = 24, .top_k = 24};
    const Routed all = route_rows(rows, config);
    for (config.top_k = 1; config.top_k <= 24; ++config.top_k) {
      const Routed some = route_rows(rows, config);
      for (int64_t token = 0; token < 4; ++token) {
        std::vector<int32_t> prefix = all.ids_of(token);
        prefix.resize(static_cast<size_t>(config.top_k));
        ASSERT_EQ(some.ids_of(token), prefix) << info.name << " k " << config.top_k;
      }
    }
  }
}

TEST(RouteModelShapes, WeightsAddUpToWhatTheMethodPromises) {
  Random random(8);
  Rows rows(16);
  for (auto& row : rows) {
    for (int e = 0; e < 64; ++e) row.push_back(random.normal() * 3);
  }
  for (const RoutingMethodInfo& info : all_routing_methods()) {
    RoutingConfig config{.method = info.id, .experts = 64, .top_k = 8};
    const bool is_scaled =
        info.id == RoutingMethod::kDeepSeekV3 || info.id == RoutingMethod::kMiniMax2;
    const bool sums_to_one = info.id == RoutingMethod::kRenormalize ||
                             info.id == RoutingMethod::kRenormalizeNaive ||
                             info.id == RoutingMethod::kSigmoidRenorm;
    if (!is_scaled && !sums_to_one && info.id != RoutingMethod::kDefault) continue;
    if (is_scaled) config.routed_scale = 2.5F;
    const Routed routed = route_rows(rows, config);
    for (int64_t token = 0; token < 16; ++token) {
      const std::vector<float> weights = routed.weights_of(token);
      const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
      if (info.id == RoutingMethod::kDefault) {
        EXPECT_LT(sum, 1.0);
        EXPECT_GT(sum, 0.0);
      } else {
        EXPECT_NEAR(sum, is_scaled ? 2.5 : 1.0, 1e-6) << info.name;
      }
    }
  }
}

}  // namespace
}  // namespace narrowfloat::testing
