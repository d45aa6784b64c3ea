// Which stored tensors form quantized weights.
//
// Every tensor that could hold the codes of some convention is fitted against all of them, by name,
// dtype and shape together with its companions. The declaration of the checkpoint must be among the
// conventions that fit; without a declaration exactly one must fit. Nothing later looks at names.
#include <algorithm>
#include <map>
#include <set>

#include "base/throw_error.h"
#include "checkpoint/conventions/convention.h"
#include "checkpoint/conventions/declaration.h"
#include "checkpoint/escape.h"

namespace narrowfloat {
namespace {

std::string shape_text(std::span<const int64_t> shape) {
  std::string text = "[";
  for (const int64_t extent : shape) {
    if (text.size() > 1) text += ", ";
    text += std::to_string(extent);
  }
  return text + "]";
}

std::string tensor_text(const TensorInfo& info) {
  return fmt::format("'{}' {} {}", printable(info.name), name(info.dtype), shape_text(info.shape));
}

bool contains(const std::vector<DType>& dtypes, DType dtype) {
  return std::find(dtypes.begin(), dtypes.end(), dtype) != dtypes.end();
}

// "model.up_proj." for "model.up_proj.weight_packed" and "weight_packed"; empty optional if the
// name ends otherwise.
std::optional<std::string> prefix_of(std::string_view tensor, std::string_view suffix) {
  if (tensor == suffix) return "";
  if (!tensor.ends_with(suffix) || tensor[tensor.size() - suffix.size() - 1] != '.') {
    return std::nullopt;
  }
  return std::string(tensor.substr(0, tensor.size() - suffix.size()));
}

// How one tensor fits one convention: `problem` is empty, or says what is wrong.
struct Fit {
  const ConventionSpec* spec = nullptr;
  LogicalTensor weight = {};
  std::string problem = {};
  bool has_companion = false;  // A tensor of a companion's name is there.

  [[nodiscard]] bool ok() const { return problem.empty(); }
};

class Fitter {
 public:
  Fitter(const Checkpoint& checkpoint, const ConventionSpec& spec)
      : checkpoint_(checkpoint), spec_(spec) {}

  // Empty if `values` cannot be codes of this convention.
  std::optional<Fit> fit(const TensorInfo& values) {
    const std::optional<std::string> prefix = prefix_of(values.name, spec_.values.suffixes[0]);
    if (!prefix || !contains(spec_.values.dtypes, values.dtype)) return std::nullopt;
    fit_ = {.spec = &spec_};
    fit_.weight.name = *prefix + "weight";
    fit_.weight.convention = spec_.info.id;
    add_part(values);
    const CheckpointTensor* scales = find(*prefix, spec_.scales);
    const CheckpointTensor* global = find(*prefix, spec_.global_scale);
    fit_.has_companion = scales != nullptr || global != nullptr;
    check_values(values);
    if (fit_.ok()) check_scales(*prefix, scales);
    if (fit_.ok() && spec_.global_scale.exists()) check_global(*prefix, global);
    if (const auto* input = find(*prefix, spec_.input_scale); fit_.ok() && input != nullptr) {
      add_part(input->info);
    }
    return std::move(fit_);
  }

 private:
  const CheckpointTensor* find(const std::string& prefix, const PartRule& rule) const {
    for (const std::string_view suffix : rule.suffixes) {
      const CheckpointTensor* tensor = checkpoint_.find(prefix + std::string(suffix));
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
      fit_.problem = "must have rank 2 (stacked experts are not readable yet)";
      return;
    }
    const int64_t per_value = 8 / format.element_bits;
    int64_t cols = 0;
    const bool overflow = __builtin_mul_overflow(values.shape[1], per_value, &cols);
    fit_.weight.shape = {values.shape[0], cols};
    // Blocks of 128 columns may be partial at the edge.
    const bool is_partial_ok = format.scale_type == ScaleType::kF32;
    if (overflow || (!is_partial_ok && cols % format.block_cols != 0)) {
      fit_.problem =
          fmt::format("holds {} columns, which is not a multiple of {}", cols, format.block_cols);
    }
  }

  void check_scales(const std::string& prefix, const CheckpointTensor* scales) {
    const std::vector<int64_t> shape =
        scales_shape(spec_, fit_.weight.shape[0], fit_.weight.shape[1]);
    check_companion(prefix, spec_.scales, scales, {shape});
  }

  void check_global(const std::string& prefix, const CheckpointTensor* global) {
    check_companion(prefix, spec_.global_scale, global, {spec_.global_shape, {1}, {}});
  }

  void check_companion(const std::string& prefix, const PartRule& rule,
                       const CheckpointTensor* companion,
                       const std::vector<std::vector<int64_t>>& shapes) {
    const std::string wanted =
        fmt::format("{} {}", name(rule.dtypes.front()), shape_text(shapes.front()));
    if (companion == nullptr) {
      fit_.problem = fmt::format("misses its companion '{}{}' ({})", printable(prefix),
                                 rule.suffixes.front(), wanted);
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
};

class Recogniser {
 public:
  explicit Recogniser(const Checkpoint& checkpoint)
      : checkpoint_(checkpoint), declared_(find_declaration(checkpoint)) {}

  std::vector<LogicalTensor> run() {
    for (const CheckpointTensor& tensor : checkpoint_.tensors()) {
      if (std::optional<LogicalTensor> weight = classify(tensor.info)) add(std::move(*weight));
    }
    if (declared_ && weights_.empty()) throw_nothing_quantized();
    for (const CheckpointTensor& tensor : checkpoint_.tensors()) add_plain(tensor.info);
    std::vector<LogicalTensor> result;
    for (auto& [unused_name, weight] : weights_) result.push_back(std::move(weight));
    return result;
  }

 private:
  // The weight whose codes this tensor holds, if it does.
  std::optional<LogicalTensor> classify(const TensorInfo& info) const {
    std::vector<Fit> fits;
    std::optional<Fit> failed;
    for (const ConventionSpec* spec : all_convention_specs()) {
      std::optional<Fit> fit = Fitter(checkpoint_, *spec).fit(info);
      if (!fit) continue;
      if (declared_ && spec == declared_->spec) {
        if (fit->ok()) return std::move(fit->weight);
        failed = std::move(fit);
      } else if (fit->ok()) {
        fits.push_back(std::move(*fit));
      } else if (!declared_ && !failed && is_suspect(*fit, info)) {
        failed = std::move(fit);
      }
    }
    if (declared_ && !fits.empty()) throw_contradiction(info, fits.front());
    if (fits.size() > 1) throw_ambiguous(info, fits);
    if (fits.size() == 1) return std::move(fits.front().weight);
    if (failed) throw_misfit(info, *failed);
    return std::nullopt;
  }

  // Without a declaration, codes that fit nothing are an error only where something besides the
  // dtype says that they are codes: plain U8 and F8_E4M3 weights exist.
  static bool is_suspect(const Fit& fit, const TensorInfo& info) {
    return fit.has_companion || !prefix_of(info.name, "weight");
  }

  void add(LogicalTensor&& weight) {
    if (checkpoint_.find(weight.name) != nullptr && weight.parts.front() != weight.name) {
      throw_error(ErrorKind::kCorruptData, "{}: '{}' and '{}' are both there: one weight twice",
                  printable(checkpoint_.path()), printable(weight.name),
                  printable(weight.parts.front()));
    }
    for (const std::string& part : weight.parts) used_.insert(part);
    weights_.emplace(weight.name, std::move(weight));
  }

  void add_plain(const TensorInfo& info) {
    if (used_.contains(info.name)) return;
    if (declared_) refuse_orphan(info);
    LogicalTensor plain;
    plain.name = info.name;
    plain.shape = info.shape;
    plain.dtype = info.dtype;
    plain.parts = {info.name};
    plain.size_bytes = info.size_bytes;
    weights_.emplace(info.name, std::move(plain));
  }

  // A scale without codes: the codes are missing, or are not what was declared.
  void refuse_orphan(const TensorInfo& info) const {
    const ConventionSpec& spec = *declared_->spec;
    for (const PartRule* rule : {&spec.scales, &spec.global_scale}) {
      for (const std::string_view suffix : rule->suffixes) {
        const std::optional<std::string> prefix = prefix_of(info.name, suffix);
        if (!prefix) continue;
        const std::string values = *prefix + std::string(spec.values.suffixes[0]);
        const CheckpointTensor* there = checkpoint_.find(values);
        throw_error(ErrorKind::kCorruptData,
                    "{}: {} belongs to '{}', which must be {} as {} declares {}, but is {}",
                    printable(checkpoint_.path()), tensor_text(info), printable(values),
                    name(spec.values.dtypes.front()), declared_->source, spec.info.name,
                    there == nullptr ? "missing" : tensor_text(there->info));
      }
    }
  }

  [[noreturn]] void throw_contradiction(const TensorInfo& info, const Fit& fit) const {
    throw_error(ErrorKind::kCorruptData,
                "{}: tensor {}: {} declares {} ({}), but with its companions it is {}; correct the "
                "declaration or the file",
                printable(checkpoint_.path()), tensor_text(info), declared_->source,
                declared_->spec->info.name, declared_->method, fit.spec->info.name);
  }

  [[noreturn]] void throw_misfit(const TensorInfo& info, const Fit& fit) const {
    const std::string reason = declared_ ? fmt::format("{} declares", declared_->source)
                                         : std::string("the nearest convention is");
    throw_error(ErrorKind::kCorruptData, "{}: tensor {} {}; {} {}", printable(checkpoint_.path()),
                tensor_text(info), fit.problem, reason, fit.spec->info.name);
  }

  [[noreturn]] void throw_ambiguous(const TensorInfo& info, const std::vector<Fit>& fits) const {
    std::string names;
    for (const Fit& fit : fits) {
      names += (names.empty() ? "" : " and ") + std::string(fit.spec->info.name);
    }
    throw_error(ErrorKind::kCorruptData,
                "{}: tensor {} fits {}; a declaration in config.json or in __metadata__ ({}) must "
                "say which it is",
                printable(checkpoint_.path()), tensor_text(info), names, kConventionKey);
  }

  [[noreturn]] void throw_nothing_quantized() const {
    throw_error(ErrorKind::kCorruptData,
                "{}: {} declares {} ({}), but no tensor is stored so; remove the declaration if "
                "the weights are plain",
                printable(checkpoint_.path()), declared_->source, declared_->spec->info.name,
                declared_->method);
  }

  const Checkpoint& checkpoint_;
  std::optional<Declaration> declared_;
  std::map<std::string, LogicalTensor> weights_;  // By name.
  std::set<std::string, std::less<>> used_;       // Stored tensors that are parts of weights.
};

}  // namespace

int64_t LogicalTensor::num_elements() const {
  int64_t count = 1;
  for (const int64_t extent : shape) count *= extent;
  return count;
}

double LogicalTensor::bits_per_element() const {
  const int64_t elements = num_elements();
  return elements == 0 ? 0 : 8.0 * static_cast<double>(size_bytes) / static_cast<double>(elements);
}

std::vector<LogicalTensor> recognise(const Checkpoint& checkpoint) {
  return Recogniser(checkpoint).run();
}

}  // namespace narrowfloat
