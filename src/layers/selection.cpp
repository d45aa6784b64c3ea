// The class of a module is read from the components of its name, as model code spells them.
#include "layers/selection.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <unordered_set>

#include <nlohmann/json.hpp>

#include "base/throw_error.h"
#include "checkpoint/escape.h"
#include "tensor/block_math.h"

namespace narrowfloat {
namespace {

constexpr std::string_view kWeightSuffix = ".weight";

constexpr std::string_view kHead = "output head";
constexpr std::string_view kRouter = "router";
constexpr std::string_view kConv1d = "Conv1D (stored transposed, as GPT-2 does)";

struct NameRule {
  std::string_view glob;
  std::string_view reason;
  bool is_linear;
};
// Rules for the whole name of a module.
constexpr std::array kModuleRules = {
    NameRule{"output", kHead, true},  // Only at the top level: attention has `output` too.
    NameRule{"cls.*.decoder", kHead, true},
    NameRule{"shared", "embedding", false},  // T5; "model.shared" in BART.
    NameRule{"model.shared", "embedding", false},
    // Linear in some descendants, whose configs must list them; for Conv1D the entry is harmless.
    NameRule{"transformer.h.*.c_attn", kConv1d, true},
    NameRule{"transformer.h.*.c_fc", kConv1d, true},
    NameRule{"transformer.h.*.c_proj", kConv1d, true},
    NameRule{"h.*.c_attn", kConv1d, true},
    NameRule{"h.*.c_fc", kConv1d, true},
    NameRule{"h.*.c_proj", kConv1d, true},
};
// Rules for one component of it. The first that matches any component decides.
constexpr std::array kComponentRules = {
    NameRule{"*rotary*", "rotary table", false},
    NameRule{"relative_attention_bias", "embedding of relative positions", false},
    NameRule{"*embed*", "embedding", false},
    NameRule{"wte", "embedding", false},
    NameRule{"wpe", "embedding", false},
    NameRule{"*norm*", "norm", false},
    NameRule{"ln_*", "norm", false},
    NameRule{"*conv*", "convolution", false},
    NameRule{"*router*", kRouter, true},
    NameRule{"gate", kRouter, true},  // mlp.gate, block_sparse_moe.gate; experts have gate_proj.
    NameRule{"shared_expert_gate", kRouter, true},
    NameRule{"lm_head", kHead, true},
    NameRule{"embed_out", kHead, true},
    NameRule{"score", kHead, true},
    NameRule{"classifier", kHead, true},
};

std::vector<std::string_view> components(std::string_view module) {
  std::vector<std::string_view> parts;
  for (size_t begin = 0; begin <= module.size();) {
    const size_t end = std::min(module.find('.', begin), module.size());
    parts.push_back(module.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

const NameRule* name_rule(std::string_view module) {
  for (const NameRule& rule : kModuleRules) {
    if (glob_matches(rule.glob, module)) return &rule;
  }
  const std::vector<std::string_view> parts = components(module);
  for (const NameRule& rule : kComponentRules) {
    for (const std::string_view part : parts) {
      if (glob_matches(rule.glob, part)) return &rule;
    }
  }
  return nullptr;
}

bool matches_any(const std::vector<std::string>& globs, std::string_view text) {
  return std::any_of(globs.begin(), globs.end(),
                     [&](const std::string& glob) { return glob_matches(glob, text); });
}

// Whether `entry` of a config names `module` or a module that contains it.
bool excludes(const std::string& entry, std::string_view module) {
  return glob_matches(entry, module) || glob_matches(entry + ".*", module);
}

bool is_pattern(std::string_view entry) {
  return entry.find_first_of("*?[") != std::string_view::npos;
}

bool is_quantizable_dtype(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBF16;
}

// The reason why no convention can hold this tensor; empty if one can.
std::string obstacle(const LogicalTensor& tensor, FormatId format) {
  if (module_of(tensor.name).empty()) return "not named *.weight";
  if (tensor.shape.size() == 3) return "rank 3 (stacked experts are not supported yet)";
  if (tensor.shape.size() != 2) return fmt::format("rank {}", tensor.shape.size());
  if (!is_quantizable_dtype(tensor.dtype)) return fmt::format("dtype {}", name(tensor.dtype));
  if (tensor.num_elements() == 0) return "empty";
  const int64_t multiple = column_multiple(format_info(format));
  if (tensor.shape[1] % multiple != 0) {
    return fmt::format("K = {} is not a multiple of {}", tensor.shape[1], multiple);
  }
  return "";
}

Selection select(const LogicalTensor& tensor, std::optional<FormatId> format,
                 const SelectionRules& rules, const ModuleExclusions& exclusions) {
  const std::string why_not = format ? obstacle(tensor, *format) : "kept by a rule";
  const std::string_view module = module_of(tensor.name);
  const NameRule* rule = module.empty() ? nullptr : name_rule(module);
  Selection selection;
  selection.is_linear = is_linear_weight(tensor);
  selection.is_head_or_router =
      rule != nullptr && (rule->reason == kHead || rule->reason == kRouter);
  const bool included = matches_any(rules.include, tensor.name);
  if (matches_any(rules.exclude, tensor.name)) {
    selection.reason = "excluded";
  } else if (included && !why_not.empty()) {
    throw_invalid("option include: tensor '{}' cannot be quantized{}: {}", printable(tensor.name),
                  format ? fmt::format(" to {}", name(*format)) : "", why_not);
  } else if (!why_not.empty()) {
    selection.reason = why_not;
  } else if (!included && rule != nullptr) {
    selection.reason = rule->reason;
  } else if (!included && exclusions.contains(module)) {
    selection.reason = "excluded by the source config";
  }
  selection.quantize = selection.reason.empty();
  if (selection.quantize && rule != nullptr && rule->reason != kHead) {
    selection.warning = fmt::format(
        "tensor '{}' ({}) is quantized on request (option include); loaders that expect quantized "
        "weights in Linear modules only may not read it",
        printable(tensor.name), rule->reason);
  }
  return selection;
}

// Members of configs that list modules which are not quantized.
constexpr std::array kExclusionMembers = {"modules_to_not_convert", "ignore", "exclude_modules"};

constexpr std::ptrdiff_t kMaxPatterns = 1000;

// Path of the config of the checkpoint at `path`, for messages.
std::string config_path(const std::string& path) { return printable(path) + "/config.json"; }

// `file`: printable.
void collect_exclusions(const nlohmann::json& object, std::string_view file,
                        std::vector<std::string>& modules) {
  for (const char* key : kExclusionMembers) {
    const auto list = object.find(key);
    if (list == object.end() || !list->is_array()) continue;
    for (const nlohmann::json& entry : *list) {
      if (!entry.is_string()) continue;
      const std::string module = entry.get<std::string>();
      if (module.starts_with("re:")) {
        throw_error(
            ErrorKind::kUnsupported,
            "{}: '{}': regular expressions such as '{}' are not supported; remove the entry "
            "and use option exclude",
            file, key, printable(module));
      }
      modules.push_back(module);
    }
  }
  // Each is tried on each tensor.
  const auto num_patterns = std::count_if(modules.begin(), modules.end(), is_pattern);
  if (num_patterns > kMaxPatterns) {
    throw_error(ErrorKind::kCorruptData,
                "{}: excludes modules by {} patterns with wildcards; the limit is {}", file,
                num_patterns, kMaxPatterns);
  }
}

struct MergedWeights {
  std::string_view key;
  std::array<std::string_view, 3> names;
};
constexpr std::array kMergedWeights = {
    MergedWeights{"qkv", {"q_proj", "k_proj", "v_proj"}},
    MergedWeights{"gate_up", {"gate_proj", "up_proj", ""}},
    MergedWeights{"w1_w3", {"w1", "w3", ""}},
};

}  // namespace

ModuleExclusions::ModuleExclusions(const std::vector<std::string>& entries) {
  for (const std::string& entry : entries) {
    if (is_pattern(entry)) {
      patterns_.emplace_back(entry);
    } else {
      names_.insert(entry);
    }
  }
}

bool ModuleExclusions::contains(std::string_view module) const {
  for (size_t end = module.find('.');; end = module.find('.', end + 1)) {
    if (names_.contains(module.substr(0, end))) return true;
    if (end == std::string_view::npos) break;
  }
  return std::any_of(patterns_.begin(), patterns_.end(), [&](std::string_view pattern) {
    return excludes(std::string(pattern), module);
  });
}

void refuse_unmatched(const char* option, const std::vector<std::string>& globs,
                      std::span<const LogicalTensor> tensors) {
  for (const std::string& glob : globs) {
    const bool found = std::any_of(tensors.begin(), tensors.end(), [&](const LogicalTensor& t) {
      return glob_matches(glob, t.name);
    });
    if (!found) {
      throw_invalid(
          "option {}: '{}' matches no tensor; globs apply to whole names, as '*.down_proj.weight'",
          option, printable(glob));
    }
  }
}

std::vector<Selection> select_tensors(std::span<const LogicalTensor> tensors,
                                      const SelectionRules& rules) {
  refuse_unmatched("include", rules.include, tensors);
  refuse_unmatched("exclude", rules.exclude, tensors);
  std::vector<Selection> selections;
  selections.reserve(tensors.size());
  const ModuleExclusions exclusions(rules.excluded_modules);
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto format = rules.formats.empty() ? rules.format : rules.formats.at(i);
    selections.push_back(select(tensors[i], format, rules, exclusions));
  }
  return selections;
}

std::vector<std::string> unmatched_exclusions(std::span<const LogicalTensor> tensors,
                                              const std::vector<std::string>& excluded_modules,
                                              const std::string& path) {
  if (excluded_modules.empty()) return {};
  // Any parameter counts, not only weights: the name without its last component is the module.
  std::unordered_set<std::string_view> modules;
  std::unordered_set<std::string_view> names;  // The modules, and all that contain them.
  for (const LogicalTensor& tensor : tensors) {
    const size_t dot = tensor.name.rfind('.');
    if (dot == std::string::npos) continue;
    const std::string_view module = std::string_view(tensor.name).substr(0, dot);
    if (!modules.insert(module).second) continue;
    names.insert(module);
    for (size_t end = module.find('.'); end != module.npos; end = module.find('.', end + 1)) {
      names.insert(module.substr(0, end));
    }
  }
  std::vector<std::string> warnings;
  for (const std::string& entry : excluded_modules) {
    const bool found =
        is_pattern(entry)
            ? std::any_of(modules.begin(), modules.end(),
                          [&](std::string_view module) { return excludes(entry, module); })
            : names.contains(entry);
    if (found) continue;
    warnings.push_back(fmt::format("{}: '{}' is excluded, but no tensor is in such a module",
                                   config_path(path), printable(entry)));
  }
  return warnings;
}

std::vector<std::string> excluded_modules_of(const std::string& config_text,
                                             const std::string& path) {
  std::vector<std::string> modules;
  if (config_text.empty()) return modules;
  const nlohmann::json config = nlohmann::json::parse(config_text);
  const std::string file = config_path(path);
  collect_exclusions(config, file, modules);
  const auto quantization = config.find("quantization_config");
  if (quantization != config.end() && quantization->is_object()) {
    collect_exclusions(*quantization, file, modules);
  }
  return modules;
}

bool is_linear_weight(const LogicalTensor& tensor) {
  const std::string_view module = module_of(tensor.name);
  if (module.empty() || tensor.shape.size() != 2) return false;
  const NameRule* rule = name_rule(module);
  return rule == nullptr || rule->is_linear;
}

std::string_view module_of(std::string_view tensor) {
  if (!tensor.ends_with(kWeightSuffix)) return "";
  return tensor.substr(0, tensor.size() - kWeightSuffix.size());
}

std::string shared_scale_key(std::string_view tensor) {
  const std::string_view module = module_of(tensor);
  const size_t dot = module.rfind('.');
  if (dot == std::string_view::npos) return "";
  const std::string_view last = module.substr(dot + 1);
  for (const MergedWeights& merged : kMergedWeights) {
    if (std::find(merged.names.begin(), merged.names.end(), last) != merged.names.end()) {
      return std::string(module.substr(0, dot + 1)).append(merged.key);
    }
  }
  return "";
}

}  // namespace narrowfloat
