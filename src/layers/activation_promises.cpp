// ModelOpt names the algorithm of each module or of all: NVFP4 implies scales, and FP8 does unless
// groups say which of its modules have them. The targets of groups are names, regular expressions
// or classes of modules. Of regular expressions only those are told apart that are globs in other
// signs, as our writer's are; others, and classes, stand for all modules.
#include "layers/activation_promises.h"

#include <algorithm>
#include <cctype>
#include <optional>

#include "checkpoint/conventions/convention.h"
#include "narrowfloat/checkpoint.h"

namespace narrowfloat {
namespace {

constexpr std::string_view kPattern = "re:";
constexpr size_t kMaxGlobs = 1000;  // Each is tried on each module.

bool has_static_activations(const nlohmann::json& group) {
  const auto inputs = group.find("input_activations");
  if (inputs == group.end() || !inputs->is_object()) return false;
  const auto dynamic = inputs->find("dynamic");
  return dynamic == inputs->end() || *dynamic != true;
}

bool implies_static_activations(std::string_view algorithm, bool has_groups) {
  return algorithm == "NVFP4" || (algorithm == "FP8" && !has_groups);
}

// "model\.layers\.\d+\.mlp$" as a glob; empty where it is none.
std::optional<std::string> glob_of(std::string_view pattern) {
  std::string glob;
  while (!pattern.empty()) {
    const auto takes = [&](std::string_view sign) {
      if (!pattern.starts_with(sign)) return false;
      pattern.remove_prefix(sign.size());
      return true;
    };
    if (takes("\\d+") || takes(".*")) {
      glob += '*';
    } else if (takes("\\.")) {
      glob += '.';
    } else if (pattern == "$") {
      return glob;
    } else if (std::isalnum(static_cast<unsigned char>(pattern.front())) != 0 ||
               pattern.front() == '_') {
      glob += pattern.front();
      pattern.remove_prefix(1);
    } else {
      return std::nullopt;
    }
  }
  return glob + '*';  // Regular expressions match at the start.
}

}  // namespace

ActivationPromises::ActivationPromises(std::span<const nlohmann::json> configs) {
  for (const nlohmann::json& config : configs) {
    const auto declaration = config.find("quantization_config");
    if (declaration == config.end() || !declaration->is_object()) continue;
    const auto layers = declaration->find("quantized_layers");
    const auto groups = declaration->find("config_groups");
    const bool has_layers = layers != declaration->end() && layers->is_object();
    const bool has_groups = groups != declaration->end() && groups->is_object();
    if (has_layers) {
      for (const auto& [module, layer] : layers->items()) {
        const std::string algorithm = string_member(layer, "quant_algo");
        if (implies_static_activations(algorithm, has_groups)) modules_.insert(module);
      }
    }
    if (has_groups) add_groups(*groups);
    const std::string algorithm = string_member(*declaration, "quant_algo");
    if (!has_groups && !has_layers && implies_static_activations(algorithm, false)) all_ = true;
  }
}

void ActivationPromises::add_groups(const nlohmann::json& groups) {
  for (const nlohmann::json& group : groups) {
    if (!group.is_object() || !has_static_activations(group)) continue;
    const auto targets = group.find("targets");
    if (targets == group.end() || !targets->is_array()) {
      all_ = true;
      continue;
    }
    for (const nlohmann::json& target : *targets) {
      if (target.is_string()) add_target(target.get<std::string>());
    }
  }
}

void ActivationPromises::add_target(const std::string& target) {
  if (target.starts_with(kPattern)) {
    const std::optional<std::string> glob = glob_of(target.substr(kPattern.size()));
    if (glob && globs_.size() < kMaxGlobs) {
      globs_.push_back(*glob);
    } else {
      all_ = true;
    }
  } else if (target.empty() || std::isupper(static_cast<unsigned char>(target.front())) != 0) {
    all_ = true;  // A class, as "Linear".
  } else {
    modules_.insert(target);
  }
}

bool ActivationPromises::contains(std::string_view module) const {
  return all_ || modules_.contains(module) ||
         std::any_of(globs_.begin(), globs_.end(),
                     [&](const std::string& glob) { return glob_matches(glob, module); });
}

}  // namespace narrowfloat
