// mxfp4-gpt-oss: MXFP4 experts as gpt-oss stores them, all of a layer in one tensor.
// Written by conversions only: plain experts have other names and layouts.
//
//   X_blocks  U8  [E, N, K/32, 16]   even column in the low nibble
//   X_scales  U8  [E, N, K/32]       UE8M0 bytes
//
// value = code * 2^(scale - 127). These are the names of Hugging Face, where X is
// `model.layers.L.mlp.experts.gate_up_proj` or `.down_proj`; in the model's original files the
// suffixes are `.blocks` and `.scales`, and X is `block.L.mlp.mlp1_weight` or `.mlp2_weight`. Rows
// of the first matrix are gate 0, up 0, gate 1, up 1, ...
//
// The unquantized weight has the name X in both. Hugging Face's model multiplies rows with it from
// the left, so there it is [E, K, N]; the original one is [E, N, K]. K = N is common (2880), so a
// transposed unquantized weight would load without an error.
#include "checkpoint/conventions/convention.h"

namespace narrowfloat {
namespace {

// Loaders convert the experts alone, whatever the list says.
nlohmann::ordered_json gpt_oss_config(const QuantizedModel& model) {
  return {{"quant_method", "mxfp4"}, {"modules_to_not_convert", model.ignored_modules}};
}

}  // namespace

const ConventionSpec& gpt_oss_mxfp4() {
  static const ConventionSpec kSpec = {
      .info = {.id = Convention::kMxfp4GptOss,
               .name = "mxfp4-gpt-oss",
               .description = "MXFP4 experts as gpt-oss stores them, those of a layer together",
               .format = FormatId::kMxfp4,
               .is_written = false},
      .values = {{"_blocks", ".blocks"}, {DType::kU8}},
      .scales = {{"_scales", ".scales"}, {DType::kU8, DType::kF8E8M0}},
      .is_stacked = true,
      .transposed_suffix = "_blocks",
      .is_declared_by =
          [](const nlohmann::json& config) {
            return string_member(config, "quant_method") == "mxfp4";
          },
      .quantization_config = gpt_oss_config,
  };
  return kSpec;
}

}  // namespace narrowfloat
