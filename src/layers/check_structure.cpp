// Names are compared as model code spells them: "....layers.3.mlp.experts.7.up_proj.weight".
#include "layers/check_structure.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <set>

#include <nlohmann/json.hpp>

#include "base/int_math.h"
#include "base/throw_error.h"
#include "checkpoint/conventions/convention.h"
#include "checkpoint/conventions/fit.h"
#include "checkpoint/escape.h"
#include "layers/activation_promises.h"
#include "layers/selection.h"
#include "layers/weight_reader.h"

namespace narrowfloat {
namespace {

constexpr const char* kDeclarationMember = "quantization_config";
constexpr size_t kNamesInMessage = 4;

// Numbers that are not in a set. There may be as many as 64 bits count, so few are kept.
struct MissingNumbers {
  int64_t count = 0;
  std::vector<int64_t> first;

  // Adds [begin, end).
  void add(int64_t begin, int64_t end) {
    for (int64_t number = begin; number < end && first.size() < kNamesInMessage; ++number) {
      first.push_back(number);
    }
    count += std::max<int64_t>(0, end - begin);
  }

  // "3, 4, 5, 6, ... (12 in all)".
  [[nodiscard]] std::string text() const {
    const bool are_all = count == static_cast<int64_t>(first.size());
    return fmt::format("{}{}", fmt::join(first, ", "),
                       are_all ? "" : fmt::format(", ... ({} in all)", count));
  }
};

// Suffixes that only companions of codes have.
bool is_companion_name(std::string_view tensor) {
  for (const ConventionSpec* spec : all_convention_specs()) {
    for (const PartRule* rule : {&spec->scales, &spec->global_scale, &spec->input_scale}) {
      for (const std::string_view suffix : rule->suffixes) {
        if (suffix != kGenericScale && stem_of(tensor, suffix)) return true;
      }
    }
  }
  return false;
}

// Scales that GPU kernels want: rows padded to 128 and columns to 4.
std::string likely_cause_of(const Checkpoint& checkpoint, const Fit& fit) {
  const bool has_blocks = fit.spec->info.scale_extent == ScaleExtent::kBlock;
  if (fit.weight.shape.size() != 2 || fit.spec->is_stacked || !has_blocks) return "";
  const std::vector<int64_t> wanted =
      scales_shape(*fit.spec, fit.weight.shape[0], fit.weight.shape[1]);
  const std::vector<int64_t> padded = {round_up(wanted[0], 128), round_up(wanted[1], 4)};
  for (const std::string& part : fit.weight.parts) {
    const CheckpointTensor* tensor = checkpoint.find(part);
    if (tensor != nullptr && padded != wanted && tensor->info.shape == padded) {
      return "; this is the shape of scales padded for a GPU layout (128x4): files hold linear "
             "ones";
    }
  }
  return "";
}

// The conventions that one stored tensor could be the codes of.
class TensorFitter {
 public:
  TensorFitter(const Checkpoint& checkpoint, FindingList& findings)
      : checkpoint_(checkpoint), findings_(findings) {}

  // `known`: a message whose tensor needs no second finding.
  std::vector<LogicalTensor> run(const std::string& known) {
    for (const CheckpointTensor& tensor : checkpoint_.tensors()) fit(tensor.info, known);
    std::vector<LogicalTensor> result;
    for (auto& [unused_name, weight] : weights_) result.push_back(std::move(weight));
    for (const CheckpointTensor& tensor : checkpoint_.tensors()) {
      const TensorInfo& info = tensor.info;
      if (used_.contains(info.name)) continue;
      if (is_companion_name(info.name)) {
        if (!is_named_in(known, info.name)) {
          findings_.error(rules::kSurplus, info.name,
                          fmt::format("{} is a scale, but there are no codes that it belongs to",
                                      tensor_text(info)));
        }
        continue;
      }
      LogicalTensor plain;
      plain.name = info.name;
      plain.shape = info.shape;
      plain.dtype = info.dtype;
      plain.parts = {info.name};
      plain.size_bytes = info.size_bytes;
      result.push_back(std::move(plain));
    }
    std::sort(result.begin(), result.end(),
              [](const LogicalTensor& a, const LogicalTensor& b) { return a.name < b.name; });
    return result;
  }

 private:
  static bool is_named_in(const std::string& message, const std::string& tensor) {
    return message.find(fmt::format("'{}'", printable(tensor))) != std::string::npos;
  }

  void fit(const TensorInfo& info, const std::string& known) {
    std::optional<Fit> failed;
    for (const ConventionSpec* spec : all_convention_specs()) {
      std::optional<Fit> fit = fit_weight(checkpoint_, *spec, info);
      if (!fit) continue;
      if (fit->ok()) {
        used_.insert(fit->weight.parts.begin(), fit->weight.parts.end());
        weights_.emplace(fit->weight.name, std::move(fit->weight));
        return;
      }
      const bool has_own_name = !spec->is_stacked && !stem_of(info.name, "weight");
      if (!failed && (fit->has_companion || has_own_name)) failed = std::move(fit);
    }
    if (!failed) return;
    used_.insert(info.name);
    used_.insert(failed->weight.parts.begin(), failed->weight.parts.end());
    if (is_named_in(known, info.name)) return;
    findings_.error(rules::kMissing, failed->weight.name,
                    fmt::format("{} {}{}", tensor_text(info), failed->problem,
                                likely_cause_of(checkpoint_, *failed)));
  }

  const Checkpoint& checkpoint_;
  FindingList& findings_;
  std::map<std::string, LogicalTensor> weights_;  // Key: name.
  std::set<std::string, std::less<>> used_;
};

// config.json and the model configs nested in it.
std::vector<nlohmann::json> model_configs(const Checkpoint& checkpoint) {
  std::vector<nlohmann::json> configs;
  if (checkpoint.config_text().empty()) return configs;
  configs.push_back(nlohmann::json::parse(checkpoint.config_text()));
  const nlohmann::json root = configs.front();
  for (const auto& [key, member] : root.items()) {
    if (member.is_object() && key != kDeclarationMember) configs.push_back(member);
  }
  return configs;
}

// The first of `keys` that a config has as a number.
std::optional<int64_t> config_number(const std::vector<nlohmann::json>& configs,
                                     std::initializer_list<const char*> keys) {
  for (const nlohmann::json& config : configs) {
    for (const char* key : keys) {
      const auto found = config.find(key);
      if (found != config.end() && found->is_number_integer()) return found->get<int64_t>();
    }
  }
  return std::nullopt;
}

// A name split at a numbered component: "model.layers", 3, "mlp.up_proj.weight".
struct NumberedName {
  std::string_view before;
  int64_t number = 0;
  std::string_view after;
};

std::optional<NumberedName> split_at(std::string_view name, std::string_view component) {
  constexpr size_t kMaxDigits = 9;
  for (size_t at = name.find(component); at != name.npos; at = name.find(component, at + 1)) {
    const size_t end = at + component.size();
    if ((at > 0 && name[at - 1] != '.') || end >= name.size() || name[end] != '.') continue;
    const size_t dot = std::min(name.find('.', end + 1), name.size());
    const std::string_view digits = name.substr(end + 1, dot - end - 1);
    if (digits.empty() || digits.size() > kMaxDigits ||
        digits.find_first_not_of("0123456789") != digits.npos) {
      continue;
    }
    return NumberedName{name.substr(0, end), std::stoll(std::string(digits)),
                        dot < name.size() ? name.substr(dot + 1) : std::string_view()};
  }
  return std::nullopt;
}

MissingNumbers missing_numbers(const std::set<int64_t>& present, int64_t count) {
  MissingNumbers missing;
  int64_t next = 0;
  for (const int64_t number : present) {
    missing.add(next, std::min(number, count));
    next = number + 1;
  }
  missing.add(next, count);
  return missing;
}

class StructureChecker {
 public:
  StructureChecker(const Checkpoint& checkpoint, std::span<const LogicalTensor> tensors,
                   FindingList& findings)
      : checkpoint_(checkpoint),
        tensors_(tensors),
        configs_(model_configs(checkpoint)),
        findings_(findings) {}

  void run() {
    check_declaration();
    check_exclusions();
    check_layers();
    check_experts();
    check_input_scales();
    check_merged_shapes();
  }

 private:
  [[nodiscard]] const LogicalTensor* first_quantized() const {
    const auto found = std::find_if(tensors_.begin(), tensors_.end(), [](const LogicalTensor& t) {
      return t.convention.has_value();
    });
    return found == tensors_.end() ? nullptr : &*found;
  }

  void check_declaration() {
    const LogicalTensor* quantized = first_quantized();
    if (!checkpoint_.is_directory() || quantized == nullptr) return;
    const bool is_declared = std::any_of(
        configs_.begin(), configs_.end(),
        [](const nlohmann::json& config) { return config.contains(kDeclarationMember); });
    if (is_declared) return;
    findings_.error(
        rules::kDeclaration, "",
        fmt::format("{}; '{}' is {}, and loaders take its codes for weights",
                    configs_.empty() ? "there is no config.json"
                                     : "config.json has no 'quantization_config'",
                    printable(quantized->name), convention_info(*quantized->convention).name));
  }

  // Excluded modules hold no codes; every other linear weight does.
  void check_exclusions() {
    const LogicalTensor* quantized = first_quantized();
    if (configs_.empty() || quantized == nullptr) return;
    std::vector<std::string> excluded;
    try {
      excluded = excluded_modules_of(checkpoint_.config_text(), checkpoint_.path());
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kUnsupported) throw;
      findings_.note(rules::kDeclaration, "",
                     "the modules that config.json excludes by regular expressions were not "
                     "compared with the tensors");
      return;
    }
    const ModuleExclusions exclusions(excluded);
    // Loaders of stacked experts take every other module for a plain one.
    const bool has_experts_only =
        std::all_of(tensors_.begin(), tensors_.end(), [](const LogicalTensor& tensor) {
          return !tensor.convention || convention_spec(*tensor.convention).is_stacked;
        });
    const SelectionRules selection_rules = {
        convention_info(*quantized->convention).format, {}, {}, excluded};
    const std::vector<Selection> selections = select_tensors(tensors_, selection_rules);
    for (size_t i = 0; i < tensors_.size(); ++i) {
      const LogicalTensor& tensor = tensors_[i];
      const std::string_view module = module_of(tensor.name);
      const bool is_excluded = exclusions.contains(module.empty() ? tensor.name : module);
      if (tensor.convention && is_excluded) {
        findings_.error(rules::kSurplus, tensor.name,
                        fmt::format("is {}, but config.json excludes its module; loaders will "
                                    "look for a plain weight",
                                    convention_info(*tensor.convention).name));
      } else if (!tensor.convention && !is_excluded && !has_experts_only &&
                 is_expected(selections[i])) {
        findings_.error(rules::kNotQuantized, tensor.name,
                        fmt::format("is {} {}, but config.json declares the weights of linear "
                                    "modules quantized and does not exclude this one",
                                    name(tensor.dtype), shape_text(tensor.shape)));
      }
    }
  }

  static bool is_expected(const Selection& selection) {
    return selection.is_linear && !selection.is_head_or_router;
  }

  void check_layers() {
    std::map<std::string_view, std::set<int64_t>> stacks;
    for (const LogicalTensor& tensor : tensors_) {
      if (const auto split = split_at(tensor.name, "layers")) {
        stacks[split->before].insert(split->number);
      }
    }
    const std::optional<int64_t> declared =
        config_number(configs_, {"num_hidden_layers", "n_layer", "num_layers"});
    for (const auto& [prefix, numbers] : stacks) {
      int64_t count = *numbers.rbegin() + 1;
      if (declared && stacks.size() == 1) count = std::max(count, *declared);
      const MissingNumbers missing = missing_numbers(numbers, count);
      if (missing.count == 0) continue;
      findings_.error(rules::kMissing, "",
                      fmt::format("'{}': {} layers are there, {} were expected{}: missing are {}",
                                  printable(prefix), numbers.size(), count,
                                  declared == count ? " (config.json)" : "", missing.text()));
    }
  }

  // The tensors of one projection of a layer's experts: "up_proj.weight" by expert.
  struct Projection {
    std::map<int64_t, const LogicalTensor*> experts;
  };

  void check_experts() {
    std::map<std::string_view, std::map<std::string_view, Projection>> layers;
    for (const LogicalTensor& tensor : tensors_) {
      if (const auto split = split_at(tensor.name, "experts")) {
        layers[split->before][split->after].experts[split->number] = &tensor;
      }
    }
    const std::optional<int64_t> declared =
        config_number(configs_, {"num_experts", "n_routed_experts", "num_local_experts"});
    for (const auto& [prefix, projections] : layers) {
      int64_t count = 0;
      for (const auto& [unused_name, projection] : projections) {
        count = std::max(count, projection.experts.rbegin()->first + 1);
      }
      if (declared && count > *declared) {
        findings_.error(rules::kSurplus, "",
                        fmt::format("'{}' has {} experts, config.json says {}", printable(prefix),
                                    count, *declared));
      }
      if (declared) count = std::max(count, *declared);
      for (const auto& [rest, projection] : projections) {
        check_projection(std::string(prefix), std::string(rest), projection, count);
      }
    }
  }

  void check_projection(const std::string& prefix, const std::string& rest,
                        const Projection& projection, int64_t count) {
    const std::string pattern = fmt::format("'{}.*.{}'", printable(prefix), printable(rest));
    std::set<int64_t> numbers;
    for (const auto& [number, unused_tensor] : projection.experts) numbers.insert(number);
    const MissingNumbers missing = missing_numbers(numbers, count);
    if (missing.count > 0) {
      findings_.error(
          rules::kExperts, "",
          fmt::format("{} is missing for experts {} of {}", pattern, missing.text(), count));
    }
    const LogicalTensor& first = *projection.experts.begin()->second;
    for (const auto& [number, tensor] : projection.experts) {
      if (tensor->shape != first.shape) {
        findings_.error(rules::kExperts, tensor->name,
                        fmt::format("is {}, but expert {}'s is {}", shape_text(tensor->shape),
                                    projection.experts.begin()->first, shape_text(first.shape)));
      } else if (tensor->convention != first.convention) {
        findings_.error(
            rules::kExperts, tensor->name,
            fmt::format("is {}, but expert {}'s is {}; kernels take the experts of a "
                        "layer in one format",
                        kind_of(*tensor), projection.experts.begin()->first, kind_of(first)));
      }
    }
  }

  static std::string_view kind_of(const LogicalTensor& tensor) {
    return tensor.convention ? convention_info(*tensor.convention).name
                             : narrowfloat::name(tensor.dtype);
  }

  // Weights of one convention of which the config says the same about activations.
  struct ActivationGroup {
    int64_t with_scale = 0;
    std::vector<const LogicalTensor*> without = {};
  };

  void check_input_scales() {
    const ActivationPromises promises(configs_);
    std::map<std::pair<bool, const ConventionSpec*>, ActivationGroup> groups;
    for (const LogicalTensor& tensor : tensors_) {
      if (!tensor.convention) continue;
      const ConventionSpec& spec = convention_spec(*tensor.convention);
      if (!spec.input_scale.exists()) continue;
      ActivationGroup& group = groups[{promises.contains(module_of(tensor.name)), &spec}];
      const size_t position = spec.global_scale.exists() ? 3 : 2;
      if (tensor.parts.size() <= position) {
        group.without.push_back(&tensor);
        continue;
      }
      ++group.with_scale;
      check_input_scale(tensor, tensor.parts[position]);
    }
    for (const auto& [key, group] : groups) {
      judge_missing_input_scales(key.first, *key.second, group);
    }
  }

  void judge_missing_input_scales(bool is_promised, const ConventionSpec& spec,
                                  const ActivationGroup& group) {
    if (group.without.empty()) return;
    const bool is_error = is_promised || group.with_scale > 0;
    if (!is_error && !spec.needs_input_scales) return;
    std::string reason = fmt::format("loaders of {} expect one", spec.info.name);
    if (group.with_scale > 0) reason = fmt::format("{} other weights have one", group.with_scale);
    if (is_promised) {
      reason =
          "config.json promises static activation scales (loaders take a missing one for 1/0; if "
          "only weights are quantized, declare that)";
    }
    findings_.add(rules::kInputScale, is_error ? Severity::kError : Severity::kWarning,
                  group.without.front()->name,
                  fmt::format("has no activation scale, and {} in all have none, but {}",
                              group.without.size(), reason));
  }

  void check_input_scale(const LogicalTensor& tensor, const std::string& part) {
    const std::optional<float> scale = stored_scalar(checkpoint_, *checkpoint_.find(part));
    if (!scale || (std::isfinite(*scale) && *scale > 0)) return;
    findings_.error(rules::kInputScale, tensor.name,
                    fmt::format("'{}' must be finite and positive, got {}; was the expert never "
                                "given a token while calibrating?",
                                printable(part), *scale));
  }

  // Weights that consumers merge have the same columns; gate and up also the same rows.
  void check_merged_shapes() {
    std::map<std::string, std::vector<const LogicalTensor*>> groups;
    for (const LogicalTensor& tensor : tensors_) {
      const std::string key = shared_scale_key(tensor.name);
      if (tensor.shape.size() == 2 && !key.empty()) groups[key].push_back(&tensor);
    }
    for (const auto& [key, members] : groups) {
      const LogicalTensor& first = *members.front();
      const bool is_qkv = key.ends_with("qkv");
      for (const LogicalTensor* member : members) {
        if (member->shape[1] == first.shape[1] && (is_qkv || member->shape == first.shape)) {
          continue;
        }
        findings_.error(
            rules::kMerged, member->name,
            fmt::format("is {}, but '{}', which loaders merge with it, is {}",
                        shape_text(member->shape), printable(first.name), shape_text(first.shape)));
      }
    }
  }

  const Checkpoint& checkpoint_;
  std::span<const LogicalTensor> tensors_;
  std::vector<nlohmann::json> configs_;
  FindingList& findings_;
};

}  // namespace

std::vector<LogicalTensor> recognise_or_find(const Checkpoint& checkpoint, FindingList& findings) {
  try {
    return recognise(checkpoint);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kCorruptData) throw;
    findings.error(rules::kDeclaration, "", error.what());
    return TensorFitter(checkpoint, findings).run(error.what());
  }
}

void check_structure(const Checkpoint& checkpoint, std::span<const LogicalTensor> tensors,
                     FindingList& findings) {
  StructureChecker(checkpoint, tensors, findings).run();
}

}  // namespace narrowfloat
