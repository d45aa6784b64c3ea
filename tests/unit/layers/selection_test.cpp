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
      {"shared.weight", "embedding"},
      {"cls.predictions.decoder.weight", "output head"},
      {"encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
       "embedding of relative positions"},
      {"model.layers.0.self_attn.rotary_table.weight", "rotary table"},
      {"transformer.h.0.attn.c_attn.weight", "Conv1D (stored transposed, as GPT-2 does)"},
      {"transformer.h.11.mlp.c_fc.weight", "Conv1D (stored transposed, as GPT-2 does)"},
      {"h.3.mlp.c_proj.weight", "Conv1D (stored transposed, as GPT-2 does)"},
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

TEST(Selection, WarnsOfIncludedModulesThatAreNotPlainLinear) {
  for (const char* name : {"model.embed_tokens.weight", "model.mlp.gate.weight", "a.norm.weight"}) {
    const Selection selection = select_one(plain(name, {64, 64}), {.include = {"*"}});
    EXPECT_TRUE(selection.quantize) << name;
    EXPECT_NE(selection.warning.find("may not read it"), std::string::npos) << name;
    EXPECT_NE(selection.warning.find(name), std::string::npos) << selection.warning;
  }
  for (const char* name : {"lm_head.weight", "model.layers.0.mlp.up_proj.weight"}) {
    EXPECT_EQ(select_one(plain(name, {64, 64}), {.include = {"*"}}).warning, "") << name;
  }
}

TEST(Selection, RefusesImpossibleIncludes) {
  expect_error(ErrorKind::kInvalidArgument, "cannot be quantized to nvfp4: rank 1",
               [] { select_one(plain("a.norm.weight", {64}), {.include = {"*"}}); });
}

TEST(Selection, RefusesGlobsThatMatchNothing) {
  expect_error(ErrorKind::kInvalidArgument, "option exclude: 'lm_heat*' matches no tensor", [] {
    select_one(plain("lm_head.weight", {64, 64}), {.exclude = {"lm_heat*"}});
  });
}

TEST(Selection, ObeysTheSourceConfig) {
  const std::vector<std::string> modules = excluded_modules_of(
      R"({"modules_to_not_convert": ["a.fc"], "quantization_config": {"ignore": ["b.*"]}})",
      "model");
  EXPECT_EQ(modules, (std::vector<std::string>{"a.fc", "b.*"}));
  EXPECT_EQ(select_one(plain("b.fc.weight", {64, 64}), {.excluded_modules = modules}).reason,
            "excluded by the source config");
  EXPECT_TRUE(select_one(plain("c.fc.weight", {64, 64}), {.excluded_modules = modules}).quantize);
}

TEST(Selection, ExcludedModulesTakeWhatIsInThemAlong) {
  const std::vector<std::string> modules =
      excluded_modules_of(R"({"modules_to_not_convert":)"
                          R"( ["vision", "model.layers.0.self_attn", "model.layers.*.mlp"]})",
                          "model");
  const auto is_quantized = [&](const std::string& name) {
    return select_one(plain(name, {64, 64}), {.excluded_modules = modules}).quantize;
  };
  EXPECT_FALSE(is_quantized("vision.weight"));
  EXPECT_FALSE(is_quantized("vision.blocks.3.attn.qkv.weight"));
  EXPECT_FALSE(is_quantized("model.layers.0.self_attn.q_proj.weight"));
  EXPECT_FALSE(is_quantized("model.layers.7.mlp.up_proj.weight"));
  EXPECT_FALSE(is_quantized("model.layers.7.mlp.experts.0.up_proj.weight"));
  EXPECT_TRUE(is_quantized("visionary.fc.weight"));
  EXPECT_TRUE(is_quantized("model.vision.fc.weight"));
  EXPECT_TRUE(is_quantized("model.layers.1.self_attn.q_proj.weight"));
  EXPECT_TRUE(is_quantized("model.layers.7.mlp2.up_proj.weight"));
}

TEST(Selection, AllListsOfTheConfigReachBelow) {
  for (const char* key : {"modules_to_not_convert", "ignore", "exclude_modules"}) {
    const auto modules =
        excluded_modules_of(std::string("{\"") + key + "\": [\"vision\"]}", "model");
    EXPECT_FALSE(
        select_one(plain("vision.a.fc.weight", {64, 64}), {.excluded_modules = modules}).quantize)
        << key;
  }
}

TEST(Selection, WarnsOfExclusionsThatMatchNothing) {
  const std::vector<LogicalTensor> tensors = {plain("vision.blocks.0.fc.weight", {64, 64}),
                                              plain("model.norm.bias", {64})};
  const auto warnings =
      unmatched_exclusions(tensors, {"vision", "model.norm", "audio.*"}, "models/tiny\n");
  ASSERT_EQ(warnings.size(), 1U);
  EXPECT_EQ(warnings[0],
            "models/tiny\\n/config.json: 'audio.*' is excluded, but no tensor is in such a module");
}

TEST(Selection, RefusesRegularExpressionsOfTheConfig) {
  expect_error(
      ErrorKind::kUnsupported,
      "models/tiny/config.json: 'modules_to_not_convert': regular expressions such as 're:.*gate$'",
      [] { excluded_modules_of(R"({"modules_to_not_convert": ["re:.*gate$"]})", "models/tiny"); });
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
