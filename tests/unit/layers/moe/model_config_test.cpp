// Routing and activation from config.json, and what is refused.
#include "layers/moe/model_config.h"

#include <gtest/gtest.h>

#include "support/expect_error.h"

namespace narrowfloat::testing {
namespace {

TEST(MoeModelConfig, ReadsSoftmaxRouters) {
  const MoeModelConfig qwen = read_moe_config(
      R"({"model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8,
          "norm_topk_prob": true, "hidden_act": "silu"})",
      "m");
  EXPECT_EQ(qwen.routing.method, RoutingMethod::kRenormalize);
  EXPECT_EQ(qwen.routing.experts, 128);
  EXPECT_EQ(qwen.routing.top_k, 8);
  EXPECT_EQ(qwen.activation.kind, ActivationKind::kSwiglu);
  const MoeModelConfig olmoe = read_moe_config(
      R"({"model_type": "olmoe", "num_experts": 64, "num_experts_per_tok": 8})", "m");
  EXPECT_EQ(olmoe.routing.method, RoutingMethod::kDefault);
  const MoeModelConfig mixtral = read_moe_config(
      R"({"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2})", "m");
  EXPECT_EQ(mixtral.routing.method, RoutingMethod::kRenormalize);
  EXPECT_EQ(mixtral.routing.experts, 8);
}

TEST(MoeModelConfig, ReadsSigmoidRouters) {
  const MoeModelConfig deepseek = read_moe_config(
      R"({"model_type": "deepseek_v3", "n_routed_experts": 256, "num_experts_per_tok": 8,
          "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "norm_topk_prob": true,
          "scoring_func": "sigmoid"})",
      "m");
  EXPECT_EQ(deepseek.routing.method, RoutingMethod::kDeepSeekV3);
  EXPECT_EQ(deepseek.routing.n_group, 8);
  EXPECT_EQ(deepseek.routing.topk_group, 4);
  EXPECT_EQ(deepseek.routing.routed_scale, 2.5F);
}

TEST(MoeModelConfig, SigmoidRoutersMustBeComplete) {
  expect_error(ErrorKind::kCorruptData, {"n_group", "integer"}, [] {
    (void)read_moe_config(
        R"({"model_type": "deepseek_v3", "n_routed_experts": 256, "num_experts_per_tok": 8,
            "topk_group": 4, "routed_scaling_factor": 2.5})",
        "m");
  });
  expect_error(ErrorKind::kCorruptData, {"routed_scaling_factor", "number"}, [] {
    (void)read_moe_config(
        R"({"model_type": "deepseek_v3", "n_routed_experts": 256, "num_experts_per_tok": 8,
            "n_group": 8, "topk_group": 4})",
        "m");
  });
}

TEST(MoeModelConfig, SaysWhatIsNotKnown) {
  const auto read = [](const char* text) { (void)read_moe_config(text, "dir"); };
  expect_error(ErrorKind::kUnsupported, {"dir/config.json", "model_type", "qwen3_moe", "llama"},
               [&] { read(R"({"model_type": "llama"})"); });
  expect_error(ErrorKind::kUnsupported, {"model_type", "nothing"}, [&] { read("{}"); });
  expect_error(ErrorKind::kUnsupported, {"scoring_func", "softmax"},
               [&] { read(R"({"model_type": "deepseek_v3", "scoring_func": "softmax"})"); });
  expect_error(ErrorKind::kUnsupported, {"norm_topk_prob"},
               [&] { read(R"({"model_type": "deepseek_v3", "norm_topk_prob": false})"); });
  expect_error(ErrorKind::kUnsupported, {"hidden_act", "relu6"}, [&] {
    read(R"({"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2,
             "hidden_act": "relu6"})");
  });
}

TEST(MoeModelConfig, NamesBrokenMembers) {
  const auto read = [](const char* text) { (void)read_moe_config(text, "dir"); };
  expect_error(ErrorKind::kCorruptData, {"num_experts", "integer"},
               [&] { read(R"({"model_type": "qwen3_moe"})"); });
  expect_error(ErrorKind::kCorruptData, {"num_experts", "integer"},
               [&] { read(R"({"model_type": "qwen3_moe", "num_experts": -3})"); });
  expect_error(ErrorKind::kCorruptData, {"norm_topk_prob", "true or false"},
               [&] { read(R"({"model_type": "qwen3_moe", "norm_topk_prob": 1})"); });
  expect_error(ErrorKind::kCorruptData, {"config.json"}, [&] { read(""); });
  expect_error(ErrorKind::kCorruptData, {"config.json"}, [&] { read("[1]"); });
}

}  // namespace
}  // namespace narrowfloat::testing
