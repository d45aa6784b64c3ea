// Which modules a config promises activation scales of.
#include "layers/activation_promises.h"

#include <gtest/gtest.h>

namespace narrowfloat {
namespace {

ActivationPromises promises(const char* declaration) {
  const std::vector<nlohmann::json> configs = {
      {{"quantization_config", nlohmann::json::parse(declaration)}}};
  return ActivationPromises(configs);
}

TEST(ActivationPromises, AreOfTheTargetsOfAGroup) {
  const ActivationPromises found = promises(R"({"config_groups": {
      "group_0": {"targets": ["re:model\\.layers\\.\\d+\\.mlp\\.up_proj$", "head", "re:x.*"],
                  "input_activations": {"dynamic": "local"}},
      "group_1": {"targets": ["re:.*q_proj"], "input_activations": null},
      "group_2": {"targets": ["re:.*k_proj"], "input_activations": {"dynamic": true}}}})");
  for (const char* module : {"model.layers.10.mlp.up_proj", "head", "x.y.z"}) {
    EXPECT_TRUE(found.contains(module)) << module;
  }
  for (const char* module : {"model.layers.1.mlp.up_proj.a", "model_layers.1.mlp.up_proj", "heads",
                             "a.q_proj", "a.k_proj", ""}) {
    EXPECT_FALSE(found.contains(module)) << module;
  }
}

TEST(ActivationPromises, AreOfAllModulesWhereTargetsAreClassesOrOtherExpressions) {
  for (const char* targets : {R"(["Linear"])", R"(["re:.*(q|k)_proj"])", R"([""])", "null"}) {
    const std::string text = std::string(R"({"config_groups": {"group_0": {"targets": )") +
                             targets + R"(, "input_activations": {"num_bits": 4}}}})";
    EXPECT_TRUE(promises(text.c_str()).contains("any")) << targets;
  }
}

TEST(ActivationPromises, AreThoseOfModelOptsAlgorithms) {
  const ActivationPromises found = promises(R"({"quant_algo": "MIXED_PRECISION",
      "config_groups": {"group_0": {"targets": ["c"], "input_activations": {}}},
      "quantized_layers": {"a": {"quant_algo": "NVFP4"}, "b": {"quant_algo": "W4A16_NVFP4"},
                           "c": {"quant_algo": "FP8"}, "d": {"quant_algo": "FP8"}, "e": 1}})");
  EXPECT_TRUE(found.contains("a") && found.contains("c"));
  EXPECT_FALSE(found.contains("b") || found.contains("d") || found.contains("e"));
  EXPECT_TRUE(promises(R"({"quantized_layers": {"d": {"quant_algo": "FP8"}}})").contains("d"));
  EXPECT_TRUE(promises(R"({"quant_algo": "NVFP4"})").contains("any"));
  EXPECT_FALSE(promises(R"({"quant_algo": "W4A16_NVFP4"})").contains("any"));
  EXPECT_FALSE(ActivationPromises({}).contains("any"));
}

}  // namespace
}  // namespace narrowfloat
