// Which tensor names are expert weights, and what of a layer must be there.
#include "layers/moe/expert_names.h"

#include <gtest/gtest.h>

#include "support/expect_error.h"

namespace narrowfloat::testing {
namespace {

TEST(ExpertNames, ReadsBothSpellings) {
  const auto qwen = parse_expert_name("model.layers.12.mlp.experts.3.up_proj.weight");
  ASSERT_TRUE(qwen);
  EXPECT_EQ(qwen->block, "model.layers.12.mlp");
  EXPECT_EQ(qwen->layer, 12);
  EXPECT_EQ(qwen->expert, 3);
  EXPECT_EQ(qwen->matrix, ExpertMatrix::kUp);
  const auto mixtral = parse_expert_name("model.layers.0.block_sparse_moe.experts.7.w2.weight");
  ASSERT_TRUE(mixtral);
  EXPECT_EQ(mixtral->block, "model.layers.0.block_sparse_moe");
  EXPECT_EQ(mixtral->matrix, ExpertMatrix::kDown);
  // Mixtral's w3 is the up matrix, w1 the gate.
  EXPECT_EQ(parse_expert_name("layers.1.block_sparse_moe.experts.0.w3.weight")->matrix,
            ExpertMatrix::kUp);
  EXPECT_EQ(parse_expert_name("layers.1.block_sparse_moe.experts.0.w1.weight")->matrix,
            ExpertMatrix::kGate);
}

TEST(ExpertNames, IgnoresEverythingElse) {
  for (const char* name :
       {"model.layers.0.mlp.gate.weight", "model.layers.0.mlp.up_proj.weight",
        "model.layers.0.mlp.shared_experts.up_proj.weight", "layers.0.mlp.experts.1.w1.weight",
        "layers.0.block_sparse_moe.experts.1.up_proj.weight", "layers.0.mlp.experts.1.up_proj.bias",
        "layers.x.mlp.experts.1.up_proj.weight", "layers.0.mlp.experts.-1.up_proj.weight",
        "layers.0.mlp.experts.1x.up_proj.weight", "mlp.experts.1.up_proj.weight",
        "blocks.0.mlp.experts.1.up_proj.weight", "weight", "", ".weight",
        "layers.0.mlp.experts.99999999999999999999.up_proj.weight"}) {
    EXPECT_FALSE(parse_expert_name(name)) << name;
  }
}

TEST(ExpertNames, ReadsStackedSpellings) {
  const auto hugging_face = parse_stacked_name("model.layers.12.mlp.experts.gate_up_proj");
  ASSERT_TRUE(hugging_face);
  EXPECT_EQ(hugging_face->block, "model.layers.12.mlp");
  EXPECT_EQ(hugging_face->layer, 12);
  EXPECT_FALSE(hugging_face->is_down);
  EXPECT_TRUE(hugging_face->is_transposed);
  EXPECT_TRUE(parse_stacked_name("layers.0.feed_forward.experts.down_proj")->is_down);
  const auto original = parse_stacked_name("block.3.mlp.mlp2_weight");
  ASSERT_TRUE(original);
  EXPECT_EQ(original->block, "block.3.mlp");
  EXPECT_EQ(original->layer, 3);
  EXPECT_TRUE(original->is_down);
  EXPECT_FALSE(original->is_transposed);
  for (const char* name :
       {"model.layers.0.mlp.experts.gate_up_proj_bias", "model.layers.0.mlp.gate_up_proj",
        "model.layers.x.mlp.experts.down_proj", "layers.0.attn.experts.down_proj",
        "blocks.0.mlp.experts.down_proj", "block.0.mlp.mlp1_bias", "block.x.mlp.mlp1_weight",
        "block.0.attn.mlp1_weight", "layers.0.mlp.mlp1_weight", "down_proj", "mlp1_weight", ""}) {
    EXPECT_FALSE(parse_stacked_name(name)) << name;
  }
  EXPECT_EQ(stacked_bias_name("a.experts.down_proj"), "a.experts.down_proj_bias");
  EXPECT_EQ(stacked_bias_name("block.0.mlp.mlp1_weight"), "block.0.mlp.mlp1_bias");
}

TEST(ExpertNames, ReadsDeepSeeksOwnSpelling) {
  const auto expert = parse_expert_name("layers.7.ffn.experts.20.w3.weight");
  ASSERT_TRUE(expert);
  EXPECT_EQ(expert->block, "layers.7.ffn");
  EXPECT_EQ(expert->matrix, ExpertMatrix::kUp);
}

std::vector<LogicalTensor> experts_of_layer(int64_t layer, int64_t count) {
  std::vector<LogicalTensor> tensors;
  for (int64_t expert = 0; expert < count; ++expert) {
    for (const char* matrix : {"down_proj", "gate_proj", "up_proj"}) {
      LogicalTensor tensor;
      tensor.name = "model.layers." + std::to_string(layer) + ".mlp.experts." +
                    std::to_string(expert) + "." + matrix + ".weight";
      tensors.push_back(tensor);
    }
  }
  return tensors;
}

TEST(ExpertNames, FindsTheMatricesOfALayer) {
  const std::vector<LogicalTensor> tensors = experts_of_layer(4, 12);
  const LayerExperts experts = layer_experts(tensors, 4, "m");
  EXPECT_EQ(experts.block, "model.layers.4.mlp");
  ASSERT_EQ(experts.experts.size(), 12U);
  EXPECT_EQ(experts.experts[10][static_cast<size_t>(ExpertMatrix::kDown)]->name,
            "model.layers.4.mlp.experts.10.down_proj.weight");
  EXPECT_EQ(experts.experts[2][static_cast<size_t>(ExpertMatrix::kGate)]->name,
            "model.layers.4.mlp.experts.2.gate_proj.weight");
}

TEST(ExpertNames, NamesTheLayersThereAre) {
  const std::vector<LogicalTensor> tensors = experts_of_layer(4, 2);
  expect_error(ErrorKind::kInvalidArgument, {"m", "layer 5", "4"},
               [&] { (void)layer_experts(tensors, 5, "m"); });
}

TEST(ExpertNames, RefusesGaps) {
  std::vector<LogicalTensor> tensors = experts_of_layer(0, 3);
  tensors.erase(tensors.begin() + 4);  // The gate of expert 1.
  expect_error(ErrorKind::kCorruptData, {"expert 1", "gate"},
               [&] { (void)layer_experts(tensors, 0, "m"); });
  tensors = experts_of_layer(0, 1);
  tensors[0].name = "model.layers.0.mlp.experts.4000000000.down_proj.weight";
  expect_error(ErrorKind::kCorruptData, {"4000000000", "gaps"},
               [&] { (void)layer_experts(tensors, 0, "m"); });
}

}  // namespace
}  // namespace narrowfloat::testing
