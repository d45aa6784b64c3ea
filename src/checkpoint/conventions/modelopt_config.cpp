// Loaders read either file, so both say the same.
#include "checkpoint/conventions/modelopt_config.h"

namespace narrowfloat {
namespace {

nlohmann::ordered_json producer(const QuantizedModel& model) {
  return {{"name", "narrowfloat"}, {"version", model.writer_version}};
}

}  // namespace

nlohmann::ordered_json modelopt_config(const ModelOptScheme& scheme, const QuantizedModel& model) {
  nlohmann::ordered_json group = {{"weights", scheme.weights}};
  if (!scheme.activations.is_null()) group["input_activations"] = scheme.activations;
  group["targets"] = {"Linear"};
  return {
      {"config_groups", {{"group_0", group}}},
      {"ignore", model.ignored_modules},
      {"quant_algo", scheme.algorithm},
      {"producer", producer(model)},
      {"quant_method", "modelopt"},
  };
}

ConfigFile modelopt_config_file(const ModelOptScheme& scheme, const QuantizedModel& model) {
  nlohmann::ordered_json quantization = {{"quant_algo", scheme.algorithm},
                                         {"kv_cache_quant_algo", nullptr}};
  if (scheme.group_size) quantization["group_size"] = *scheme.group_size;
  quantization["exclude_modules"] = model.ignored_modules;
  const nlohmann::ordered_json root = {{"producer", producer(model)},
                                       {"quantization", quantization}};
  return {"hf_quant_config.json", root.dump(2) + "\n"};
}

bool is_modelopt(const nlohmann::json& config, std::string_view algorithm) {
  return string_member(config, "quant_method") == "modelopt" &&
         string_member(config, "quant_algo") == algorithm;
}

}  // namespace narrowfloat
