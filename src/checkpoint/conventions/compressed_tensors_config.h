// The config of the compressed-tensors library, shared by its conventions.
#pragma once

#include <string_view>

#include <nlohmann/json.hpp>

#include "checkpoint/conventions/convention.h"

namespace narrowfloat {

// The differences between the weight-only presets of the library (NVFP4A16, MXFP4A16, MXFP8A16).
struct CompressedTensorsScheme {
  std::string_view format;  // "nvfp4-pack-quantized"
  int num_bits;
  std::string_view strategy;  // "tensor_group" where there is a global scale, else "group".
  int group_size;
  std::string_view scale_dtype;  // "torch.uint8"
};

nlohmann::ordered_json compressed_tensors_config(const CompressedTensorsScheme& scheme,
                                                 const QuantizedModel& model);

// The same with weights and activations as a group describes them.
nlohmann::ordered_json compressed_tensors_config(std::string_view format,
                                                 const nlohmann::ordered_json& weights,
                                                 const nlohmann::ordered_json& activations,
                                                 const QuantizedModel& model);

bool is_compressed_tensors(const nlohmann::json& config, std::string_view format);

}  // namespace narrowfloat
