// See format_search.h.
#include "layers/format_search.h"

#include <algorithm>
#include <map>

#include "base/throw_error.h"
#include "checkpoint/escape.h"
#include "layers/error_figures.h"
#include "layers/nonfinite.h"
#include "layers/selection.h"
#include "layers/weight_reader.h"
#include "tensor/block_math.h"

namespace narrowfloat {
namespace {

constexpr const char* kTargetBits = "option target_bits";

// A format that a weight may have, and what it costs.
struct FormatLevel {
  WeightChoice choice;  // Without a convention: kept as it is.
  double bits = 0;      // For one element.
  double noise = 0;
};

// Weights that get the same format.
struct SearchUnit {
  std::vector<SearchedWeight*> weights;
  std::vector<FormatLevel> levels;
  size_t level = 0;
  double elements = 0;
};

struct FormatStep {
  SearchUnit* unit = nullptr;
  size_t level = 0;  // That it leads to.
  double gain = 0;
};

class FormatSearch {
 public:
  FormatSearch(const Checkpoint& source, const SearchOptions& options, MemoryPlan& memory)
      : source_(source), options_(options), memory_(memory) {}

  std::string run(std::vector<SearchedWeight>& weights) {
    std::map<std::string, SearchUnit> units;
    for (SearchedWeight& weight : weights) {
      const std::string key = shared_scale_key(weight.tensor->info.name);
      SearchUnit& unit = units[key.empty() ? weight.tensor->info.name : key];
      unit.weights.push_back(&weight);
      unit.elements += static_cast<double>(weight.tensor->info.num_elements());
    }
    for (auto& [unused_key, unit] : units) {
      if (options_.cancelled && options_.cancelled()) return "";
      measure(unit);
      elements_ += unit.elements;
      bits_ += unit.levels.front().bits * unit.elements;
    }
    const double first_bits = bits_ / elements_;
    if (options_.target_bits < first_bits) {
      throw_invalid("{}: {} bits for each weight are too few; {} takes {:.4f}", kTargetBits,
                    options_.target_bits, options_.base.info.name, first_bits);
    }
    const size_t num_steps = climb(units);
    for (auto& [unused_key, unit] : units) {
      for (SearchedWeight* weight : unit.weights) explain(unit, *weight);
    }
    return fmt::format(
        "{}: {} of {} steps to better formats, from {:.4f} bits for each weight to {:.4f} of {}",
        kTargetBits, num_taken_, num_steps, first_bits, bits_ / elements_, options_.target_bits);
  }

 private:
  // Returns the number of steps there are.
  size_t climb(std::map<std::string, SearchUnit>& units) {
    std::vector<FormatStep> steps;
    for (auto& [unused_key, unit] : units) {
      for (size_t level = 1; level < unit.levels.size(); ++level) {
        const FormatLevel& from = unit.levels[level - 1];
        const FormatLevel& to = unit.levels[level];
        const double gain = (from.noise - to.noise) / (to.bits - from.bits);
        // Not before the step that leads to it.
        steps.push_back({&unit, level, level == 1 ? gain : std::min(gain, steps.back().gain)});
      }
    }
    // Equal gains stay in the order of names, and a unit's steps in their own.
    std::stable_sort(steps.begin(), steps.end(),
                     [](const FormatStep& a, const FormatStep& b) { return a.gain > b.gain; });
    for (const FormatStep& step : steps) {
      SearchUnit& unit = *step.unit;
      if (unit.level + 1 != step.level || step.gain <= 0) continue;
      const double more =
          (unit.levels[step.level].bits - unit.levels[unit.level].bits) * unit.elements;
      if (bits_ + more > options_.target_bits * elements_) continue;
      bits_ += more;
      unit.level = step.level;
      ++num_taken_;
    }
    return steps.size();
  }

  void explain(const SearchUnit& unit, SearchedWeight& weight) const {
    const FormatLevel& level = unit.levels[unit.level];
    weight.choice = level.choice;
    if (unit.level == 0) return;
    const FormatLevel& first = unit.levels.front();
    weight.explanation =
        fmt::format("{}: noise {:.3g} instead of {:.3g}, for {:.3g} bits more", kTargetBits,
                    level.noise, first.noise, level.bits - first.bits);
  }

  void measure(SearchUnit& unit) {
    const WeightChoice& start = unit.weights.front()->choice;
    std::vector<WeightChoice> choices = {start};
    const ConventionSpec* better = companion_of(options_.base, compressed_tensors_mxfp8());
    if (better != nullptr && better != start.spec && fits(unit, *better)) {
      choices.push_back({better, {.math = start.settings.math}});
    }
    for (const WeightChoice& choice : choices) unit.levels.push_back(measured(unit, choice));
    FormatLevel kept;
    for (const SearchedWeight* weight : unit.weights) {
      kept.bits += 8 * static_cast<double>(weight->tensor->info.size_bytes) / unit.elements;
    }
    unit.levels.push_back(kept);
  }

  static bool fits(const SearchUnit& unit, const ConventionSpec& spec) {
    const int64_t multiple = column_multiple(format_info(spec.info.format));
    return std::all_of(unit.weights.begin(), unit.weights.end(), [&](const auto* weight) {
      return weight->tensor->info.shape[1] % multiple == 0;
    });
  }

  FormatLevel measured(const SearchUnit& unit, const WeightChoice& choice) {
    const ConventionSpec& spec = *choice.spec;
    TensorScale scale;
    if (has_tensor_scale(spec)) {
      float amax = 0;
      for (const SearchedWeight* weight : unit.weights) amax = std::max(amax, amax_of(*weight));
      scale = tensor_scale(spec, choice.settings, amax);
    }
    ErrorAccumulator errors;
    double bytes = 0;
    for (const SearchedWeight* weight : unit.weights) {
      const TensorInfo& info = weight->tensor->info;
      bytes +=
          static_cast<double>(QuantizedWeight::stored_bytes(spec, info.shape[0], info.shape[1]) +
                              (spec.global_scale.exists() ? sizeof(float) : 0));
      add_errors_of(*weight->tensor, choice, scale, errors);
    }
    const ErrorFigures figures = figures_of(errors.total());
    return {choice, 8 * bytes / unit.elements, figures.relative_error * figures.relative_error};
  }

  RowRanges ranges_of(const TensorInfo& info, const ConventionSpec& spec) {
    const int64_t tile = format_info(spec.info.format).block_rows;
    const int64_t cols = info.shape[1];
    return memory_.add(
        info.name, info.shape[0], {.tile = tile, .smallest = tile}, [&](int64_t rows) {
          return PlainReader::buffer_bytes(info, rows) +
                 QuantizedWeight::buffer_bytes(spec, rows, cols) +
                 static_cast<uint64_t>(rows * cols) * sizeof(float) + error_buffer_bytes(rows);
        });
  }

  float amax_of(const SearchedWeight& weight) {
    const RowRanges ranges = ranges_of(weight.tensor->info, *weight.choice.spec);
    PlainReader reader(source_, *weight.tensor, ranges.rows_at_a_time);
    float amax = 0;
    for_each_range(ranges, [&](int64_t first, int64_t count) {
      float of_range = 0;
      tensor_amax(load(reader, weight.tensor->info, first, count),
                  TensorView::contiguous(&of_range, DType::kF32, {1}));
      amax = std::max(amax, of_range);
    });
    return amax;
  }

  void add_errors_of(const CheckpointTensor& tensor, const WeightChoice& choice,
                     const TensorScale& scale, ErrorAccumulator& errors) {
    const int64_t cols = tensor.info.shape[1];
    const RowRanges ranges = ranges_of(tensor.info, *choice.spec);
    PlainReader reader(source_, tensor, ranges.rows_at_a_time);
    QuantizedWeight coded(*choice.spec, ranges.rows_at_a_time, cols, scale.stored);
    std::vector<float> decoded(static_cast<size_t>(ranges.rows_at_a_time * cols));
    for_each_range(ranges, [&](int64_t first, int64_t count) {
      const TensorView rows = load(reader, tensor.info, first, count);
      coded.set_rows(count);
      encode(rows, choice.settings, scale.encode, coded);
      coded.decode(TensorView::contiguous(decoded.data(), DType::kF32, {count, cols}));
      add_errors(errors, {first, count, cols}, reader.float_rows(),
                 {DType::kF32, std::as_bytes(std::span(decoded)).data()}, nullptr);
    });
  }

  TensorView load(PlainReader& reader, const TensorInfo& info, int64_t first, int64_t count) const {
    reader.load(first, count);
    const TensorView rows = reader.view();
    const int64_t at = options_.keep_nonfinite ? -1 : first_nonfinite(rows);
    if (at < 0) return rows;
    throw_error(ErrorKind::kCorruptData,
                "{}: tensor '{}' has a NaN or infinity at [{}, {}]; repair it, exclude it, or use "
                "option keep_nonfinite",
                printable(source_.path()), printable(info.name), first + at / info.shape[1],
                at % info.shape[1]);
  }

  const Checkpoint& source_;
  const SearchOptions& options_;
  MemoryPlan& memory_;
  double elements_ = 0;
  double bits_ = 0;  // Sum over all elements.
  size_t num_taken_ = 0;
};

}  // namespace

std::string search_formats(const Checkpoint& source, std::vector<SearchedWeight>& weights,
                           const SearchOptions& options, MemoryPlan& memory) {
  return FormatSearch(source, options, memory).run(weights);
}

}  // namespace narrowfloat
