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
      R"({"model_type": "olmoe", "num_local_experts": 64, "num_experts_per_tok": 8})", "m");
  EXPECT_EQ(olmoe.routing.method, RoutingMethod::kDefault);
  EXPECT_EQ(olmoe.routing.experts, 64);
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

TEST(MoeModelConfig, ReadsMiniMax) {
  const MoeModelConfig model = read_moe_config(
      R"({"model_type": "minimax_m2", "num_local_experts": 256, "num_experts_per_tok": 8,
          "scoring_func": "sigmoid", "routed_scaling_factor": 1.5})",
      "m");
  EXPECT_EQ(model.routing.method, RoutingMethod::kMiniMax2);
  EXPECT_EQ(model.routing.experts, 256);
  EXPECT_EQ(model.routing.routed_scale, 1.5F);
  EXPECT_FALSE(model.stacked_order);
  const auto read = [](const char* text) { (void)read_moe_config(text, "dir"); };
  expect_error(ErrorKind::kUnsupported, {"use_routing_bias", "false"},
               [&] { read(R"({"model_type": "minimax_m2", "use_routing_bias": false})"); });
  expect_error(ErrorKind::kUnsupported, {"scoring_func", "softmax"},
               [&] { read(R"({"model_type": "minimax_m2", "scoring_func": "softmax"})"); });
}

TEST(MoeModelConfig, ReadsGptOssOfBothConfigs) {
  for (const char* text :
       {R"({"model_type": "gpt_oss", "hidden_act": "silu", "num_local_experts": 128,
            "num_experts_per_tok": 4, "experts_per_token": 4})",
        R"({"num_hidden_layers": 36, "num_experts": 128, "experts_per_token": 4})"}) {
    const MoeModelConfig model = read_moe_config(text, "m");
    EXPECT_EQ(model.routing.method, RoutingMethod::kRenormalize);
    EXPECT_EQ(model.routing.experts, 128);
    EXPECT_EQ(model.routing.top_k, 4);
    EXPECT_EQ(model.activation.alpha.value, 1.702F);
    EXPECT_EQ(model.activation.beta.value, 1.0F);
    EXPECT_EQ(model.activation.limit_gate.value, 7.0F);
    EXPECT_EQ(model.activation.limit_up.value, 7.0F);
    EXPECT_TRUE(model.has_logit_bias);
    EXPECT_EQ(model.stacked_order, GateOrder::kInterleaved);
  }
  expect_error(ErrorKind::kCorruptData, {"swiglu_limit", "number"}, [] {
    (void)read_moe_config(R"({"num_experts": 128, "experts_per_token": 4, "swiglu_limit": "high"})",
                          "m");
  });
}

TEST(MoeModelConfig, ReadsLlama4InItsTextConfig) {
  const MoeModelConfig model = read_moe_config(
      R"({"model_type": "llama4", "text_config": {"model_type": "llama4_text",
          "num_local_experts": 16, "num_experts_per_tok": 1}})",
      "m");
  EXPECT_EQ(model.routing.method, RoutingMethod::kLlama4);
  EXPECT_EQ(model.routing.experts, 16);
  EXPECT_TRUE(model.weight_on_input);
  EXPECT_EQ(model.stacked_order, GateOrder::kGateUp);
  expect_error(ErrorKind::kUnsupported, {"num_experts_per_tok", "expected 1", "got 2"}, [] {
    (void)read_moe_config(
        R"({"model_type": "llama4_text", "num_local_experts": 16, "num_experts_per_tok": 2})", "m");
  });
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
