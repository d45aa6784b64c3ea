// mxfp4-ct: the `mxfp4-pack-quantized` format of compressed-tensors.
//
//   X.weight_packed  U8  [N, K/2]    even column in the low nibble
//   X.weight_scale   U8  [N, K/32]   UE8M0 bytes; some producers use the dtype F8_E8M0
//
// value = code * 2^(scale - 127).
#include "checkpoint/conventions/compressed_tensors_config.h"

namespace narrowfloat {
namespace {

constexpr CompressedTensorsScheme kMxfp4Scheme{.format = "mxfp4-pack-quantized",
                                               .num_bits = 4,
                                               .strategy = "group",
                                               .group_size = 32,
                                               .scale_dtype = "torch.uint8"};

}  // namespace

const ConventionSpec& compressed_tensors_mxfp4() {
  static const ConventionSpec kSpec = {
      .info = {.id = Convention::kMxfp4CompressedTensors,
               .name = "mxfp4-ct",
               .description = "MXFP4 weights as compressed-tensors stores them",
               .format = FormatId::kMxfp4},
      .values = {{"weight_packed"}, {DType::kU8}},
      .scales = {{"weight_scale"}, {DType::kU8, DType::kF8E8M0}},
      .is_declared_by =
          [](const nlohmann::json& config) {
            return is_compressed_tensors(config, kMxfp4Scheme.format);
          },
      .quantization_config =
          [](const QuantizedModel& model) {
            return compressed_tensors_config(kMxfp4Scheme, model);
          },
  };
  return kSpec;
}

}  // namespace narrowfloat
