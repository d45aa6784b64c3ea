// Every function that reads the text of a config.json, and the reader of YAML.
#include <span>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "checkpoint/config_text.h"
#include "checkpoint/conventions/declaration.h"
#include "checkpoint/json_guard.h"
#include "checkpoint/simple_yaml.h"
#include "fuzz/fuzz_input.h"
#include "fuzz/fuzz_targets.h"
#include "layers/moe/model_config.h"
#include "layers/selection.h"

namespace narrowfloat::testing {
namespace {

// Texts with a member set and removed, beside the same change of the parsed document.
void check_text_changes(const std::string& text) {
  constexpr const char* kMember = "quantization_config";
  using Json = nlohmann::ordered_json;
  Json expected = Json::parse(text);
  const std::string without = remove_top_level_member(text, kMember);
  expected.erase(kMember);
  fuzz_require(Json::parse(without) == expected, "a member removed");
  const std::string with = set_top_level_member(without, kMember, R"({"a":[1]})");
  expected[kMember] = Json{{"a", {1}}};
  fuzz_require(Json::parse(with) == expected, "a member set");
  for (auto& [unused_key, member] : expected.items()) {
    if (member.is_object()) member.erase("a");
  }
  fuzz_require(Json::parse(remove_nested_member(with, "a")) == expected, "a nested member removed");
}

void check_exclusions(const std::string& text) {
  LogicalTensor tensor;
  tensor.name = "model.layers.0.mlp.up_proj.weight";
  tensor.shape = {32, 32};
  const std::vector<std::string> modules = excluded_modules_of(text, "model");
  const std::span tensors(&tensor, 1);
  select_tensors(tensors, {.excluded_modules = modules});
  unmatched_exclusions(tensors, modules, "model");
}

}  // namespace

void fuzz_config(std::span<const uint8_t> bytes) {
  const std::string text(FuzzInput(bytes).rest());
  expect_result_or_error([&] {
    const std::string json = json_of_simple_yaml(text, "recipe.yaml");
    check_json_object(json, "recipe.yaml");
  });
  bool is_object = false;
  expect_result_or_error([&] {
    check_json_object(text, "config.json");
    is_object = true;
  });
  if (!is_object) return;  // Whatever reads a config is given texts that passed.
  expect_result_or_error([&] { declarations_in_config(text, "model"); });
  expect_result_or_error([&] { check_exclusions(text); });
  expect_result_or_error([&] { read_moe_config(text, "model"); });
  check_text_changes(text);
}

}  // namespace narrowfloat::testing
