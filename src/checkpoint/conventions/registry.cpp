// The list of conventions, lookup by name, and facts that follow from their data alone.
#include <array>

#include "base/int_math.h"
#include "base/throw_error.h"
#include "checkpoint/conventions/convention.h"
#include "checkpoint/escape.h"

namespace narrowfloat {
namespace {

struct Alias {
  std::string_view name;
  Convention convention;
};
// A format's own name means the convention that most software loads.
constexpr std::array kAliases = {
    Alias{"nvfp4", Convention::kNvfp4CompressedTensors},
    Alias{"mxfp4", Convention::kMxfp4CompressedTensors},
    Alias{"mxfp8", Convention::kMxfp8CompressedTensors},
};

std::string names_of(std::span<const ConventionSpec* const> specs) {
  std::string names;
  for (const ConventionSpec* spec : specs) {
    if (!names.empty()) names += ", ";
    names += spec->info.name;
  }
  return names;
}

}  // namespace

std::span<const ConventionSpec* const> all_convention_specs() {
  static const std::array kSpecs = {
      &compressed_tensors_nvfp4(),
      &modelopt_nvfp4(),
      &compressed_tensors_mxfp4(),
      &compressed_tensors_mxfp8(),
      &deepseek_fp8(),
      &gpt_oss_mxfp4(),
      &deepseek_mxfp4(),
      &compressed_tensors_int4(),
      &fp8_channel(),
      &fp8_tensor(),
      &modelopt_fp8_channel(),
      &modelopt_fp8_tensor(),
  };
  return kSpecs;
}

const ConventionSpec& convention_spec(Convention convention) {
  for (const ConventionSpec* spec : all_convention_specs()) {
    if (spec->info.id == convention) return *spec;
  }
  throw_invalid("convention: expected one of {}, got the number {}", convention_names(),
                static_cast<int>(convention));
}

std::span<const ConventionInfo> all_conventions() {
  static const std::vector<ConventionInfo> kInfos = [] {
    std::vector<ConventionInfo> infos;
    for (const ConventionSpec* spec : all_convention_specs()) infos.push_back(spec->info);
    return infos;
  }();
  return kInfos;
}

const ConventionInfo& convention_info(Convention convention) {
  return convention_spec(convention).info;
}

std::string_view stored_format(const ConventionInfo& info) {
  if (info.scale_extent == ScaleExtent::kRow) return "fp8_channel";
  if (info.scale_extent == ScaleExtent::kTensor) return "fp8_tensor";
  return info.is_integer ? "int4" : name(info.format);
}

ScaleType scale_type_of(const ConventionSpec& spec) {
  return spec.info.is_integer ? ScaleType::kF32 : format_info(spec.info.format).scale_type;
}

bool has_tensor_scale(const ConventionSpec& spec) {
  return spec.global_scale.exists() || spec.info.scale_extent == ScaleExtent::kTensor;
}

std::string convention_names() { return names_of(all_convention_specs()); }

std::string written_convention_names() {
  std::vector<const ConventionSpec*> written;
  for (const ConventionSpec* spec : all_convention_specs()) {
    if (spec->info.is_written) written.push_back(spec);
  }
  return names_of(written);
}

std::string convert_target_names() {
  std::vector<const ConventionSpec*> targets;
  for (const ConventionSpec* spec : all_convention_specs()) {
    if (spec->info.is_convert_target) targets.push_back(spec);
  }
  return names_of(targets);
}

Convention parse_convention(std::string_view text) {
  for (const ConventionSpec* spec : all_convention_specs()) {
    if (spec->info.name == text) return spec->info.id;
  }
  for (const Alias& alias : kAliases) {
    if (alias.name == text) return alias.convention;
  }
  throw_invalid("format: expected one of {}, or nvfp4, mxfp4, mxfp8 for the -ct ones, got '{}'",
                written_convention_names(), printable(text));
}

std::vector<int64_t> values_shape(const ConventionSpec& spec, int64_t rows, int64_t cols) {
  return {rows, format_info(spec.info.format).element_bits == 4 ? cols / 2 : cols};
}

std::vector<int64_t> scales_shape(const ConventionSpec& spec, int64_t rows, int64_t cols) {
  const bool is_flat = spec.has_flat_scales;
  if (spec.info.scale_extent == ScaleExtent::kTensor) {
    return is_flat ? std::vector<int64_t>{} : std::vector<int64_t>{1};
  }
  if (spec.info.scale_extent == ScaleExtent::kRow) {
    return is_flat ? std::vector{rows} : std::vector{rows, int64_t{1}};
  }
  const FormatInfo& format = format_info(spec.info.format);
  return {ceil_div(rows, format.block_rows), ceil_div(cols, format.block_cols)};
}

std::vector<TensorSpec> stored_parts(const ConventionSpec& spec, std::string_view prefix,
                                     int64_t rows, int64_t cols, bool is_mixed) {
  const auto part = [&](const PartRule& rule, std::vector<int64_t> shape) {
    return TensorSpec{std::string(prefix).append(rule.suffixes.front()), rule.dtypes.front(),
                      std::move(shape)};
  };
  std::vector<TensorSpec> parts = {part(spec.values, values_shape(spec, rows, cols)),
                                   part(spec.scales, scales_shape(spec, rows, cols))};
  if (spec.global_scale.exists()) parts.push_back(part(spec.global_scale, spec.global_shape));
  if (is_mixed) parts[1].name = std::string(prefix) + "weight_scale";
  return parts;
}

bool is_of_modelopt(const ConventionSpec& spec) {
  return &spec == &modelopt_nvfp4() || &spec == &modelopt_fp8_channel() ||
         &spec == &modelopt_fp8_tensor();
}

const ConventionSpec* companion_of(const ConventionSpec& base, const ConventionSpec& wanted) {
  if (&base == &wanted) return &base;
  // Conventions whose weights one config can declare together.
  static const std::array kCompressedTensors = {&compressed_tensors_nvfp4(),
                                                &compressed_tensors_mxfp4(),
                                                &compressed_tensors_mxfp8(),
                                                &deepseek_fp8(),
                                                &fp8_channel(),
                                                &fp8_tensor()};
  // ModelOpt stores MXFP8 as compressed-tensors does.
  static const std::array kModelOpt = {&modelopt_nvfp4(), &compressed_tensors_mxfp8(),
                                       &modelopt_fp8_channel(), &modelopt_fp8_tensor()};
  // DeepSeek's own config has one format.
  const bool is_alone = base.info.id == Convention::kFp8Block || !base.info.is_written;
  if (is_alone) return nullptr;
  const auto together = is_of_modelopt(base)
                            ? std::span<const ConventionSpec* const>(kModelOpt)
                            : std::span<const ConventionSpec* const>(kCompressedTensors);
  for (const ConventionSpec* spec : together) {
    if (stored_format(spec->info) == stored_format(wanted.info)) return spec;
  }
  return nullptr;
}

TensorSpec input_scale_part(const ConventionSpec& spec, std::string_view module) {
  const PartRule& rule = spec.input_scale;
  return {fmt::format("{}.{}", module, rule.suffixes.front()), rule.dtypes.front(),
          spec.global_shape};
}

std::string string_member(const nlohmann::json& object, std::string_view key) {
  if (!object.is_object()) return "";
  const auto found = object.find(std::string(key));
  return found != object.end() && found->is_string() ? found->get<std::string>() : "";
}

}  // namespace narrowfloat
