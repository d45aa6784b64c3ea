// The configs of NVIDIA ModelOpt, shared by its conventions: `quantization_config` of config.json,
// and hf_quant_config.json.
#pragma once

#include <optional>
#include <string_view>

#include <nlohmann/json.hpp>

#include "checkpoint/conventions/convention.h"

namespace narrowfloat {

struct ModelOptScheme {
  std::string_view algorithm;  // "NVFP4": the value of `quant_algo`.
  nlohmann::ordered_json weights;
  nlohmann::ordered_json activations = nullptr;  // Null where they are not quantized.
  std::optional<int> group_size = {};            // None for formats without blocks.
};

nlohmann::ordered_json modelopt_config(const ModelOptScheme& scheme, const QuantizedModel& model);
ConfigFile modelopt_config_file(const ModelOptScheme& scheme, const QuantizedModel& model);

bool is_modelopt(const nlohmann::json& config, std::string_view algorithm);

}  // namespace narrowfloat
