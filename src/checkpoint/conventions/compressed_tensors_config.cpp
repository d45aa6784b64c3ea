// One group for all Linear modules; `ignore` lists the exceptions by their exact names. Activations
// stay in 16 bits (`input_activations: null`) unless every weight has an activation scale: with a
// larger claim loaders would look for scales that do not exist. The blocks of activations get their
// own scales at run time (`dynamic: local`); the stored one is that of the whole tensor.
#include "checkpoint/conventions/compressed_tensors_config.h"

namespace narrowfloat {

nlohmann::ordered_json compressed_tensors_config(const CompressedTensorsScheme& scheme,
                                                 const QuantizedModel& model) {
  const nlohmann::ordered_json weights = {
      {"num_bits", scheme.num_bits},
      {"type", "float"},
      {"symmetric", true},
      {"group_size", scheme.group_size},
      {"strategy", scheme.strategy},
      {"dynamic", false},
      {"scale_dtype", scheme.scale_dtype},
  };
  nlohmann::ordered_json activations;
  if (model.has_input_scales) {
    activations = weights;
    activations["dynamic"] = "local";
  }
  return compressed_tensors_config(scheme.format, weights, activations, model);
}

nlohmann::ordered_json compressed_tensors_config(std::string_view format,
                                                 const nlohmann::ordered_json& weights,
                                                 const nlohmann::ordered_json& activations,
                                                 const QuantizedModel& model) {
  const nlohmann::ordered_json group = {
      {"targets", {"Linear"}},         {"weights", weights}, {"input_activations", activations},
      {"output_activations", nullptr}, {"format", format},
  };
  return {
      {"quant_method", "compressed-tensors"}, {"format", format},
      {"quantization_status", "compressed"},  {"config_groups", {{"group_0", group}}},
      {"ignore", model.ignored_modules},      {"kv_cache_scheme", nullptr},
      {"global_compression_ratio", nullptr},
  };
}

bool is_compressed_tensors(const nlohmann::json& config, std::string_view format) {
  return string_member(config, "quant_method") == "compressed-tensors" &&
         string_member(config, "format") == format;
}

}  // namespace narrowfloat
