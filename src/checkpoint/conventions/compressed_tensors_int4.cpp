// int4-ct: symmetric 4-bit integers in groups of 32 of compressed-tensors' `pack-quantized`, as
// Kimi-K2 has its experts. Read only.
//
//   X.weight_packed  I32              [N, K/8]    column 0 in the lowest 4 bits
//   X.weight_scale   BF16, F16, F32   [N, K/32]
//   X.weight_shape   I32 or I64       [2]         N and K, which the other shapes say, too
//
// value = (code - 8) * scale. In memory the codes lie as those of MXFP4 do.
#include <algorithm>

#include "checkpoint/conventions/compressed_tensors_config.h"

namespace narrowfloat {
namespace {

bool is_member(const nlohmann::json& object, const char* key, const nlohmann::json& value) {
  const auto found = object.find(key);
  return found != object.end() && *found == value;
}

// Every group of the config has such weights.
bool is_int4_declared(const nlohmann::json& config) {
  if (!is_compressed_tensors(config, "pack-quantized")) return false;
  const auto groups = config.find("config_groups");
  if (groups == config.end() || !groups->is_object() || groups->empty()) return false;
  return std::all_of(groups->begin(), groups->end(), [](const nlohmann::json& group) {
    const auto weights = group.is_object() ? group.find("weights") : group.end();
    if (!group.is_object() || weights == group.end() || !weights->is_object()) return false;
    const auto order = weights->find("actorder");
    return is_member(*weights, "num_bits", 4) && is_member(*weights, "type", "int") &&
           is_member(*weights, "group_size", 32) && is_member(*weights, "symmetric", true) &&
           (order == weights->end() || order->is_null());
  });
}

}  // namespace

const ConventionSpec& compressed_tensors_int4() {
  static const ConventionSpec kSpec = {
      .info = {.id = Convention::kInt4CompressedTensors,
               .name = "int4-ct",
               .description = "INT4 weights in groups of 32 as compressed-tensors stores them",
               .format = FormatId::kMxfp4,
               .is_integer = true,
               .is_written = false,
               .is_convert_target = false},
      .values = {{"weight_packed"}, {DType::kI32}},
      .scales = {{"weight_scale"}, {DType::kBF16, DType::kF16, DType::kF32}},
      .shape = {{"weight_shape"}, {DType::kI64, DType::kI32}},
      .foreign_suffixes = {"weight_zero_point", "weight_g_idx"},
      .is_declared_by = is_int4_declared,
  };
  return kSpec;
}

}  // namespace narrowfloat
