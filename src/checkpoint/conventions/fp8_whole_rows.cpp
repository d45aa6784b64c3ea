// fp8-channel and fp8-tensor: FP8 with a scale for each output channel, or one for the weight, as
// compressed-tensors' `float-quantized` stores them.
//
//   X.weight        F8_E4M3         [N, K]
//   X.weight_scale  F32, BF16, F16  [N, 1], [N] (fp8-channel); [1], () (fp8-tensor)
//   X.input_scale   F32, BF16, F16  [1], (): the DECODE scale amax / 448 of activations; not always
//                                   there, and not used in fp8-channel
//
// value = code * scale. In memory every 128 columns have the scale of their row or tensor, as in
// blocks of 1 x 128.
#include <algorithm>

#include "checkpoint/conventions/compressed_tensors_config.h"

namespace narrowfloat {
namespace {

constexpr std::string_view kFormat = "float-quantized";

// Every group of the config has weights of this strategy.
bool is_float_quantized(const nlohmann::json& config, std::string_view strategy) {
  if (!is_compressed_tensors(config, kFormat)) return false;
  const auto groups = config.find("config_groups");
  if (groups == config.end() || !groups->is_object() || groups->empty()) return false;
  return std::all_of(groups->begin(), groups->end(), [&](const nlohmann::json& group) {
    if (!group.is_object()) return false;
    const auto weights = group.find("weights");
    if (weights == group.end() || !weights->is_object()) return false;
    const auto symmetric = weights->find("symmetric");
    return string_member(*weights, "strategy") == strategy &&
           string_member(*weights, "type") == "float" && weights->contains("num_bits") &&
           weights->at("num_bits") == 8 && (symmetric == weights->end() || *symmetric != false);
  });
}

bool is_channel_declared(const nlohmann::json& config) {
  return is_float_quantized(config, "channel");
}

bool is_tensor_declared(const nlohmann::json& config) {
  return is_float_quantized(config, "tensor");
}

nlohmann::ordered_json fp8_args(std::string_view strategy) {
  return {{"num_bits", 8},
          {"type", "float"},
          {"symmetric", true},
          {"strategy", strategy},
          {"dynamic", false}};
}

// Activations stay in 16 bits.
nlohmann::ordered_json channel_config(const QuantizedModel& model) {
  return compressed_tensors_config(kFormat, fp8_args("channel"), nullptr, model);
}

nlohmann::ordered_json tensor_config(const QuantizedModel& model) {
  const nlohmann::ordered_json args = fp8_args("tensor");
  const nlohmann::ordered_json none;
  return compressed_tensors_config(kFormat, args, model.has_input_scales ? args : none, model);
}

}  // namespace

const ConventionSpec& fp8_channel() {
  static const ConventionSpec kSpec = {
      .info = {.id = Convention::kFp8Channel,
               .name = "fp8-channel",
               .description = "FP8 weights with a scale per row as compressed-tensors stores them",
               .format = FormatId::kFp8Block1x128,
               .scale_extent = ScaleExtent::kRow},
      .values = {{"weight"}, {DType::kF8E4M3}},
      .scales = {{"weight_scale"}, {DType::kF32, DType::kBF16, DType::kF16}},
      .unused_input_scale = {{"input_scale"}, {DType::kF32, DType::kBF16, DType::kF16}},
      .foreign_suffixes = {"weight_zero_point", "pre_quant_scale"},
      .is_declared_by = is_channel_declared,
      .quantization_config = channel_config,
  };
  return kSpec;
}

const ConventionSpec& fp8_tensor() {
  static const ConventionSpec kSpec = {
      .info = {.id = Convention::kFp8Tensor,
               .name = "fp8-tensor",
               .description = "FP8 weights with one scale as compressed-tensors stores them",
               .format = FormatId::kFp8Block1x128,
               .scale_extent = ScaleExtent::kTensor},
      .values = {{"weight"}, {DType::kF8E4M3}},
      .scales = {{"weight_scale"}, {DType::kF32, DType::kBF16, DType::kF16}},
      .input_scale = {{"input_scale"}, {DType::kF32, DType::kBF16, DType::kF16}},
      .global_shape = {1},
      .foreign_suffixes = {"weight_zero_point", "pre_quant_scale"},
      .is_declared_by = is_tensor_declared,
      .quantization_config = tensor_config,
  };
  return kSpec;
}

}  // namespace narrowfloat
