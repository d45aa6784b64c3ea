// nvfp4-ct: the `nvfp4-pack-quantized` format of compressed-tensors (llm-compressor).
//
//   X.weight_packed        U8       [N, K/2]    even column in the low nibble
//   X.weight_scale         F8_E4M3  [N, K/16]
//   X.weight_global_scale  F32      [1]         the ENCODE scale 448 * 6 / amax: divides
//   X.input_global_scale   F32      [1]         that of activations; not always there
//
// value = code * (scale / global). The library replaces a zero scale by its E4M3 epsilon, 0.125.
#include "checkpoint/conventions/compressed_tensors_config.h"

namespace narrowfloat {
namespace {

constexpr CompressedTensorsScheme kNvfp4Scheme{.format = "nvfp4-pack-quantized",
                                               .num_bits = 4,
                                               .strategy = "tensor_group",
                                               .group_size = 16,
                                               .scale_dtype = "torch.float8_e4m3fn"};

constexpr uint8_t kEpsilon = 0x20;  // 0.125

}  // namespace

const ConventionSpec& compressed_tensors_nvfp4() {
  static const ConventionSpec kSpec = {
      .info = {.id = Convention::kNvfp4CompressedTensors,
               .name = "nvfp4-ct",
               .description =
                   "NVFP4 weights as compressed-tensors stores them (vLLM, llm-compressor)",
               .format = FormatId::kNvfp4},
      .values = {{"weight_packed"}, {DType::kU8}},
      .scales = {{"weight_scale"}, {DType::kF8E4M3}},
      .global_scale = {{"weight_global_scale"}, {DType::kF32}},
      .input_scale = {{"input_global_scale"}, {DType::kF32}},
      .global_sense = GlobalScaleSense::kEncode,
      .global_shape = {1},
      .zero_scales = ZeroScaleBytes{.zero_block = kEpsilon, .underflow = kEpsilon},
      .is_declared_by =
          [](const nlohmann::json& config) {
            return is_compressed_tensors(config, kNvfp4Scheme.format);
          },
      .quantization_config =
          [](const QuantizedModel& model) {
            return compressed_tensors_config(kNvfp4Scheme, model);
          },
  };
  return kSpec;
}

}  // namespace narrowfloat
