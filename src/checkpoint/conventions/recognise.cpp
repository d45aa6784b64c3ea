// Recognition of the stored tensors that form quantized weights.
//
// Every tensor that could hold the codes of some convention is fitted against all of them, by name,
// dtype and shape together with its companions. The declaration of the checkpoint must be among the
// conventions that fit; without a declaration exactly one must fit. Later steps do not look at
// names.
#include <algorithm>
#include <map>
#include <set>

#include "base/throw_error.h"
#include "checkpoint/conventions/convention.h"
#include "checkpoint/conventions/declaration.h"
#include "checkpoint/conventions/fit.h"
#include "checkpoint/escape.h"

namespace narrowfloat {
namespace {

class Recogniser {
 public:
  explicit Recogniser(const Checkpoint& checkpoint)
      : checkpoint_(checkpoint), declared_(find_declaration(checkpoint)) {}

  std::vector<LogicalTensor> run() {
    for (const CheckpointTensor& tensor : checkpoint_.tensors()) {
      if (std::optional<LogicalTensor> weight = classify(tensor.info)) add(std::move(*weight));
    }
    if (declared_) require_weights();
    for (const CheckpointTensor& tensor : checkpoint_.tensors()) add_plain(tensor.info);
    std::vector<LogicalTensor> result;
    for (auto& [unused_name, weight] : weights_) result.push_back(std::move(weight));
    return result;
  }

 private:
  // The weight whose codes this tensor holds, if it holds codes.
  std::optional<LogicalTensor> classify(const TensorInfo& info) const {
    std::vector<Fit> fits;
    std::vector<Fit> declared_fits;
    std::optional<Fit> failed;
    for (const ConventionSpec* spec : all_convention_specs()) {
      const bool is_declared = declared_ && declared_->has(spec);
      if (spec->needs_declaration && !is_declared) continue;
      std::optional<Fit> fit = fit_weight(checkpoint_, *spec, info);
      if (!fit) continue;
      if (is_declared) {
        if (fit->ok()) {
          declared_fits.push_back(std::move(*fit));
        } else {
          failed = std::move(fit);
        }
      } else if (fit->ok()) {
        fits.push_back(std::move(*fit));
      } else if (!declared_ && !failed && is_suspect(*fit, info)) {
        failed = std::move(fit);
      }
    }
    if (declared_fits.size() > 1) throw_ambiguous(info, declared_fits);
    if (!declared_fits.empty()) return std::move(declared_fits.front().weight);
    if (declared_ && !fits.empty()) throw_contradiction(info, fits.front());
    if (fits.size() > 1) throw_ambiguous(info, fits);
    if (fits.size() == 1) return std::move(fits.front().weight);
    if (failed) throw_misfit(info, *failed);
    return std::nullopt;
  }

  // Without a declaration, codes that fit no convention are an error only where more than the dtype
  // suggests codes: unquantized U8 and F8_E4M3 weights exist, and U8 tensors of blocks.
  static bool is_suspect(const Fit& fit, const TensorInfo& info) {
    return fit.has_companion || (!fit.spec->is_stacked && !stem_of(info.name, "weight"));
  }

  void add(LogicalTensor&& weight) {
    if (checkpoint_.find(weight.name) != nullptr && weight.parts.front() != weight.name) {
      throw_twice(weight.name, weight.name, weight.parts.front());
    }
    if (const auto twin = weights_.find(weight.name); twin != weights_.end()) {
      throw_twice(weight.name, twin->second.parts.front(), weight.parts.front());
    }
    for (const std::string& part : weight.parts) used_.insert(part);
    weights_.emplace(weight.name, std::move(weight));
  }

  [[noreturn]] void throw_twice(const std::string& weight, const std::string& first,
                                const std::string& second) const {
    throw_error(
        ErrorKind::kCorruptData, "{}: '{}' and '{}' are both there: '{}' twice; remove one of them",
        printable(checkpoint_.path()), printable(first), printable(second), printable(weight));
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

  // Requires weights of each convention that is declared.
  void require_weights() const {
    for (const ConventionSpec* spec : declared_->specs) {
      const bool is_there = std::any_of(weights_.begin(), weights_.end(), [&](const auto& entry) {
        return entry.second.convention == spec->info.id;
      });
      if (!is_there) throw_nothing_quantized(*spec);
    }
  }

  // Refuses a scale without codes: the codes are missing, or are not as declared. Other modules
  // also have parameters of the name `scale`; for those the weight must have a byte type.
  void refuse_orphan(const TensorInfo& info) const {
    for (const ConventionSpec* spec : declared_->specs) refuse_orphan(info, *spec);
  }

  void refuse_orphan(const TensorInfo& info, const ConventionSpec& spec) const {
    for (const PartRule* rule : {&spec.scales, &spec.global_scale}) {
      for (size_t i = 0; i < rule->suffixes.size(); ++i) {
        const std::optional<std::string> stem = stem_of(info.name, rule->suffixes[i]);
        if (!stem) continue;
        const std::string values =
            *stem + std::string(spec.values.suffixes[spec.is_stacked ? i : 0]);
        const CheckpointTensor* there = checkpoint_.find(values);
        const bool is_generic = rule->suffixes[i] == kGenericScale;
        if (is_generic && (there == nullptr || bits(there->info.dtype) != 8)) continue;
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
                declared_->names(), declared_->method, fit.spec->info.name);
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

  [[noreturn]] void throw_nothing_quantized(const ConventionSpec& spec) const {
    throw_error(ErrorKind::kCorruptData,
                "{}: {} declares {} ({}), but no tensor is stored so; remove the declaration if "
                "the weights are not quantized",
                printable(checkpoint_.path()), declared_->source, spec.info.name,
                declared_->method);
  }

  const Checkpoint& checkpoint_;
  std::optional<Declaration> declared_;
  std::map<std::string, LogicalTensor> weights_;  // Key: name.
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
