// Names and limits of the routing methods (moe spec 1.8, 4.2, 4.3).
#include <limits>
#include <set>
#include <string>

#include <gtest/gtest.h>

#include "narrowfloat/route.h"
#include "route_call.h"
#include "support/expect_error.h"

namespace narrowfloat::testing {
namespace {

void expect_refused(const RoutingConfig& config, const std::vector<std::string>& fragments) {
  expect_error(ErrorKind::kInvalidArgument, fragments, [&] { check_routing_config(config); });
}

TEST(RoutingMethods, AreTenInTheOrderOfTheirNumbers) {
  ASSERT_EQ(all_routing_methods().size(), 10U);
  int number = 0;
  for (const RoutingMethodInfo& info : all_routing_methods()) {
    EXPECT_EQ(static_cast<int>(info.id), number++) << info.name;
  }
}

TEST(RoutingMethods, HaveNamesThatParseBack) {
  std::set<std::string_view> names;
  for (const RoutingMethodInfo& info : all_routing_methods()) {
    EXPECT_EQ(name(info.id), info.name);
    EXPECT_EQ(parse_routing_method(info.name), info.id);
    EXPECT_FALSE(info.description.empty()) << info.name;
    names.insert(info.name);
  }
  EXPECT_EQ(names.size(), all_routing_methods().size());
  EXPECT_EQ(parse_routing_method("deepseek_v3"), RoutingMethod::kDeepSeekV3);
  EXPECT_EQ(parse_routing_method("topk"), RoutingMethod::kTopK);
}

TEST(RoutingMethods, AnUnknownNameListsTheAcceptedOnes) {
  expect_error(ErrorKind::kInvalidArgument, {"default", "renormalize", "minimax2", "\"softmax\""},
               [] { parse_routing_method("softmax"); });
  expect_error(ErrorKind::kInvalidArgument, {"routing method", "10"},
               [] { (void)name(static_cast<RoutingMethod>(10)); });
}

TEST(RoutingConfigChecks, TakeWhateverLiesWithinTheLimits) {
  for (const RoutingMethodInfo& info : all_routing_methods()) {
    EXPECT_NO_THROW(check_routing_config(config_of(info.id, 1, 1))) << info.name;
    EXPECT_NO_THROW(check_routing_config(config_of(info.id, 4096, 1))) << info.name;
    RoutingConfig ungrouped = config_of(info.id, 7, 1);
    ungrouped.n_group = ungrouped.topk_group = 0;
    EXPECT_NO_THROW(check_routing_config(ungrouped)) << info.name;
    if (info.id == RoutingMethod::kLlama4) continue;
    EXPECT_NO_THROW(check_routing_config(config_of(info.id, 4096, 4096))) << info.name;
  }
  EXPECT_NO_THROW(check_routing_config(grouped(256, 8, 8, 4)));
  EXPECT_NO_THROW(check_routing_config(grouped(256, 128, 8, 4)));  // Every expert that is kept.
  EXPECT_NO_THROW(check_routing_config(grouped(4096, 1, 2048, 2048)));
  RoutingConfig shared = config_of(RoutingMethod::kRenormalize, 4000, 8);
  shared.shared_experts = 96;
  EXPECT_NO_THROW(check_routing_config(shared));
}

TEST(RoutingConfigChecks, RefuseCountsOutOfRange) {
  const auto method = RoutingMethod::kRenormalize;
  expect_refused(config_of(method, 0, 1), {"config.experts", "1 to 4096", "got 0"});
  expect_refused(config_of(method, 4097, 1), {"config.experts", "got 4097"});
  expect_refused(config_of(method, 8, 0), {"config.top_k", "got 0"});
  expect_refused(config_of(method, 8, 9), {"config.top_k", "8", "got 9"});
  RoutingConfig shared = config_of(method, 4000, 1);
  shared.shared_experts = 97;
  expect_refused(shared, {"config.shared_experts", "0 to 96", "4096", "got 97"});
  shared.shared_experts = -1;
  expect_refused(shared, {"config.shared_experts", "got -1"});
  shared.shared_experts = std::numeric_limits<int32_t>::max();
  expect_refused(shared, {"config.shared_experts", "got 2147483647"});
  expect_refused(config_of(static_cast<RoutingMethod>(10), 8, 1), {"routing method", "10"});
}

TEST(RoutingConfigChecks, RefuseGroupsThatDoNotWork) {
  expect_refused(grouped(256, 8, 7, 1), {"config.n_group", "256", "got 7"});
  expect_refused(grouped(256, 8, 256, 8), {"config.n_group", "at least 2", "got 256"});
  expect_refused(grouped(256, 8, -1, 1), {"config.n_group", "got -1"});
  expect_refused(grouped(256, 8, 8, 0), {"config.topk_group", "1 to n_group = 8", "got 0"});
  expect_refused(grouped(256, 8, 8, 9), {"config.topk_group", "got 9"});
  expect_refused(grouped(256, 8, 8, -4), {"config.topk_group", "got -4"});
  expect_refused(grouped(256, 8, 1, 2), {"config.topk_group", "without groups", "got 2"});
  expect_refused(grouped(256, 8, 0, 2), {"config.topk_group", "without groups", "got 2"});
  expect_refused(grouped(256, 129, 8, 4), {"config.top_k", "at most 128", "4 groups of 32", "129"});
}

TEST(RoutingConfigChecks, RefuseWhatTheMethodWouldIgnore) {
  for (const RoutingMethodInfo& info : all_routing_methods()) {
    const bool has_groups = info.id == RoutingMethod::kDeepSeekV3;
    const bool has_scale = has_groups || info.id == RoutingMethod::kMiniMax2;
    const std::string method(info.name);
    RoutingConfig config = config_of(info.id, 8, 1);
    config.n_group = config.topk_group = 2;
    if (!has_groups) expect_refused(config, {"config.n_group", method, "got 2"});
    config.n_group = 1;
    if (!has_groups) expect_refused(config, {"config.topk_group", method, "got 2"});
    config = config_of(info.id, 8, 1);
    config.routed_scale = 2.5F;
    if (has_scale) {
      EXPECT_NO_THROW(check_routing_config(config)) << method;
    } else {
      expect_refused(config, {"config.routed_scale", method, "got 2.5"});
    }
    config.routed_scale = std::numeric_limits<float>::infinity();
    expect_refused(config, {"config.routed_scale", "finite", "inf"});
    config = config_of(info.id, 8, 1);
    config.norm_topk = false;
    if (info.id == RoutingMethod::kSigmoidRenorm) {
      EXPECT_NO_THROW(check_routing_config(config)) << method;
    } else {
      expect_refused(config, {"config.norm_topk", method, "got false"});
    }
  }
  expect_refused(config_of(RoutingMethod::kLlama4, 8, 2), {"config.top_k", "llama4", "got 2"});
}

}  // namespace
}  // namespace narrowfloat::testing
