// Which tensors are quantized by default and by request, and which share a global scale.
#include "layers/selection.h"

#include "unit/layers/model_files.h"

namespace narrowfloat {
namespace {

LogicalTensor plain(const std::string& name, std::vector<int64_t> shape,
                    DType dtype = DType::kBF16) {
  LogicalTensor tensor;
  tensor.name = name;
  tensor.shape = std::move(shape);
  tensor.dtype = dtype;
  return tensor;
}

Selection select_one(const LogicalTensor& tensor, const SelectionRules& rules = {}) {
  return select_tensors(std::span(&tensor, 1), rules).front();
}

TEST(Selection, TakesLinearWeightsAndExperts) {
  for (const char* name :
       {"model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.gate_proj.weight",
        "model.layers.0.mlp.experts.11.down_proj.weight", "block_sparse_moe.experts.0.w1.weight",
        "transformer.h.0.attention.output.dense.weight", "net.0.weight"}) {
    EXPECT_TRUE(select_one(plain(name, {64, 64})).quantize) << name;
  }
}

TEST(Selection, LeavesOtherModulesAlone) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"model.embed_tokens.weight", "embedding"},
      {"transformer.wte.weight", "embedding"},
      {"model.layers.0.input_layernorm.weight", "norm"},
      {"model.layers.0.mlp.gate.weight", "router"},
      {"model.layers.0.block_sparse_moe.gate.weight", "router"},
      {"model.layers.0.mlp.router.weight", "router"},
      {"model.layers.0.mlp.shared_expert_gate.weight", "router"},
      {"lm_head.weight", "output head"},
      {"output.weight", "output head"},
      {"vision.patch_conv.weight", "convolution"},
  };
  for (const auto& [name, reason] : cases) {
    const Selection selection = select_one(plain(name, {64, 64}));
    EXPECT_FALSE(selection.quantize) << name;
    EXPECT_EQ(selection.reason, reason) << name;
  }
}

TEST(Selection, LeavesWhatTheFormatCannotHold) {
  const std::string name = "layers.0.up_proj.weight";
  EXPECT_EQ(select_one(plain(name, {64, 24})).reason, "K = 24 is not a multiple of 16");
  EXPECT_EQ(select_one(plain(name, {64, 48}), {.format = FormatId::kMxfp4}).reason,
            "K = 48 is not a multiple of 32");
  EXPECT_TRUE(select_one(plain(name, {3, 48}), {.format = FormatId::kFp8Block128x128}).quantize);
  EXPECT_EQ(select_one(plain(name, {64})).reason, "rank 1");
  EXPECT_EQ(select_one(plain(name, {2, 64, 64})).reason,
            "rank 3 (stacked experts are not supported yet)");
  EXPECT_EQ(select_one(plain(name, {64, 64}, DType::kI8)).reason, "dtype I8");
  EXPECT_EQ(select_one(plain(name, {0, 64})).reason, "empty");
  EXPECT_EQ(select_one(plain("layers.0.A_log", {64, 64})).reason, "not named *.weight");
}

TEST(Selection, OnlyLinearModulesGoOnTheIgnoreList) {
  EXPECT_TRUE(select_one(plain("lm_head.weight", {64, 64})).is_linear);
  EXPECT_TRUE(select_one(plain("layers.0.mlp.gate.weight", {4, 64})).is_linear);
  EXPECT_TRUE(select_one(plain("layers.0.up_proj.weight", {64, 24})).is_linear);
  EXPECT_FALSE(select_one(plain("model.embed_tokens.weight", {64, 64})).is_linear);
  EXPECT_FALSE(select_one(plain("model.norm.weight", {64})).is_linear);
}

TEST(Selection, IncludesAddAndExcludesWin) {
  const LogicalTensor head = plain("lm_head.weight", {64, 64});
  EXPECT_TRUE(select_one(head, {.include = {"lm_head*"}}).quantize);
  const Selection both = select_one(head, {.include = {"lm_head*"}, .exclude = {"*"}});
  EXPECT_FALSE(both.quantize);
  EXPECT_EQ(both.reason, "excluded");
}

TEST(Selection, RefusesImpossibleIncludes) {
  expect_error(ErrorKind::kInvalidArgument, "cannot be quantized to nvfp4: rank 1",
               [] { select_one(plain("a.norm.weight", {64}), {.include = {"*"}}); });
}

TEST(Selection, RefusesGlobsThatMatchNothing) {
  expect_error(ErrorKind::kInvalidArgument, "exclude: 'lm_heat*' matches no tensor", [] {
    select_one(plain("lm_head.weight", {64, 64}), {.exclude = {"lm_heat*"}});
  });
}

TEST(Selection, ObeysTheSourceConfig) {
  const std::vector<std::string> modules = excluded_modules_of(
      R"({"modules_to_not_convert": ["a.fc"], "quantization_config": {"ignore": ["b.*"]}})");
  EXPECT_EQ(modules, (std::vector<std::string>{"a.fc", "b.*"}));
  EXPECT_EQ(select_one(plain("b.fc.weight", {64, 64}), {.excluded_modules = modules}).reason,
            "excluded by the source config");
  EXPECT_TRUE(select_one(plain("c.fc.weight", {64, 64}), {.excluded_modules = modules}).quantize);
}

TEST(Selection, RefusesRegularExpressionsOfTheConfig) {
  expect_error(ErrorKind::kUnsupported, "regular expressions such as 're:.*gate$'",
               [] { excluded_modules_of(R"({"modules_to_not_convert": ["re:.*gate$"]})"); });
}

TEST(Selection, MergedWeightsShareAScale) {
  const std::string attention = "model.layers.0.self_attn.";
  EXPECT_EQ(shared_scale_key(attention + "q_proj.weight"), attention + "qkv");
  EXPECT_EQ(shared_scale_key(attention + "v_proj.weight"), attention + "qkv");
  EXPECT_EQ(shared_scale_key(attention + "o_proj.weight"), "");
  EXPECT_EQ(shared_scale_key("experts.1.gate_proj.weight"), "experts.1.gate_up");
  EXPECT_NE(shared_scale_key("experts.1.up_proj.weight"),
            shared_scale_key("experts.2.up_proj.weight"));
  EXPECT_EQ(shared_scale_key("experts.1.w1.weight"), shared_scale_key("experts.1.w3.weight"));
  EXPECT_EQ(shared_scale_key("experts.1.w2.weight"), "");
}

}  // namespace
}  // namespace narrowfloat
