// fp8-block: 128x128 blocks of FP8 as DeepSeek-V3 stores them.
//
//   X.weight            F8_E4M3  [N, K]
//   X.weight_scale_inv  F32      [ceil(N/128), ceil(K/128)]
//
// value = code * scale: despite its name, weight_scale_inv is the DECODE scale. Some releases store
// it as BF16 or F8_E8M0; both widen to F32 exactly. It is called `scale` in DeepSeek-V4 and
// `weight_scale` in the block strategy of compressed-tensors' `float-quantized`, which are read as
// this convention.
#include <algorithm>

#include "checkpoint/conventions/compressed_tensors_config.h"

namespace narrowfloat {
namespace {

const nlohmann::json& block_size() {
  static const nlohmann::json kBlockSize = {128, 128};
  return kBlockSize;
}

// Loaders of this method treat every Linear module as quantized except those that the config lists.
nlohmann::ordered_json deepseek_fp8_config(const QuantizedModel& model) {
  return {
      {"quant_method", "fp8"},
      {"fmt", "e4m3"},
      {"activation_scheme", "dynamic"},
      {"weight_block_size", block_size()},
      {"modules_to_not_convert", model.ignored_modules},
  };
}

// Every group of the config has weights in such blocks.
bool is_compressed_tensors_block(const nlohmann::json& config) {
  if (!is_compressed_tensors(config, "float-quantized")) return false;
  const auto groups = config.find("config_groups");
  if (groups == config.end() || !groups->is_object() || groups->empty()) return false;
  return std::all_of(groups->begin(), groups->end(), [](const nlohmann::json& group) {
    if (!group.is_object()) return false;
    const auto weights = group.find("weights");
    return weights != group.end() && weights->is_object() &&
           string_member(*weights, "strategy") == "block" &&
           string_member(*weights, "type") == "float" && weights->contains("num_bits") &&
           weights->at("num_bits") == 8 && weights->contains("block_structure") &&
           weights->at("block_structure") == block_size();
  });
}

bool is_deepseek_fp8_declared(const nlohmann::json& config) {
  if (is_compressed_tensors_block(config)) return true;
  const std::string element = string_member(config, "fmt");
  const auto block = config.find("weight_block_size");
  return string_member(config, "quant_method") == "fp8" && (element.empty() || element == "e4m3") &&
         block != config.end() && *block == block_size();
}

}  // namespace

const ConventionSpec& deepseek_fp8() {
  static const ConventionSpec kSpec = {
      .info = {.id = Convention::kFp8Block,
               .name = "fp8-block",
               .description = "FP8 weights in 128x128 blocks as DeepSeek-V3 stores them",
               .format = FormatId::kFp8Block128x128},
      .values = {{"weight"}, {DType::kF8E4M3}},
      .scales = {{"weight_scale_inv", "weight_scale", "scale"},
                 {DType::kF32, DType::kBF16, DType::kF8E8M0}},
      .is_declared_by = is_deepseek_fp8_declared,
      .quantization_config = deepseek_fp8_config,
  };
  return kSpec;
}

}  // namespace narrowfloat
