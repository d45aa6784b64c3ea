// See mixed_config.h. Targets of different groups never match the same module: which of several
// would count is not the same for all readers.
#include "checkpoint/conventions/mixed_config.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <map>
#include <optional>
#include <set>

namespace narrowfloat {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

constexpr std::string_view kMixedFormat = "mixed-precision";
constexpr std::string_view kMixedAlgorithm = "MIXED_PRECISION";
constexpr std::string_view kFloatQuantized = "float-quantized";
constexpr int kIgnored = -1;

// Formats of compressed-tensors' presets, which a group may be instead of an object.
struct Preset {
  std::string_view name;
  std::string_view format;
};
constexpr std::array kPresets = {
    Preset{"NVFP4", "nvfp4-pack-quantized"}, Preset{"NVFP4A16", "nvfp4-pack-quantized"},
    Preset{"MXFP4", "mxfp4-pack-quantized"}, Preset{"MXFP4A16", "mxfp4-pack-quantized"},
    Preset{"MXFP8", "mxfp8-quantized"},      Preset{"MXFP8A16", "mxfp8-quantized"},
    Preset{"FP8_BLOCK", "float-quantized"},  Preset{"FP8_DYNAMIC", "float-quantized"},
    Preset{"FP8", "float-quantized"},
};

json block_weights() {
  return {{"num_bits", 8},     {"type", "float"},  {"strategy", "block"},
          {"symmetric", true}, {"dynamic", false}, {"block_structure", {128, 128}}};
}

// The weights of presets of FP8; the others have a format that says it.
json preset_weights(std::string_view preset) {
  if (preset == "FP8_BLOCK") return block_weights();
  return {{"num_bits", 8},
          {"type", "float"},
          {"strategy", preset == "FP8" ? "tensor" : "channel"},
          {"symmetric", true},
          {"dynamic", false}};
}

// The format of a group that does not name one; empty if its weights are of no readable format.
std::string format_of_weights(const json& group) {
  const auto weights = group.find("weights");
  if (weights == group.end() || string_member(*weights, "type") != "float") return "";
  const auto number = [&](const char* key) {
    const auto found = weights->find(key);
    return found != weights->end() && found->is_number_integer() ? found->get<int64_t>() : 0;
  };
  if (number("num_bits") == 4 && number("group_size") == 16) return "nvfp4-pack-quantized";
  if (number("num_bits") == 4 && number("group_size") == 32) return "mxfp4-pack-quantized";
  if (number("num_bits") == 8 && number("group_size") == 32) return "mxfp8-quantized";
  return number("num_bits") == 8 ? "float-quantized" : "";
}

// A group as the config of a model of one format. `whole`: the format of all groups that name none.
json compressed_tensors_of(const std::string& name, json group, const std::string& whole) {
  std::string format;
  for (const Preset& preset : kPresets) {
    if (!group.is_array() || preset.name != name) continue;
    format = preset.format;
    group = json::object();
    if (format == kFloatQuantized) group["weights"] = preset_weights(preset.name);
  }
  if (format.empty() && group.is_object()) format = string_member(group, "format");
  if (format.empty() && group.is_object() && whole != kMixedFormat) format = whole;
  if (format.empty() && group.is_object()) format = format_of_weights(group);
  return {{"quant_method", "compressed-tensors"},
          {"format", format.empty() ? "of the group " + name : format},
          {"config_groups", {{name, group}}}};
}

std::vector<json> split_compressed_tensors(const json& config) {
  const auto groups = config.find("config_groups");
  if (groups == config.end() || !groups->is_object()) return {config};
  std::vector<json> parts;
  // Groups of FP8 may have scales of different extents.
  const std::string whole = string_member(config, "format");
  bool is_mixed = whole == kMixedFormat || whole == kFloatQuantized;
  for (const auto& [name, group] : groups->items()) {
    const bool has_weights =
        !group.is_object() || !group.contains("weights") || !group.at("weights").is_null();
    if (!has_weights) continue;
    parts.push_back(compressed_tensors_of(name, group, whole));
    const std::string format = group.is_object() ? string_member(group, "format") : "";
    is_mixed = is_mixed || (!format.empty() && format != whole);
  }
  return is_mixed ? parts : std::vector<json>{config};
}

std::vector<json> split_modelopt(const json& config) {
  const auto layers = config.find("quantized_layers");
  if (layers == config.end() || !layers->is_object()) return {config};
  std::map<std::string, json> parts;  // Key: the algorithm.
  for (const auto& [unused_name, layer] : layers->items()) {
    const std::string algorithm = string_member(layer, "quant_algo");
    json& part = parts[algorithm];
    part = {{"quant_method", "modelopt"}, {"quant_algo", algorithm}};
    if (layer.is_object() && layer.contains("group_size")) part["group_size"] = layer["group_size"];
  }
  std::vector<json> list;
  list.reserve(parts.size());
  for (auto& [unused_algorithm, part] : parts) list.push_back(std::move(part));
  return list;
}

// ---- Writing

// "model\.layers\.\d+\.mlp": all modules whose names differ in numbers only.
std::string pattern_of(std::string_view module) {
  std::string pattern;
  for (size_t begin = 0; begin <= module.size();) {
    const size_t end = std::min(module.find('.', begin), module.size());
    const std::string_view part = module.substr(begin, end - begin);
    const bool is_number =
        !part.empty() && part.find_first_not_of("0123456789") == std::string_view::npos;
    if (begin > 0) pattern += "\\.";
    for (const char c : is_number ? std::string_view{} : part) {
      const bool is_plain = c == '_' || std::isalnum(static_cast<unsigned char>(c)) != 0;
      if (!is_plain) pattern += '\\';
      pattern += c;
    }
    if (is_number) pattern += "\\d+";
    begin = end + 1;
  }
  return pattern;
}

class TargetLists {
 public:
  TargetLists(std::span<const FormatGroup> groups, const QuantizedModel& model) {
    for (const std::string& module : model.ignored_modules) add(module, kIgnored);
    int index = 0;
    for (const FormatGroup& group : groups) {
      for (const std::string& module : group.modules) add(module, index);
      ++index;
    }
  }

  [[nodiscard]] std::vector<std::string> of(const FormatGroup& group) const {
    std::set<std::string> targets;
    for (const std::string& module : group.modules) {
      const std::string pattern = pattern_of(module);
      const bool is_alone = groups_of_.at(pattern).size() == 1;
      targets.insert(is_alone ? "re:" + pattern + "$" : module);
    }
    return {targets.begin(), targets.end()};
  }

 private:
  void add(const std::string& module, int group) { groups_of_[pattern_of(module)].insert(group); }

  std::map<std::string, std::set<int>> groups_of_;  // Key: pattern.
};

bool has_modelopt(std::span<const FormatGroup> groups) {
  return std::any_of(groups.begin(), groups.end(),
                     [](const FormatGroup& group) { return is_of_modelopt(*group.spec); });
}

QuantizedModel model_of(const FormatGroup& group, const QuantizedModel& model) {
  QuantizedModel alone = model;
  alone.has_input_scales = group.has_input_scales;
  return alone;
}

// The only group that a convention writes when it is alone.
ordered_json own_group(const FormatGroup& group, const QuantizedModel& model) {
  const ConventionSpec& spec = *group.spec;
  if (spec.info.id == Convention::kFp8Block) {
    return {{"targets", nullptr},
            {"weights", block_weights()},
            {"input_activations", nullptr},
            {"output_activations", nullptr},
            {"format", "float-quantized"}};
  }
  return spec.quantization_config(model_of(group, model))["config_groups"]["group_0"];
}

ordered_json modelopt_group(const FormatGroup& group, const QuantizedModel& model) {
  if (is_of_modelopt(*group.spec)) return own_group(group, model);
  const ordered_json weights = {
      {"dynamic", false}, {"num_bits", 8}, {"type", "float"}, {"group_size", 32}};
  return {{"weights", weights}};
}

ordered_json layer_of(const FormatGroup& group, const QuantizedModel& model) {
  ordered_json layer = {{"quant_algo", "MXFP8"}};
  if (is_of_modelopt(*group.spec)) {
    layer["quant_algo"] = group.spec->quantization_config(model_of(group, model))["quant_algo"];
  }
  if (group.spec->info.scale_extent == ScaleExtent::kBlock) {
    layer["group_size"] = format_info(group.spec->info.format).block_cols;
  }
  return layer;
}

ordered_json quantized_layers(std::span<const FormatGroup> groups, const QuantizedModel& model) {
  std::map<std::string, ordered_json> layers;
  for (const FormatGroup& group : groups) {
    const ordered_json layer = layer_of(group, model);
    for (const std::string& module : group.modules) layers[module] = layer;
  }
  return layers;
}

ordered_json mixed_modelopt_config(std::span<const FormatGroup> groups,
                                   const QuantizedModel& model) {
  ordered_json config = modelopt_nvfp4().quantization_config(model);
  config["quant_algo"] = kMixedAlgorithm;
  config["config_groups"] = ordered_json::object();
  for (size_t i = 0; i < groups.size(); ++i) {
    ordered_json group = modelopt_group(groups[i], model);
    group["targets"] = groups[i].modules;
    config["config_groups"]["group_" + std::to_string(i)] = group;
  }
  config["quantized_layers"] = quantized_layers(groups, model);
  return config;
}

}  // namespace

std::vector<json> split_by_format(const json& config) {
  const std::string method = string_member(config, "quant_method");
  std::vector<json> parts;
  if (method == "compressed-tensors") {
    parts = split_compressed_tensors(config);
  } else if (method == "modelopt" && string_member(config, "quant_algo") == kMixedAlgorithm) {
    parts = split_modelopt(config);
  } else {
    parts = {config};
  }
  // Experts in NVFP4 beside layers of the method.
  const std::string experts = string_member(config, "moe_quant_algo");
  if (!experts.empty()) parts.push_back({{"quant_method", "modelopt"}, {"quant_algo", experts}});
  return parts;
}

ordered_json mixed_quantization_config(std::span<const FormatGroup> groups,
                                       const QuantizedModel& model) {
  if (has_modelopt(groups)) return mixed_modelopt_config(groups, model);
  ordered_json config = compressed_tensors_nvfp4().quantization_config(model);
  const bool has_one_format = std::all_of(groups.begin(), groups.end(), [&](const auto& group) {
    return group.spec == groups.front().spec;
  });
  config["format"] =
      has_one_format ? own_group(groups.front(), model)["format"] : ordered_json(kMixedFormat);
  config["config_groups"] = ordered_json::object();
  const TargetLists targets(groups, model);
  for (size_t i = 0; i < groups.size(); ++i) {
    ordered_json group = own_group(groups[i], model);
    group["targets"] = targets.of(groups[i]);
    config["config_groups"]["group_" + std::to_string(i)] = group;
  }
  return config;
}

std::vector<ConfigFile> mixed_extra_configs(std::span<const FormatGroup> groups,
                                            const QuantizedModel& model) {
  if (!has_modelopt(groups)) return {};
  ConfigFile file = modelopt_nvfp4().extra_config(model);
  ordered_json root = ordered_json::parse(file.text);
  ordered_json& quantization = root["quantization"];
  quantization["quant_algo"] = kMixedAlgorithm;
  quantization.erase("group_size");
  quantization["quantized_layers"] = quantized_layers(groups, model);
  file.text = root.dump(2) + "\n";
  return {file};
}

}  // namespace narrowfloat
