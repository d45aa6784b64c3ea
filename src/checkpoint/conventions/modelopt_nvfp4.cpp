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
#include "checkpoint/conventions/modelopt_config.h"

namespace narrowfloat {
namespace {

constexpr int kGroupSize = 16;
constexpr std::string_view kWeightOnly = "W4A16_NVFP4";
constexpr std::string_view kWithActivations = "NVFP4";

ModelOptScheme nvfp4_scheme(const QuantizedModel& model) {
  ModelOptScheme scheme{.algorithm = model.has_input_scales ? kWithActivations : kWeightOnly,
                        .weights = {{"dynamic", false},
                                    {"num_bits", 4},
                                    {"type", "float"},
                                    {"group_size", kGroupSize}},
                        .group_size = kGroupSize};
  if (model.has_input_scales) scheme.activations = scheme.weights;
  return scheme;
}

bool is_modelopt_nvfp4_declared(const nlohmann::json& config) {
  return is_modelopt(config, kWithActivations) || is_modelopt(config, kWeightOnly);
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
      .quantization_config =
          [](const QuantizedModel& model) { return modelopt_config(nvfp4_scheme(model), model); },
      .extra_config =
          [](const QuantizedModel& model) {
            return modelopt_config_file(nvfp4_scheme(model), model);
          },
  };
  return kSpec;
}

}  // namespace narrowfloat
