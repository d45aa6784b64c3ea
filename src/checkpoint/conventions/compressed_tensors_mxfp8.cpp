// mxfp8-ct: the `mxfp8-quantized` format of compressed-tensors.
//
//   X.weight        F8_E4M3  [N, K]
//   X.weight_scale  U8       [N, K/32]   UE8M0 bytes; some producers use the dtype F8_E8M0
//
// value = code * 2^(scale - 127). ModelOpt's MXFP8 and the method "mxfp8" of other vendors (which
// call the scale weight_scale_inv) store the same tensors and are read as this convention.
#include "checkpoint/conventions/compressed_tensors_config.h"

namespace narrowfloat {
namespace {

constexpr CompressedTensorsScheme kMxfp8Scheme{.format = "mxfp8-quantized",
                                               .num_bits = 8,
                                               .strategy = "group",
                                               .group_size = 32,
                                               .scale_dtype = "torch.uint8"};

bool is_mxfp8_declared(const nlohmann::json& config) {
  const std::string method = string_member(config, "quant_method");
  if (method == "mxfp8") {
    const auto block = config.find("weight_block_size");
    return block == config.end() || *block == nlohmann::json({1, 32});
  }
  return is_compressed_tensors(config, kMxfp8Scheme.format) ||
         (method == "modelopt" && string_member(config, "quant_algo") == "MXFP8");
}

}  // namespace

const ConventionSpec& compressed_tensors_mxfp8() {
  static const ConventionSpec kSpec = {
      .info = {.id = Convention::kMxfp8CompressedTensors,
               .name = "mxfp8-ct",
               .description = "MXFP8 weights as compressed-tensors stores them",
               .format = FormatId::kMxfp8},
      .values = {{"weight"}, {DType::kF8E4M3}},
      .scales = {{"weight_scale", "weight_scale_inv"}, {DType::kU8, DType::kF8E8M0}},
      .is_declared_by = is_mxfp8_declared,
      .quantization_config =
          [](const QuantizedModel& model) {
            return compressed_tensors_config(kMxfp8Scheme, model);
          },
  };
  return kSpec;
}

}  // namespace narrowfloat
