// A file convention: the tensors that a quantized linear weight becomes, and the content of the
// configs.
//
// The weight `X.weight` [N, K] becomes values (codes), block scales, and for NVFP4 a global scale,
// named by suffixes: `X.weight_packed`, `X.weight_scale`, ... A convention is data (suffixes and
// dtypes; the first of each list is written, all are read) and three functions about configs.
// One file each in this folder; registry.cpp has the list. Scales in files are always linear.
// Where experts are stacked, the weight is `X` [E, N, K] or [E, K, N], its parts `X` + suffix.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include "narrowfloat/checkpoint.h"

namespace narrowfloat {

// One of the stored tensors of a weight; without suffixes the convention has no such tensor.
struct PartRule {
  std::vector<std::string_view> suffixes;
  std::vector<DType> dtypes;

  [[nodiscard]] bool exists() const { return !suffixes.empty(); }
};

// The meaning of the scale of the whole tensor in a file.
enum class GlobalScaleSense : int {
  kNone = 0,
  kDecode = 1,  // Small; multiplies: value = code * (scale * global).
  kEncode = 2,  // Large; divides: value = code * (scale / global).
};

// E4M3 bytes that the format's own producer stores where a block scale is zero. A zero scale with
// nonzero codes would decode to zero here and divide by zero elsewhere, so it is never written.
struct ZeroScaleBytes {
  uint8_t zero_block;  // All elements are zero.
  uint8_t underflow;   // Nonzero elements, but the scale rounded to zero.
};

// The content of the configs about a model, besides the convention.
struct QuantizedModel {
  std::vector<std::string> ignored_modules;  // Linear modules that are not quantized.
  std::string writer_version;                // Version of this library.
  // Every quantized weight has the static scale of its activations, which are then quantized, too.
  bool has_input_scales = false;
};

struct ConfigFile {
  std::string name;
  std::string text;
};

struct ConventionSpec {
  ConventionInfo info;
  PartRule values;
  PartRule scales;
  PartRule global_scale = {};
  // Activation scale that producers may add, a part of the weight; in the direction of
  // global_scale.
  PartRule input_scale = {};
  GlobalScaleSense global_sense = GlobalScaleSense::kNone;
  // The shape of both, as written; () and [1] are read.
  std::vector<int64_t> global_shape = {};
  std::optional<ZeroScaleBytes> zero_scales = {};
  // A tensor that repeats what shapes say; a part of the weight.
  PartRule shape = {};
  // An activation scale that is a part of the weight, and is not used.
  PartRule unused_input_scale = {};
  // Tensors that would change the meaning of the codes; weights with one of them are refused.
  std::vector<std::string_view> foreign_suffixes = {};
  // All experts of a layer in one tensor: values [E, N, K / block, block bytes], scales
  // [E, N, K / block]. The n-th suffix of the values goes with the n-th of the scales.
  bool is_stacked = false;
  // Scales of rows are written as [N], not [N, 1], that of a tensor as (), not [1].
  bool has_flat_scales = false;
  // Another convention has the same tensors; this one is recognised where it is declared only.
  bool needs_declaration = false;
  // Loaders quantize activations in any case, and expect their scales.
  bool needs_input_scales = false;
  // The suffix of stacked values whose unquantized weight is [E, K, N].
  std::string_view transposed_suffix = {};

  // Whether a `quantization_config` object declares this convention.
  bool (*is_declared_by)(const nlohmann::json& config) = nullptr;
  // Value of the member `quantization_config` of config.json; nullptr where it is never written.
  nlohmann::ordered_json (*quantization_config)(const QuantizedModel& model) = nullptr;
  // A further config file; nullptr for none.
  ConfigFile (*extra_config)(const QuantizedModel& model) = nullptr;
};

const ConventionSpec& compressed_tensors_nvfp4();
const ConventionSpec& modelopt_nvfp4();
const ConventionSpec& compressed_tensors_mxfp4();
const ConventionSpec& compressed_tensors_mxfp8();
const ConventionSpec& deepseek_fp8();
const ConventionSpec& gpt_oss_mxfp4();
const ConventionSpec& deepseek_mxfp4();
const ConventionSpec& compressed_tensors_int4();
const ConventionSpec& fp8_channel();
const ConventionSpec& fp8_tensor();
const ConventionSpec& modelopt_fp8_channel();
const ConventionSpec& modelopt_fp8_tensor();

// The conventions in the order of the enumeration.
std::span<const ConventionSpec* const> all_convention_specs();
const ConventionSpec& convention_spec(Convention convention);

// The type of block scales, once they are read.
ScaleType scale_type_of(const ConventionSpec& spec);
// Whether a scale is that of the whole tensor, whose maximum it needs.
bool has_tensor_scale(const ConventionSpec& spec);

// "nvfp4-ct, nvfp4-modelopt, ...", for messages: all conventions that are read, that quantizing
// writes, or that converting writes.
std::string convention_names();
std::string written_convention_names();
std::string convert_target_names();

// Stored tensors of the weight `prefix` + "weight" (prefix: "model.layers.0.mlp.up_proj."), in the
// order values, scales, global scale, for a convention without stacked experts. `is_mixed`: in a
// checkpoint of several conventions, where the scales of FP8 blocks have compressed-tensors' name.
std::vector<TensorSpec> stored_parts(const ConventionSpec& spec, std::string_view prefix,
                                     int64_t rows, int64_t cols, bool is_mixed = false);
// The convention that stores what `wanted` does in one checkpoint with `base`; nullptr if there is
// none.
const ConventionSpec* companion_of(const ConventionSpec& base, const ConventionSpec& wanted);
// Whether the config of a checkpoint with `spec` is ModelOpt's.
bool is_of_modelopt(const ConventionSpec& spec);
// The stored activation scale of a module.
TensorSpec input_scale_part(const ConventionSpec& spec, std::string_view module);
// Shapes of the values and scales of a rows x cols weight.
std::vector<int64_t> values_shape(const ConventionSpec& spec, int64_t rows, int64_t cols);
std::vector<int64_t> scales_shape(const ConventionSpec& spec, int64_t rows, int64_t cols);

// A member of a JSON object if it is a string, else "".
std::string string_member(const nlohmann::json& object, std::string_view key);

}  // namespace narrowfloat
