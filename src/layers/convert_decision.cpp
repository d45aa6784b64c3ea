// See convert_decision.h.
#include "layers/convert_decision.h"

#include <algorithm>
#include <cmath>

#include "base/throw_error.h"
#include "checkpoint/escape.h"
#include "layers/row_loader.h"
#include "layers/selection.h"

namespace narrowfloat {
namespace {

constexpr uint64_t kScanBytes = uint64_t{4} << 20;

class Decider {
 public:
  Decider(const Checkpoint& source, bool keep_formats, MemoryPlan& memory)
      : source_(source),
        keep_formats_(keep_formats),
        originals_(ScaleOriginals::read(source)),
        memory_(memory) {}

  Conversions run(std::vector<TargetWeight> weights) {
    for (TargetWeight& weight : weights) decide(std::move(weight));
    decide_powers();
    decide_input_scales();
    return std::move(result_);
  }

 private:
  void decide(TargetWeight weight) {
    auto task = std::make_unique<WeightConversion>();
    task->weight = std::move(weight);
    task->scale_key = shared_scale_key(task->weight.name);
    if (task->scale_key.empty()) task->scale_key = task->weight.name;
    const ConventionInfo& source = source_spec(task->weight).info;
    const ConventionSpec& target = *task->weight.spec;
    const FormatId from = source.format;
    const FormatId to = target.info.format;
    if (source.is_integer) {
      requantize(*task, fmt::format("{} has other values than {}", name(to), source.name));
    } else if (from == to && source.scale_extent >= target.info.scale_extent) {
      // A scale of the tensor may be that of each row.
      task->mapping = Mapping::kKeep;
      keep_global_scale(*task);
    } else if (from == FormatId::kMxfp4 && to == FormatId::kNvfp4) {
      task->mapping = Mapping::kPowers;
      result_.groups[task->scale_key].push_back(task.get());
    } else if (from == FormatId::kMxfp4 && to == FormatId::kMxfp8) {
      task->mapping = Mapping::kWiden;
      task->is_exact = true;
    } else if (from == FormatId::kNvfp4 && to == FormatId::kMxfp4) {
      decide_merge(*task);
    } else if (from == FormatId::kFp8Block128x128 && to == FormatId::kMxfp8) {
      decide_spread(*task);
    } else {
      requantize(*task, fmt::format("{} has other values than {}", stored_format(target.info),
                                    stored_format(source)));
    }
    if (task->mapping == Mapping::kRequantize && has_tensor_scale(target)) {
      result_.groups[task->scale_key].push_back(task.get());
    }
    result_.weights.push_back(std::move(task));
  }

  static void requantize(WeightConversion& task, std::string reason) {
    task.mapping = Mapping::kRequantize;
    task.is_exact = false;
    task.reason = std::move(reason);
  }

  void keep_global_scale(WeightConversion& task) {
    task.is_exact = true;
    if (!task.weight.spec->global_scale.exists()) return;
    const float stored = read_scale(task.source().parts[2]);
    if (!std::isfinite(stored) || stored <= 0) {
      throw_error(ErrorKind::kCorruptData,
                  "{}: tensor '{}': the global scale must be finite and positive, got {}",
                  printable(source_.path()), printable(task.source().parts[2]), stored);
    }
    task.global = convert_scale(task, stored, task.source().parts[2], task.weight.parts[2].name);
    if (task.global.change == 0) return;
    task.is_exact = false;
    task.reason = "the reciprocal of its global scale is no F32 number";
  }

  [[nodiscard]] float read_scale(const std::string& name) const {
    float scale = 0;
    source_.read(*source_.find(name), 0, std::as_writable_bytes(std::span(&scale, 1)));
    return scale;
  }

  // A scale of the whole tensor, of weights or activations, in the target's direction. Scales that
  // no reciprocal gives again are remembered.
  ConvertedScale convert_scale(const WeightConversion& task, float stored, const std::string& name,
                               const std::string& new_name) {
    const ConventionSpec& target = *task.weight.spec;
    if (source_spec(task.weight).global_sense == target.global_sense) return {stored, 0};
    if (const auto original = originals_.find(name, new_name, stored)) return {*original, 0};
    const float reciprocal = 1.0F / stored;
    if (!std::isfinite(reciprocal) || reciprocal == 0) {
      throw_error(ErrorKind::kUnsupported,
                  "{}: tensor '{}': the reciprocal of {} is beyond the range of F32, so {} cannot "
                  "hold it",
                  printable(source_.path()), printable(name), stored, target.info.name);
    }
    if (1.0F / reciprocal == stored) return {reciprocal, 0};
    result_.originals.add(new_name, name, stored);
    const double product = static_cast<double>(stored) * static_cast<double>(reciprocal);
    return {reciprocal, std::abs(product - 1)};
  }

  void decide_merge(WeightConversion& task) {
    task.mapping = Mapping::kMerge;
    task.is_exact = true;
    const bool is_decode = source_spec(task.weight).global_sense == GlobalScaleSense::kDecode;
    bool is_first = true;
    for (const SourceRows& rows : task.weight.sources) {
      const std::optional<int> stored = exponent_of_power(read_scale(rows.tensor->parts[2]));
      const int exponent = is_decode ? stored.value_or(0) : -stored.value_or(0);
      if (!stored || (!is_first && exponent != task.exponent)) {
        requantize(task, "its global scale is no power of two, or there are several");
        return;
      }
      task.exponent = exponent;
      is_first = false;
      if (!fits_mxfp4_scales(*source_.find(rows.tensor->parts[1]), exponent)) {
        requantize(task, "not every 32 columns have one scale that is a power of two of UE8M0");
        return;
      }
    }
  }

  [[nodiscard]] bool fits_mxfp4_scales(const CheckpointTensor& scales, int exponent) const {
    // An even number of bytes: two scales belong together.
    const uint64_t most = std::clamp(memory_.budget() / 2 * 2, uint64_t{2}, kScanBytes);
    std::vector<std::byte> buffer(std::min(most, scales.info.size_bytes));
    for (uint64_t at = 0; at < scales.info.size_bytes; at += buffer.size()) {
      const auto piece =
          std::span(buffer).first(std::min<uint64_t>(buffer.size(), scales.info.size_bytes - at));
      source_.read(scales, at, piece);
      if (!fits_mxfp4(piece, exponent)) return false;
    }
    return true;
  }

  void decide_spread(WeightConversion& task) {
    task.mapping = Mapping::kSpread;
    task.is_exact = true;
    for (const float scale : read_block_scales(source_, task.source())) {
      if (exponent_of_power(scale)) continue;
      requantize(task, fmt::format("a block scale, {}, is no power of two of UE8M0", scale));
      return;
    }
  }

  // The windows of MXFP4 weights: of all that share a global scale together.
  void decide_powers() {
    for (const auto& [key, group] : result_.groups) {
      if (group.front()->mapping != Mapping::kPowers) continue;
      PowerWindow window = scan(group, false);
      // Blocks of zeros do not count, but only the codes show them.
      if (!window.fits()) window = scan(group, true);
      for (WeightConversion* task : group) {
        task->exponent = window.top();
        task->is_exact = task->window.fits_under(window.top());
        if (!task->is_exact) {
          task->reason = fmt::format(
              "its block scales span more than the 2^{} that E4M3 has around one global scale",
              PowerWindow::kSpan);
        }
        const int decode = window.top() - PowerWindow::kTopScaleExponent;
        const bool is_decode = task->weight.spec->global_sense == GlobalScaleSense::kDecode;
        task->global.value = std::ldexp(1.0F, is_decode ? decode : -decode);
      }
    }
  }

  PowerWindow scan(const std::vector<WeightConversion*>& group, bool with_codes) {
    PowerWindow all;
    for (WeightConversion* task : group) {
      task->window = scan(*task, with_codes);
      all.add(task->window);
    }
    return all;
  }

  PowerWindow scan(const WeightConversion& task, bool with_codes) {
    PowerWindow window;
    const TargetWeight& weight = task.weight;
    const SourceRows& rows = weight.sources.front();
    const auto scale_bytes = static_cast<uint64_t>(weight.cols / 32);
    const uint64_t code_bytes = with_codes ? static_cast<uint64_t>(weight.cols / 2) : 0;
    const auto stride = static_cast<uint64_t>(rows.stride);
    const RowRanges ranges =
        memory_.add(weight.name, weight.all_rows(), {.tile = 1, .smallest = 1}, [&](int64_t count) {
          return static_cast<uint64_t>(count) * stride * (scale_bytes + code_bytes);
        });
    for_each_range(ranges, [&](int64_t first, int64_t count) {
      const std::vector<std::byte> scales =
          read_rows(source_, rows, rows.tensor->parts[1], scale_bytes, count, first);
      const std::vector<std::byte> codes =
          read_rows(source_, rows, rows.tensor->parts[0], code_bytes, count, first);
      const int64_t block = window.add(codes, scales);
      if (block < 0) return;
      const int64_t blocks = weight.cols / 32;
      throw_error(ErrorKind::kCorruptData,
                  "{}: tensor '{}': the scale of block [{}, {}] is NaN, which NVFP4 cannot hold; "
                  "repair it",
                  printable(source_.path()), printable(rows.tensor->parts[1]),
                  rows.first + (first + block / blocks) * rows.stride, block % blocks);
    });
    return window;
  }

  // The index of the activation scale among the parts of a weight.
  static size_t input_scale_place(const WeightConversion& weight) {
    return source_spec(weight.weight).global_scale.exists() ? 3 : 2;
  }

  static bool has_input_scale(const WeightConversion& weight) {
    const ConventionSpec& spec = source_spec(weight.weight);
    return (spec.input_scale.exists() || spec.unused_input_scale.exists()) &&
           weight.source().parts.size() > input_scale_place(weight);
  }

  // Another format has activation scales of another unit.
  static bool can_keep_input_scale(const WeightConversion& weight) {
    const ConventionSpec& from = source_spec(weight.weight);
    const ConventionSpec& to = *weight.weight.spec;
    return has_input_scale(weight) && from.input_scale.exists() && to.input_scale.exists() &&
           from.info.format == to.info.format;
  }

  // Activation scales are kept if every weight has one, since loaders expect them of all, or where
  // each format keeps its own config.
  void decide_input_scales() {
    const auto& weights = result_.weights;
    const auto count = [&](bool (*has)(const WeightConversion&)) {
      return static_cast<size_t>(std::count_if(weights.begin(), weights.end(),
                                               [&](const auto& task) { return has(*task); }));
    };
    const size_t with_scale = count(has_input_scale);
    const size_t can_keep = count(can_keep_input_scale);
    const size_t num_kept = keep_formats_ || can_keep == weights.size() ? can_keep : 0;
    if (num_kept > 0) {
      for (const std::unique_ptr<WeightConversion>& task : weights) {
        if (can_keep_input_scale(*task)) keep_input_scale(*task);
      }
    }
    if (num_kept == with_scale) return;
    result_.warnings.push_back(fmt::format(
        "{} of {} weights have an activation scale, which is left out: {}", with_scale - num_kept,
        weights.size(),
        can_keep > num_kept ? "all must have one" : "the target has none, or of another unit"));
  }

  void keep_input_scale(WeightConversion& task) {
    const std::string& name = task.source().parts[input_scale_place(task)];
    const std::optional<float> stored = stored_scalar(source_, *source_.find(name));
    if (!stored || !std::isfinite(*stored) || *stored <= 0) {
      throw_error(ErrorKind::kCorruptData,
                  "{}: tensor '{}': the activation scale must be one number of F32, BF16 or F16, "
                  "finite and positive",
                  printable(source_.path()), printable(name));
    }
    const TensorSpec part = input_scale_part(*task.weight.spec, module_of(task.weight.name));
    const ConvertedScale scale = convert_scale(task, *stored, name, part.name);
    task.input_scale = scale.value;
    task.weight.parts.push_back(part);
    if (scale.change == 0) return;
    task.global.change = std::max(task.global.change, scale.change);
    task.is_exact = false;
    task.reason = "the reciprocal of a scale is no F32 number";
  }

  const Checkpoint& source_;
  bool keep_formats_;
  const ScaleOriginals originals_;
  MemoryPlan& memory_;
  Conversions result_;
};

}  // namespace

std::vector<std::byte> read_rows(const Checkpoint& source, const SourceRows& rows,
                                 const std::string& part, uint64_t row_bytes, int64_t count,
                                 int64_t first) {
  const auto stride = static_cast<uint64_t>(rows.stride);
  const auto wanted = static_cast<uint64_t>(count);
  std::vector<std::byte> bytes(((wanted - 1) * stride + 1) * row_bytes);
  if (bytes.empty()) return bytes;
  const auto begin = static_cast<uint64_t>(rows.first + first * rows.stride);
  source.read(*source.find(part), begin * row_bytes, bytes);
  for (uint64_t row = 1; stride > 1 && row < wanted; ++row) {
    std::copy_n(bytes.begin() + static_cast<std::ptrdiff_t>(row * stride * row_bytes), row_bytes,
                bytes.begin() + static_cast<std::ptrdiff_t>(row * row_bytes));
  }
  bytes.resize(wanted * row_bytes);
  return bytes;
}

Conversions decide_conversions(const Checkpoint& source, std::vector<TargetWeight> weights,
                               bool keep_formats, MemoryPlan& memory) {
  return Decider(source, keep_formats, memory).run(std::move(weights));
}

}  // namespace narrowfloat
