// See config_rewrite.h.
#include "layers/config_rewrite.h"

#include <algorithm>

#include "checkpoint/config_text.h"

namespace narrowfloat {
namespace {

constexpr const char* kConfigMember = "quantization_config";
constexpr const char* kExpertMember = "expert_dtype";

// The text of a top-level member's value in a file indented by 2.
std::string indented(const nlohmann::ordered_json& value) {
  std::string text;
  for (const char c : value.dump(2)) {
    text += c;
    if (c == '\n') text += "  ";
  }
  return text;
}

std::string without_other_declarations(const std::string& config_text) {
  const std::string text = remove_top_level_member(config_text, kExpertMember);
  return remove_nested_member(text, kConfigMember);
}

}  // namespace

std::string without_declaration(const std::string& config_text) {
  return without_other_declarations(remove_top_level_member(config_text, kConfigMember));
}

std::string with_declaration(const std::string& config_text,
                             const nlohmann::ordered_json& quantization_config) {
  return set_top_level_member(without_other_declarations(config_text), kConfigMember,
                              indented(quantization_config));
}

void ignore_untied_head(const Checkpoint& source, QuantizedModel& model) {
  const bool is_there = source.find("lm_head.weight") != nullptr;
  if (!is_there) model.ignored_modules.emplace_back("lm_head");
  std::sort(model.ignored_modules.begin(), model.ignored_modules.end());
}

}  // namespace narrowfloat
