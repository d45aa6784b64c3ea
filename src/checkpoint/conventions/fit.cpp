// See fit.h.
#include "checkpoint/conventions/fit.h"

#include <algorithm>

#include <fmt/format.h>

#include "checkpoint/escape.h"

namespace narrowfloat {
namespace {

bool contains(const std::vector<DType>& dtypes, DType dtype) {
  return std::find(dtypes.begin(), dtypes.end(), dtype) != dtypes.end();
}

class Fitter {
 public:
  Fitter(const Checkpoint& checkpoint, const ConventionSpec& spec)
      : checkpoint_(checkpoint), spec_(spec) {}

  std::optional<Fit> fit(const TensorInfo& values) {
    if (!parse_name(values.name) || !contains(spec_.values.dtypes, values.dtype)) {
      return std::nullopt;
    }
    fit_ = {.spec = &spec_};
    fit_.weight.name = spec_.is_stacked ? stem_ : stem_ + "weight";
    fit_.weight.convention = spec_.info.id;
    fit_.weight.is_transposed =
        spec_.is_stacked && spec_.values.suffixes[variant_] == spec_.transposed_suffix;
    add_part(values);
    const CheckpointTensor* scales = find(spec_.scales);
    const CheckpointTensor* global = find(spec_.global_scale);
    fit_.has_companion = global != nullptr ||
                         (scales != nullptr && scales->info.name != stem_ + kGenericScale.data());
    if (spec_.is_stacked) {
      check_stacked_values(values);
    } else {
      check_values(values);
    }
    if (fit_.ok()) check_companion(spec_.scales, scales, scales_shapes());
    if (fit_.ok() && spec_.global_scale.exists()) {
      check_companion(spec_.global_scale, global, {spec_.global_shape, {1}, {}});
    }
    for (const PartRule* rule : {&spec_.input_scale, &spec_.shape, &spec_.unused_input_scale}) {
      if (const auto* part = find(*rule); fit_.ok() && part != nullptr) add_part(part->info);
    }
    for (const std::string_view suffix : spec_.foreign_suffixes) {
      const std::string name = stem_ + std::string(suffix);
      if (!fit_.ok() || checkpoint_.find(name) == nullptr) continue;
      fit_.problem = fmt::format("has '{}', which is not read", printable(name));
    }
    return std::move(fit_);
  }

 private:
  bool parse_name(std::string_view tensor) {
    for (variant_ = 0; variant_ < spec_.values.suffixes.size(); ++variant_) {
      const std::optional<std::string> stem = stem_of(tensor, spec_.values.suffixes[variant_]);
      if (!stem) continue;
      stem_ = *stem;
      return true;
    }
    return false;
  }

  [[nodiscard]] const CheckpointTensor* find(const PartRule& rule) const {
    for (size_t i = 0; i < rule.suffixes.size(); ++i) {
      if (spec_.is_stacked && i != variant_) continue;
      const CheckpointTensor* tensor = checkpoint_.find(stem_ + std::string(rule.suffixes[i]));
      if (tensor != nullptr) return tensor;
    }
    return nullptr;
  }

  void add_part(const TensorInfo& info) {
    fit_.weight.parts.push_back(info.name);
    fit_.weight.size_bytes += info.size_bytes;
  }

  void check_values(const TensorInfo& values) {
    const FormatInfo& format = format_info(spec_.info.format);
    if (values.shape.size() != 2) {
      fit_.problem = "must have rank 2 (stacked experts are read as mxfp4-gpt-oss only)";
      return;
    }
    const int64_t per_value = bits(values.dtype) / format.element_bits;
    const int64_t cols = values.shape[1] * per_value;  // The reader bounds extents by 2^60.
    fit_.weight.shape = {values.shape[0], cols};
    // Blocks of 128 columns may be partial at the edge.
    const bool is_partial_ok = format.scale_type == ScaleType::kF32;
    if (!is_partial_ok && cols % format.block_cols != 0) {
      fit_.problem =
          fmt::format("holds {} columns, which is not a multiple of {}", cols, format.block_cols);
      return;
    }
    scales_shape_ = scales_shape(spec_, values.shape[0], cols);
  }

  // Those that are read; the first is written.
  [[nodiscard]] std::vector<std::vector<int64_t>> scales_shapes() const {
    switch (spec_.info.scale_extent) {
      case ScaleExtent::kRow:
        return {scales_shape_, {scales_shape_[0]}, {scales_shape_[0], 1}};
      case ScaleExtent::kTensor:
        return {scales_shape_, {}, {1}};
      default:
        return {scales_shape_};
    }
  }

  void check_stacked_values(const TensorInfo& values) {
    const FormatInfo& format = format_info(spec_.info.format);
    const int64_t block_bytes = format.block_cols * format.element_bits / 8;
    if (values.shape.size() != 4 || values.shape[3] != block_bytes) {
      fit_.problem = fmt::format("must be [experts, rows, columns / {}, {}], got {}",
                                 format.block_cols, block_bytes, shape_text(values.shape));
      return;
    }
    const int64_t cols = values.shape[2] * format.block_cols;  // The reader bounds extents.
    fit_.weight.shape = {values.shape[0], values.shape[1], cols};
    if (fit_.weight.is_transposed) std::swap(fit_.weight.shape[1], fit_.weight.shape[2]);
    scales_shape_ = {values.shape[0], values.shape[1], values.shape[2]};
  }

  void check_companion(const PartRule& rule, const CheckpointTensor* companion,
                       const std::vector<std::vector<int64_t>>& shapes) {
    const std::string wanted =
        fmt::format("{} {}", name(rule.dtypes.front()), shape_text(shapes.front()));
    if (companion == nullptr) {
      fit_.problem = fmt::format("misses its companion '{}{}' ({})", printable(stem_),
                                 rule.suffixes[spec_.is_stacked ? variant_ : 0], wanted);
      return;
    }
    const TensorInfo& info = companion->info;
    const bool shape_fits = std::find(shapes.begin(), shapes.end(), info.shape) != shapes.end();
    if (!shape_fits || !contains(rule.dtypes, info.dtype)) {
      fit_.problem = fmt::format("needs a companion {}, got {}", wanted, tensor_text(info));
    }
    add_part(info);
  }

  const Checkpoint& checkpoint_;
  const ConventionSpec& spec_;
  Fit fit_;
  std::string stem_;
  size_t variant_ = 0;  // Index of the values' suffix that the name has.
  std::vector<int64_t> scales_shape_;
};

}  // namespace

std::optional<Fit> fit_weight(const Checkpoint& checkpoint, const ConventionSpec& spec,
                              const TensorInfo& values) {
  return Fitter(checkpoint, spec).fit(values);
}

std::optional<std::string> stem_of(std::string_view tensor, std::string_view suffix) {
  if (!tensor.ends_with(suffix)) return std::nullopt;
  const std::string_view stem = tensor.substr(0, tensor.size() - suffix.size());
  const bool is_component = suffix.front() != '_' && suffix.front() != '.';
  const bool is_stem =
      is_component ? stem.empty() || stem.ends_with('.') : !stem.empty() && !stem.ends_with('.');
  if (!is_stem) return std::nullopt;
  return std::string(stem);
}

std::string tensor_text(const TensorInfo& info) {
  return fmt::format("'{}' {} {}", printable(info.name), name(info.dtype), shape_text(info.shape));
}

std::string shape_text(std::span<const int64_t> shape) {
  std::string text = "[";
  for (const int64_t extent : shape) {
    if (text.size() > 1) text += ", ";
    text += std::to_string(extent);
  }
  return text + "]";
}

}  // namespace narrowfloat
