// nvfp4-modelopt: NVFP4 as NVIDIA ModelOpt exports it.
//
//   X.weight          U8       [N, K/2]    even column in the low nibble
//   X.weight_scale    F8_E4M3  [N, K/16]   in [2^-9, 448], never zero
//   X.weight_scale_2  F32      ()          the DECODE scale amax / (448 * 6): multiplies
//
//   X.input_scale     F32      ()          the DECODE scale of activations; not always there
//
// value = code * (scale * scale_2). The declaration is in config.json and again in
// hf_quant_config.json. Without activation scales the algorithm is W4A16_NVFP4, ModelOpt's name for
// weights alone: "NVFP4" promises them, and loaders would then miss them.
#include "checkpoint/conventions/convention.h"

namespace narrowfloat {
namespace {

constexpr int kGroupSize = 16;
constexpr std::string_view kWeightOnly = "W4A16_NVFP4";
constexpr std::string_view kWithActivations = "NVFP4";

std::string_view algorithm_of(const QuantizedModel& model) {
  return model.has_input_scales ? kWithActivations : kWeightOnly;
}

nlohmann::ordered_json producer(const QuantizedModel& model) {
  return {{"name", "narrowfloat"}, {"version", model.writer_version}};
}

nlohmann::ordered_json modelopt_nvfp4_config(const QuantizedModel& model) {
  const nlohmann::ordered_json weights = {
      {"dynamic", false}, {"num_bits", 4}, {"type", "float"}, {"group_size", kGroupSize}};
  nlohmann::ordered_json group = {{"weights", weights}};
  if (model.has_input_scales) group["input_activations"] = weights;
  group["targets"] = {"Linear"};
  return {
      {"config_groups", {{"group_0", group}}},
      {"ignore", model.ignored_modules},
      {"quant_algo", algorithm_of(model)},
      {"producer", producer(model)},
      {"quant_method", "modelopt"},
  };
}

ConfigFile hf_quant_config(const QuantizedModel& model) {
  const nlohmann::ordered_json quantization = {
      {"quant_algo", algorithm_of(model)},
      {"kv_cache_quant_algo", nullptr},
      {"group_size", kGroupSize},
      {"exclude_modules", model.ignored_modules},
  };
  const nlohmann::ordered_json root = {{"producer", producer(model)},
                                       {"quantization", quantization}};
  return {"hf_quant_config.json", root.dump(2) + "\n"};
}

bool is_modelopt_nvfp4_declared(const nlohmann::json& config) {
  const std::string algorithm = string_member(config, "quant_algo");
  return string_member(config, "quant_method") == "modelopt" &&
         (algorithm == kWithActivations || algorithm == kWeightOnly);
}

}  // namespace

const ConventionSpec& modelopt_nvfp4() {
  static const ConventionSpec kSpec = {
      .info = {.id = Convention::kNvfp4ModelOpt,
               .name = "nvfp4-modelopt",
               .description = "NVFP4 weights as NVIDIA ModelOpt stores them (TensorRT-LLM, vLLM)",
               .format = FormatId::kNvfp4},
      .values = {{"weight"}, {DType::kU8}},
      .scales = {{"weight_scale"}, {DType::kF8E4M3}},
      .global_scale = {{"weight_scale_2"}, {DType::kF32}},
      .input_scale = {{"input_scale"}, {DType::kF32}},
      .global_sense = GlobalScaleSense::kDecode,
      .global_shape = {},
      // The scales are 1.0 and the smallest scale, 2^-9.
      .zero_scales = ZeroScaleBytes{.zero_block = 0x38, .underflow = 0x01},
      .is_declared_by = is_modelopt_nvfp4_declared,
      .quantization_config = modelopt_nvfp4_config,
      .extra_config = hf_quant_config,
  };
  return kSpec;
}

}  // namespace narrowfloat
