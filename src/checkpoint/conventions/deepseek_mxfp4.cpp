// mxfp4-deepseek: MXFP4 experts as DeepSeek-V4 stores them, in a model that is fp8-block otherwise.
// Read only.
//
//   X.weight  I8       [N, K/2]    even column in the low nibble
//   X.scale   F8_E8M0  [N, K/32]
//
// value = code * 2^(scale - 127). quantization_config declares fp8-block alone; these experts are
// declared by the member `expert_dtype`: "fp4".
#include "checkpoint/conventions/convention.h"

namespace narrowfloat {

const ConventionSpec& deepseek_mxfp4() {
  static const ConventionSpec kSpec = {
      .info = {.id = Convention::kMxfp4DeepSeek,
               .name = "mxfp4-deepseek",
               .description = "MXFP4 experts as DeepSeek-V4 stores them",
               .format = FormatId::kMxfp4,
               .is_written = false,
               .is_convert_target = false},
      .values = {{"weight"}, {DType::kI8}},
      .scales = {{"scale"}, {DType::kF8E8M0}},
      // This is never a model's only convention.
      .is_declared_by = [](const nlohmann::json&) { return false; },
  };
  return kSpec;
}

}  // namespace narrowfloat
