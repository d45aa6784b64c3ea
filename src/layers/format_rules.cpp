// See format_rules.h. A recipe is read strictly: a misspelled member would quietly change a model.
#include "layers/format_rules.h"

#include <algorithm>

#include <nlohmann/json.hpp>

#include "base/throw_error.h"
#include "checkpoint/escape.h"
#include "checkpoint/file_io.h"
#include "checkpoint/json_guard.h"
#include "checkpoint/simple_yaml.h"
#include "layers/selection.h"

namespace narrowfloat {
namespace {

constexpr uint64_t kMaxRecipeBytes = uint64_t{16} << 20;
constexpr std::string_view kKeep = "keep";

// Settings without those that the format has no use for.
EncodeSettings useful_settings(EncodeSettings settings, const ConventionSpec& spec) {
  const FormatId format = spec.info.format;
  const bool is_mx = format == FormatId::kMxfp4 || format == FormatId::kMxfp8;
  if (!is_mx) settings.mx_scale = Ue8m0Rounding::kUp;
  const bool is_searched =
      format == FormatId::kNvfp4 || (is_mx && settings.scale_search == ScaleSearch::kFull);
  if (!is_searched) settings.scale_search = ScaleSearch::kAmax;
  return settings;
}

const ConventionSpec& spec_of_rule(const QuantizeRule& rule, const ConventionSpec& base) {
  const ConventionSpec& named = convention_spec(parse_convention(rule.format));
  const ConventionSpec* spec = companion_of(base, named);
  // The plain name of a format means the convention that goes with `base`.
  const bool is_plain = rule.format != named.info.name;
  if (spec == nullptr || !named.info.is_written || (spec != &named && !is_plain)) {
    throw_invalid("option rules: '{}={}': {} cannot be in one checkpoint with {}{}",
                  printable(rule.glob), printable(rule.format), named.info.name, base.info.name,
                  spec == nullptr ? "" : fmt::format("; there it is {}", spec->info.name));
  }
  return *spec;
}

WeightChoice choice_of(const QuantizeRule& rule, const ConventionSpec& base,
                       const EncodeSettings& settings) {
  if (rule.format == kKeep) return {};
  WeightChoice choice{.spec = &spec_of_rule(rule, base)};
  choice.settings = useful_settings(settings, *choice.spec);
  choice.settings.math = rule.math.value_or(choice.settings.math);
  choice.settings.mx_scale = rule.mx_scale.value_or(choice.settings.mx_scale);
  choice.settings.scale_search = rule.scale_search.value_or(choice.settings.scale_search);
  check_encode_settings(choice.settings, *choice.spec);
  return choice;
}

class RecipeReader {
 public:
  RecipeReader(const nlohmann::json& root, const std::string& source)
      : root_(root), source_(source) {}

  QuantizeRecipe run() {
    QuantizeRecipe recipe;
    for (const auto& [key, value] : root_.items()) {
      if (key == "include") {
        recipe.include = read_globs(value, key);
      } else if (key == "exclude") {
        recipe.exclude = read_globs(value, key);
      } else if (key == "rules") {
        if (!value.is_array()) refuse("'rules' must be a list");
        for (const nlohmann::json& rule : value) recipe.rules.push_back(read_rule(rule));
      } else {
        refuse(
            fmt::format("unknown member '{}'; expected include, exclude or rules", printable(key)));
      }
    }
    return recipe;
  }

 private:
  [[noreturn]] void refuse(const std::string& what) const {
    throw_error(ErrorKind::kCorruptData, "{}: {}", source_, what);
  }

  std::vector<std::string> read_globs(const nlohmann::json& list, const std::string& key) const {
    std::vector<std::string> globs;
    if (!list.is_array()) refuse(fmt::format("'{}' must be a list of globs", key));
    for (const nlohmann::json& glob : list) {
      if (!glob.is_string()) refuse(fmt::format("'{}' must be a list of globs", key));
      globs.push_back(glob.get<std::string>());
    }
    return globs;
  }

  QuantizeRule read_rule(const nlohmann::json& object) const {
    if (!object.is_object()) refuse("a rule must be an object");
    QuantizeRule rule;
    for (const auto& [key, value] : object.items()) {
      if (!value.is_string()) {
        refuse(fmt::format("'{}' of a rule must be a string", printable(key)));
      }
      const auto text = value.get<std::string>();
      if (key == "match") {
        rule.glob = text;
      } else if (key == "format") {
        rule.format = text;
      } else {
        read_setting(rule, key, text);
      }
    }
    if (rule.glob.empty() || rule.format.empty()) refuse("a rule needs 'match' and 'format'");
    return rule;
  }

  void read_setting(QuantizeRule& rule, const std::string& key, const std::string& text) const {
    try {
      if (key == "math") {
        rule.math = parse_math_mode(text);
        return;
      }
      if (key == "mx_scale") {
        rule.mx_scale = parse_ue8m0_rounding(text);
        return;
      }
    } catch (const Error& error) {
      refuse(error.what());
    }
    if (key == "scale_search") rule.scale_search = find_scale_search(text);
    if (key == "scale_search" && rule.scale_search) return;
    refuse(
        fmt::format("a rule has '{}': '{}'; expected match, format, math, mx_scale or "
                    "scale_search (amax, 4over6, full)",
                    printable(key), printable(text)));
  }

  const nlohmann::json& root_;
  const std::string& source_;
};

QuantizeRecipe read_recipe_text(std::string_view text, const std::string& source) {
  check_json_object(text, source);
  const nlohmann::json root = nlohmann::json::parse(text);
  return RecipeReader(root, source).run();
}

}  // namespace

std::vector<WeightChoice> choose_formats(std::span<const LogicalTensor> tensors,
                                         const ConventionSpec& base, const EncodeSettings& settings,
                                         std::span<const QuantizeRule> rules) {
  std::vector<WeightChoice> of_rules;
  std::vector<std::string> globs;
  for (const QuantizeRule& rule : rules) {
    of_rules.push_back(choice_of(rule, base, settings));
    globs.push_back(rule.glob);
  }
  refuse_unmatched("rules", globs, tensors);
  const EncodeSettings own = rules.empty() ? settings : useful_settings(settings, base);
  std::vector<WeightChoice> choices(tensors.size(), {&base, own});
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto rule = std::find_if(rules.begin(), rules.end(), [&](const QuantizeRule& one) {
      return glob_matches(one.glob, tensors[i].name);
    });
    if (rule != rules.end()) choices[i] = of_rules[static_cast<size_t>(rule - rules.begin())];
  }
  return choices;
}

std::string rules_text(std::span<const QuantizeRule> rules) {
  std::string text;
  for (const QuantizeRule& rule : rules) {
    text += fmt::format(" {}={}", rule.glob, rule.format);
    if (rule.math) text += fmt::format(",math={}", name(*rule.math));
    if (rule.mx_scale) text += fmt::format(",mx_scale={}", name(*rule.mx_scale));
    if (rule.scale_search) text += fmt::format(",scale_search={}", name(*rule.scale_search));
  }
  return text;
}

QuantizeRule parse_rule(std::string_view text) {
  const size_t equals = text.rfind('=');
  if (equals == std::string_view::npos || equals == 0 || equals + 1 == text.size()) {
    throw_invalid(
        "expected GLOB=FORMAT, as '*.self_attn.*=mxfp8' or '*.down_proj.*=keep', got '{}'",
        printable(text));
  }
  QuantizeRule rule;
  rule.glob = text.substr(0, equals);
  rule.format = text.substr(equals + 1);
  if (rule.format != kKeep) (void)parse_convention(rule.format);
  return rule;
}

QuantizeRecipe read_recipe(const std::string& path) {
  const std::string text = read_file_bounded(path, kMaxRecipeBytes);
  const std::string source = printable(path);
  const bool is_yaml = path.ends_with(".yaml") || path.ends_with(".yml");
  // JSON is YAML, too: whatever its name, it may take several lines.
  if (!is_yaml || nlohmann::json::accept(text)) return read_recipe_text(text, source);
  return read_recipe_text(json_of_simple_yaml(text, source), source);
}

QuantizeRecipe parse_recipe(std::string_view text) { return read_recipe_text(text, "recipe"); }

}  // namespace narrowfloat
