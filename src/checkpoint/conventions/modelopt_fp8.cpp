// fp8-channel-modelopt and fp8-tensor-modelopt: FP8 with a scale for each output channel, or one
// for the weight, as NVIDIA ModelOpt exports it (FP8_PER_CHANNEL_PER_TOKEN, FP8).
//
//   X.weight        F8_E4M3  [N, K]
//   X.weight_scale  F32      [N] (fp8-channel-modelopt); () (fp8-tensor-modelopt)
//   X.input_scale   F32      ()    the DECODE scale amax / 448 of activations; fp8-tensor-modelopt
//
// value = code * scale. The tensors are those of fp8-channel and fp8-tensor, so that only the
// declaration tells them apart. Both algorithms quantize activations: FP8_PER_CHANNEL_PER_TOKEN
// finds the scale of each token itself, FP8 takes the stored one, and there is no third for weights
// alone.
#include "checkpoint/conventions/modelopt_config.h"

namespace narrowfloat {
namespace {

constexpr std::string_view kChannelAlgorithm = "FP8_PER_CHANNEL_PER_TOKEN";
constexpr std::string_view kTensorAlgorithm = "FP8";

nlohmann::ordered_json fp8_args() {
  return {{"dynamic", false}, {"num_bits", 8}, {"type", "float"}};
}

ModelOptScheme channel_scheme(const QuantizedModel& /*model*/) {
  ModelOptScheme scheme{
      .algorithm = kChannelAlgorithm, .weights = fp8_args(), .activations = fp8_args()};
  scheme.weights["strategy"] = "channel";
  scheme.activations["dynamic"] = true;
  scheme.activations["strategy"] = "token";
  return scheme;
}

ModelOptScheme tensor_scheme(const QuantizedModel& model) {
  ModelOptScheme scheme{.algorithm = kTensorAlgorithm, .weights = fp8_args()};
  if (model.has_input_scales) scheme.activations = fp8_args();
  return scheme;
}

}  // namespace

const ConventionSpec& modelopt_fp8_channel() {
  static const ConventionSpec kSpec = {
      .info = {.id = Convention::kFp8ChannelModelOpt,
               .name = "fp8-channel-modelopt",
               .description = "FP8 weights with a scale per row as NVIDIA ModelOpt stores them",
               .format = FormatId::kFp8Block1x128,
               .scale_extent = ScaleExtent::kRow},
      .values = {{"weight"}, {DType::kF8E4M3}},
      .scales = {{"weight_scale"}, {DType::kF32, DType::kBF16, DType::kF16}},
      .unused_input_scale = {{"input_scale"}, {DType::kF32, DType::kBF16, DType::kF16}},
      .foreign_suffixes = {"weight_zero_point", "pre_quant_scale"},
      .has_flat_scales = true,
      .needs_declaration = true,
      .is_declared_by =
          [](const nlohmann::json& config) { return is_modelopt(config, kChannelAlgorithm); },
      .quantization_config =
          [](const QuantizedModel& model) { return modelopt_config(channel_scheme(model), model); },
      .extra_config =
          [](const QuantizedModel& model) {
            return modelopt_config_file(channel_scheme(model), model);
          },
  };
  return kSpec;
}

const ConventionSpec& modelopt_fp8_tensor() {
  static const ConventionSpec kSpec = {
      .info = {.id = Convention::kFp8TensorModelOpt,
               .name = "fp8-tensor-modelopt",
               .description = "FP8 weights with one scale as NVIDIA ModelOpt stores them",
               .format = FormatId::kFp8Block1x128,
               .scale_extent = ScaleExtent::kTensor},
      .values = {{"weight"}, {DType::kF8E4M3}},
      .scales = {{"weight_scale"}, {DType::kF32, DType::kBF16, DType::kF16}},
      .input_scale = {{"input_scale"}, {DType::kF32, DType::kBF16, DType::kF16}},
      .foreign_suffixes = {"weight_zero_point", "pre_quant_scale"},
      .has_flat_scales = true,
      .needs_declaration = true,
      .needs_input_scales = true,
      .is_declared_by =
          [](const nlohmann::json& config) { return is_modelopt(config, kTensorAlgorithm); },
      .quantization_config =
          [](const QuantizedModel& model) { return modelopt_config(tensor_scheme(model), model); },
      .extra_config =
          [](const QuantizedModel& model) {
            return modelopt_config_file(tensor_scheme(model), model);
          },
  };
  return kSpec;
}

}  // namespace narrowfloat
