// Converts a quantized checkpoint to another convention. Codes and scales are kept wherever the
// target can hold the same values; other weights are decoded and quantized again, if that is
// allowed.
//
// How each weight is converted is decided before anything is written (convert_decision.h).
#include <algorithm>
#include <chrono>
#include <cmath>
#include <map>
#include <memory>
#include <optional>

#include "base/throw_error.h"
#include "checkpoint/config_text.h"
#include "checkpoint/conventions/declaration.h"
#include "checkpoint/escape.h"
#include "layers/config_rewrite.h"
#include "layers/convert_decision.h"
#include "layers/exact_conversion.h"
#include "layers/format_groups.h"
#include "layers/memory_plan.h"
#include "layers/nonfinite.h"
#include "layers/quantized_weight.h"
#include "layers/rewrite.h"
#include "layers/row_loader.h"
#include "layers/selection.h"
#include "layers/source_facts.h"
#include "narrowfloat/runtime.h"

namespace narrowfloat {
namespace {

constexpr const char* kConverted = "convert";
constexpr const char* kRequantized = "requantize";

struct ConvertTask {
  const WeightConversion& conversion;
  RowRanges ranges = {};
  size_t report = 0;  // Index into CheckpointReport::tensors.

  [[nodiscard]] const TargetWeight& weight() const { return conversion.weight; }
};

class CheckpointConverter {
 public:
  CheckpointConverter(const std::string& source, const ConvertCheckpointOptions& options)
      : options_(options),
        spec_(convention_spec(options.to)),
        settings_{options.math, options.mx_scale, options.scale_search},
        source_(source),
        memory_(memory_budget(options.max_memory_bytes)) {}

  CheckpointReport run(const std::string& target) {
    const auto start = std::chrono::steady_clock::now();
    check_options();
    check_number_of_tensors(source_);
    report_.warnings = source_warnings(source_);
    plan();
    memory_.check();
    complete_report(rewrite_checkpoint(make_job(target)), memory_, start, report_);
    report_.total = figures_of(total_.total());
    return std::move(report_);
  }

 private:
  void check_options() const {
    if (!spec_.info.is_convert_target) {
      throw_invalid("option to: '{}' is a convention that is read only; expected one of {}",
                    spec_.info.name, convert_target_names());
    }
    if (options_.exact_only && options_.lossy) {
      throw_invalid("option exact_only: excludes option lossy; use one of them");
    }
    if (options_.keep_formats && options_.lossy) {
      throw_invalid("option keep_formats: excludes option lossy; use one of them");
    }
    check_encode_settings(settings_, spec_);
    check_max_shard_bytes(options_.max_shard_bytes);
  }

  void plan() {
    tensors_ = recognise(source_);
    ConvertPlan plan = plan_conversion(tensors_, spec_, options_.keep_formats, source_.path());
    if (plan.weights.empty()) {
      throw_invalid("{}: no tensor is quantized, so there is nothing to convert; quantize it",
                    printable(source_.path()));
    }
    conversions_ =
        decide_conversions(source_, std::move(plan.weights), options_.keep_formats, memory_);
    report_.warnings.insert(report_.warnings.end(), conversions_.warnings.begin(),
                            conversions_.warnings.end());
    for (const auto& conversion : conversions_.weights) {
      ConvertTask& task =
          *tasks_.emplace_back(std::make_unique<ConvertTask>(ConvertTask{*conversion}));
      add_task(task);
      formats_.add(*task.weight().spec, conversion->input_scale.has_value(),
                   module_of(conversion->weight.name));
      tasks_of_.emplace(conversion.get(), &task);
    }
    for (TargetBias& bias : plan.biases) add_bias(std::move(bias));
    for (const LogicalTensor* tensor : plan.copies) add_copy(*tensor);
    refuse_inexact();
    warn_of_lost_settings();
    for (std::string& warning : formats_.warnings()) {
      report_.warnings.push_back(std::move(warning));
    }
  }

  void refuse_inexact() {
    const auto& weights = conversions_.weights;
    const auto is_changed = [](const auto& weight) { return !weight->is_exact; };
    const auto is_lossy = [](const auto& weight) { return weight->has_values(); };
    const auto first_changed = std::find_if(weights.begin(), weights.end(), is_changed);
    if (options_.exact_only && first_changed != weights.end()) {
      throw_invalid("option exact_only: {} of {} weights would change, the first is '{}': {}",
                    std::count_if(weights.begin(), weights.end(), is_changed), weights.size(),
                    printable((*first_changed)->weight.name), (*first_changed)->reason);
    }
    const auto first_lossy = std::find_if(weights.begin(), weights.end(), is_lossy);
    if (options_.lossy || first_lossy == weights.end()) return;
    const std::string text = fmt::format(
        "{} of {} weights cannot keep their values in {}, the first is '{}': {}; option lossy "
        "quantizes them again{}",
        std::count_if(weights.begin(), weights.end(), is_lossy), weights.size(), spec_.info.name,
        printable((*first_lossy)->weight.name), (*first_lossy)->reason,
        can_keep_formats() ? ", option keep_formats keeps the format of each" : "");
    if (!options_.dry_run) throw_invalid("{}: {}", printable(source_.path()), text);
    report_.warnings.push_back(text);
  }

  // Whether the source has several formats which all have a convention beside the target's.
  [[nodiscard]] bool can_keep_formats() const {
    const auto& weights = conversions_.weights;
    const std::string_view first = stored_format(source_spec(weights.front()->weight).info);
    const bool is_mixed = std::any_of(weights.begin(), weights.end(), [&](const auto& weight) {
      return stored_format(source_spec(weight->weight).info) != first;
    });
    return is_mixed && std::all_of(weights.begin(), weights.end(), [&](const auto& weight) {
             return companion_of(spec_, source_spec(weight->weight)) != nullptr;
           });
  }

  // The config of the source may declare more than the target's does.
  void warn_of_lost_settings() {
    if (source_.config_text().empty()) return;
    const auto config = nlohmann::json::parse(source_.config_text());
    const auto found = config.find("quantization_config");
    if (found == config.end() || !found->is_object()) return;
    for (const char* key : {"kv_cache_scheme", "kv_cache_quant_algo"}) {
      const auto member = found->find(key);
      if (member == found->end() || member->is_null()) continue;
      report_.warnings.push_back(fmt::format(
          "config.json: '{}' declares a quantized KV cache; the target's config does not", key));
    }
  }

  // --- Items of the target ----------------------------------------------------------------------

  void add_task(ConvertTask& task) {
    const TargetWeight& weight = task.weight();
    task.ranges = memory_.add(weight.name, weight.all_rows(), RowLoader::grid(weight),
                              [&](int64_t rows) { return range_cost(task, rows); });
    const ConventionSpec& from = source_spec(weight);
    TensorReport report;
    report.name = weight.name;
    report.action = task.conversion.has_values() ? kRequantized : kConverted;
    report.reason = task.conversion.reason;
    const ConventionSpec& to = *weight.spec;
    report.format = to.info.name;
    report.shape = weight.shape;
    report.source_bytes = QuantizedWeight::stored_bytes(from, weight.all_rows(), weight.cols);
    if (from.global_scale.exists()) report.source_bytes += weight.sources.size() * sizeof(float);
    report.target_bytes = QuantizedWeight::stored_bytes(to, weight.all_rows(), weight.cols) +
                          (weight.parts.size() - 2) * sizeof(float);
    ConversionFigures& figures = report.conversion.emplace();
    figures.is_exact = task.conversion.is_exact;
    figures.blocks = task.conversion.num_blocks();
    figures.global_scale_change = task.conversion.global.change;
    if (!task.conversion.has_values()) figures.exact_blocks = figures.blocks;
    report_.quantized_source_bytes += report.source_bytes;
    task.report = report_.tensors.size();

    const SourceRows& rows = weight.sources.front();
    const CheckpointTensor& values = *source_.find(rows.tensor->parts.front());
    RewriteItem item;
    item.name = weight.name;
    item.tensors = weight.parts;
    item.source_bytes = report.source_bytes;
    item.source_shard = values.shard;
    item.source_offset = values.info.offset + static_cast<uint64_t>(rows.first);
    item.write = [this, &task](SafetensorsWriter& writer) { convert_weight(task, writer); };
    items_.push_back(std::move(item));
    report_.tensors.push_back(std::move(report));
  }

  uint64_t range_cost(const ConvertTask& task, int64_t rows) const {
    const TargetWeight& weight = task.weight();
    uint64_t cost = 0;
    if (task.conversion.mapping != Mapping::kRequantize)
      cost += RowLoader::buffer_bytes(weight, rows, false);
    if (task.conversion.mapping != Mapping::kKeep) {
      cost += QuantizedWeight::buffer_bytes(*weight.spec, rows, weight.cols);
    }
    if (task.conversion.has_values()) {
      cost += RowLoader::buffer_bytes(weight, rows, true) + error_buffer_bytes(rows) +
              static_cast<uint64_t>(2 * rows * weight.cols) * sizeof(float);
    }
    return cost;
  }

  void add_copy(const LogicalTensor& tensor) {
    TensorReport& report = report_.tensors.emplace_back();
    report.name = tensor.name;
    report.action = "copy";
    report.reason = "not quantized";
    report.shape = tensor.shape;
    report.source_bytes = report.target_bytes = tensor.size_bytes;
    if (is_linear_weight(tensor)) model_.ignored_modules.emplace_back(module_of(tensor.name));
    memory_.add_copy(tensor.size_bytes);
    items_.push_back(copy_item(source_, *source_.find(tensor.name),
                               [this] { return memory_.copy_buffer_bytes(); }));
  }

  void add_bias(TargetBias&& moved) {
    const auto bias = std::make_shared<const TargetBias>(std::move(moved));
    const LogicalTensor& source = *bias->sources.front().tensor;
    const uint64_t row_bytes =
        static_cast<uint64_t>(bias->cols) * static_cast<uint64_t>(bits(bias->tensor.dtype)) / 8;
    (void)memory_.add(bias->tensor.name, 1, {}, [&](int64_t) {
      return row_bytes * (1 + static_cast<uint64_t>(bias->sources.front().stride));
    });
    const uint64_t bytes = row_bytes * static_cast<uint64_t>(bias->experts);
    TensorReport& report = report_.tensors.emplace_back();
    report.name = bias->tensor.name;
    report.action = kConverted;
    report.shape = bias->tensor.shape;
    report.source_bytes = report.target_bytes = bytes;
    const CheckpointTensor& stored = *source_.find(source.name);
    RewriteItem item;
    item.name = bias->tensor.name;
    item.tensors = {bias->tensor};
    item.source_bytes = bytes;
    item.source_shard = stored.shard;
    item.source_offset = stored.info.offset + static_cast<uint64_t>(bias->sources.front().first);
    item.write = [this, bias](SafetensorsWriter& writer) { write_bias(*bias, writer); };
    items_.push_back(std::move(item));
  }

  void write_bias(const TargetBias& bias, SafetensorsWriter& writer) const {
    const auto element = static_cast<uint64_t>(bits(bias.tensor.dtype)) / 8;
    const auto ways =
        static_cast<uint64_t>(bias.sources.size()) / static_cast<uint64_t>(bias.experts);
    const auto cols = static_cast<uint64_t>(bias.cols);
    std::vector<std::byte> row(cols * element);
    for (uint64_t expert = 0; expert < static_cast<uint64_t>(bias.experts); ++expert) {
      for (uint64_t way = 0; way < ways; ++way) {
        const SourceRows& source = bias.sources[expert * ways + way];
        const std::vector<std::byte> read = read_rows(source_, source, source.tensor->name, element,
                                                      static_cast<int64_t>(cols / ways));
        for (uint64_t i = 0; i < cols / ways; ++i) {
          std::copy_n(read.begin() + static_cast<std::ptrdiff_t>(i * element), element,
                      row.begin() + static_cast<std::ptrdiff_t>((i * ways + way) * element));
        }
      }
      writer.write(bias.tensor.name, expert * row.size(), row);
    }
  }

  // --- The target's files -----------------------------------------------------------------------

  RewriteJob make_job(const std::string& target) {
    std::sort(report_.tensors.begin(), report_.tensors.end(),
              [](const TensorReport& a, const TensorReport& b) { return a.name < b.name; });
    for (size_t i = 0; i < report_.tensors.size(); ++i) by_name_[report_.tensors[i].name] = i;
    for (const std::unique_ptr<ConvertTask>& task : tasks_)
      task->report = by_name_.at(task->weight().name);
    model_.writer_version = version();
    ignore_untied_head(source_, model_);
    RewriteJob job{.source = source_, .target = target, .items = std::move(items_)};
    job.metadata = metadata();
    set_options(options_, job);
    if (!source_.is_directory()) return job;
    formats_.set_configs(model_, job);
    if (!conversions_.originals.is_empty()) {
      job.extra_configs.push_back({kScalesFileName, conversions_.originals.to_json()});
    }
    return job;
  }

  std::map<std::string, std::string> metadata() const {
    std::map<std::string, std::string> metadata = base_metadata(source_);
    metadata[kConventionKey] = formats_.names();
    metadata[kSettingsKey] = fmt::format(
        "{}lossy={} {}{}", options_.keep_formats ? "keep_formats=true " : "", options_.lossy,
        settings_text(settings_), recorded_settings(source_).statistics);
    if (!source_.is_directory() && !conversions_.originals.is_empty()) {
      metadata[kScalesKey] = conversions_.originals.to_json();
    }
    return metadata;
  }

  // --- Conversion -------------------------------------------------------------------------------

  // The values of a weight, by ranges; the last one stays in memory.
  class Values {
   public:
    Values(const CheckpointConverter& converter, const ConvertTask& task)
        : converter_(converter),
          task_(task),
          loader_(converter.source_, task.weight()),
          values_(static_cast<size_t>(task.ranges.rows_at_a_time * task.weight().cols)) {}

    TensorView load(int64_t first, int64_t count) {
      const int64_t cols = task_.weight().cols;
      const TensorView view = TensorView::contiguous(values_.data(), DType::kF32, {count, cols});
      if (first == first_ && count == count_) return view;
      loader_.load_values(first, count, values_);
      first_ = first;
      count_ = count;
      const int64_t at = first_nonfinite(view);
      if (at >= 0) {
        throw_error(ErrorKind::kCorruptData,
                    "{}: tensor '{}' has a NaN or infinity at [{}, {}], so it cannot be quantized "
                    "again; repair it",
                    printable(converter_.source_.path()), printable(task_.weight().name),
                    first + at / cols, at % cols);
      }
      return view;
    }
    [[nodiscard]] std::span<const float> values() const { return values_; }

    float amax() {
      float amax = 0;
      for_each_range(task_.ranges, [&](int64_t first, int64_t count) {
        float range_amax = 0;
        tensor_amax(load(first, count), TensorView::contiguous(&range_amax, DType::kF32, {1}));
        amax = std::max(amax, range_amax);
      });
      return amax;
    }

   private:
    const CheckpointConverter& converter_;
    const ConvertTask& task_;
    RowLoader loader_;
    std::vector<float> values_;
    int64_t first_ = 0;
    int64_t count_ = 0;
  };

  // The maximum over all weights that share a global scale with `task`.
  float shared_amax(const ConvertTask& task, Values& own) {
    const auto known = group_amax_.find(task.conversion.scale_key);
    if (known != group_amax_.end()) return known->second;
    const auto& group = conversions_.groups.at(task.conversion.scale_key);
    float amax = 0;
    for (const WeightConversion* weight : group) {
      const ConvertTask& member = *tasks_of_.at(weight);
      amax = std::max(amax, &member == &task ? own.amax() : Values(*this, member).amax());
    }
    if (group.size() > 1) group_amax_.emplace(task.conversion.scale_key, amax);
    return amax;
  }

  void convert_weight(const ConvertTask& task, SafetensorsWriter& writer) {
    if (task.conversion.mapping == Mapping::kRequantize) {
      requantize_weight(task, writer);
    } else {
      map_weight(task, writer);
    }
    if (!task.conversion.input_scale) return;
    writer.write(task.weight().parts.back().name, 0,
                 std::as_bytes(std::span(&*task.conversion.input_scale, 1)));
  }

  void requantize_weight(const ConvertTask& task, SafetensorsWriter& writer) {
    const TargetWeight& weight = task.weight();
    Values values(*this, task);
    TensorScale scale;
    if (has_tensor_scale(spec_)) scale = tensor_scale(spec_, settings_, shared_amax(task, values));
    if (spec_.global_scale.exists()) {
      writer.write(weight.parts[2].name, 0, std::as_bytes(std::span(&scale.stored, 1)));
    }
    QuantizedWeight coded(spec_, task.ranges.rows_at_a_time, weight.cols, scale.stored);
    Comparison comparison(task);
    PartWriter parts(weight, writer);
    for_each_range(task.ranges, [&](int64_t first, int64_t count) {
      const TensorView rows = values.load(first, count);
      coded.set_rows(count);
      const auto start = std::chrono::steady_clock::now();
      encode(rows, settings_, scale.encode, coded);
      report_.quantize_seconds +=
          std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
      parts.write(coded.values(), coded.stored_scales(first));
      comparison.add(first, values.values(), coded);
    });
    finish(task, comparison);
  }

  void map_weight(const ConvertTask& task, SafetensorsWriter& writer) {
    const TargetWeight& weight = task.weight();
    const ConventionSpec& target = *weight.spec;
    const int64_t most = task.ranges.rows_at_a_time;
    if (target.global_scale.exists()) {
      writer.write(weight.parts[2].name, 0,
                   std::as_bytes(std::span(&task.conversion.global.value, 1)));
    }
    RowLoader loader(source_, weight);
    // The target's spec says what is stored; codes and scales are the same.
    const bool is_kept = task.conversion.mapping == Mapping::kKeep;
    QuantizedWeight from(is_kept ? target : source_spec(weight), most, weight.cols, 1.0F);
    PartWriter parts(weight, writer);
    if (is_kept) {
      for_each_range(task.ranges, [&](int64_t first, int64_t count) {
        loader.load_codes(first, count, from);
        parts.write(from.values(), from.stored_scales(first));
      });
      return;
    }
    QuantizedWeight to(target, most, weight.cols, task.conversion.global.value);
    std::optional<Values> values;
    std::optional<Comparison> comparison;
    if (task.conversion.has_values()) {
      values.emplace(*this, task);
      comparison.emplace(task);
    }
    for_each_range(task.ranges, [&](int64_t first, int64_t count) {
      loader.load_codes(first, count, from);
      to.set_rows(count);
      map_codes(task, from, to);
      parts.write(to.values(), to.scales());
      if (!comparison) return;
      (void)values->load(first, count);
      comparison->add(first, values->values(), to);
    });
    if (comparison) finish(task, *comparison);
  }

  void map_codes(const ConvertTask& task, QuantizedWeight& from, QuantizedWeight& to) const {
    switch (task.conversion.mapping) {
      case Mapping::kPowers:
        (void)mxfp4_to_nvfp4(from.values(), from.scales(), task.conversion.exponent,
                             to.spec().zero_scales->zero_block, to.values(), to.scales());
        break;
      case Mapping::kMerge:
        copy_bytes(from.values(), to.values());
        nvfp4_to_mxfp4_scales(from.values(), from.scales(), task.conversion.exponent, to.scales());
        break;
      case Mapping::kWiden:
        mxfp4_to_mxfp8_codes(from.values(), to.values());
        copy_bytes(from.scales(), to.scales());
        break;
      default:
        copy_bytes(from.values(), to.values());
        spread_block_scales(from.scales(), from.rows(), from.cols(), to.scales());
    }
  }

  static void copy_bytes(std::span<const std::byte> from, std::span<std::byte> to) {
    std::copy(from.begin(), from.end(), to.begin());
  }

  // Writes ranges one after another.
  class PartWriter {
   public:
    PartWriter(const TargetWeight& weight, SafetensorsWriter& writer)
        : weight_(weight), writer_(writer) {}

    void write(std::span<const std::byte> values, std::span<const std::byte> scales) {
      writer_.write(weight_.parts[0].name, values_written_, values);
      writer_.write(weight_.parts[1].name, scales_written_, scales);
      values_written_ += values.size();
      scales_written_ += scales.size();
    }

   private:
    const TargetWeight& weight_;
    SafetensorsWriter& writer_;
    uint64_t values_written_ = 0;
    uint64_t scales_written_ = 0;
  };

  // The values of the source beside those of the target.
  class Comparison {
   public:
    explicit Comparison(const ConvertTask& task)
        : decoded_(static_cast<size_t>(task.ranges.rows_at_a_time * task.weight().cols)) {}

    void add(int64_t first, std::span<const float> values, QuantizedWeight& coded) {
      const int64_t rows = coded.rows();
      const int64_t cols = coded.cols();
      coded.decode(TensorView::contiguous(decoded_.data(), DType::kF32, {rows, cols}));
      const ClipLimits limits = coded.clip_limits();
      add_errors(errors_, {first, rows, cols}, {DType::kF32, std::as_bytes(values).data()},
                 {DType::kF32, std::as_bytes(std::span(decoded_)).data()}, &limits);
      const int64_t block_cols = format_info(coded.spec().info.format).block_cols;
      for (int64_t row = 0; row < rows; ++row) {
        for (int64_t col = 0; col < cols; col += block_cols) {
          const auto begin = static_cast<std::ptrdiff_t>(row * cols + col);
          const auto size = static_cast<std::ptrdiff_t>(std::min(block_cols, cols - col));
          exact_blocks_ += std::equal(values.begin() + begin, values.begin() + begin + size,
                                      decoded_.begin() + begin)
                               ? 1
                               : 0;
        }
      }
    }

    [[nodiscard]] ErrorSums total() const { return errors_.total(); }
    [[nodiscard]] int64_t exact_blocks() const { return exact_blocks_; }

   private:
    std::vector<float> decoded_;
    ErrorAccumulator errors_;
    int64_t exact_blocks_ = 0;
  };

  void finish(const ConvertTask& task, const Comparison& comparison) {
    TensorReport& report = report_.tensors[task.report];
    report.figures = figures_of(comparison.total());
    report.conversion->exact_blocks = comparison.exact_blocks();
    total_.add(comparison.total());
  }

  const ConvertCheckpointOptions& options_;
  const ConventionSpec& spec_;
  const EncodeSettings settings_;
  const Checkpoint source_;
  MemoryPlan memory_;
  QuantizedModel model_;
  std::vector<LogicalTensor> tensors_;
  Conversions conversions_;
  FormatGroups formats_;
  std::vector<RewriteItem> items_;
  std::vector<std::unique_ptr<ConvertTask>> tasks_;
  std::map<const WeightConversion*, const ConvertTask*> tasks_of_;
  std::map<std::string, float> group_amax_;
  std::map<std::string, size_t> by_name_;  // Index into report_.tensors.
  ErrorAccumulator total_;
  CheckpointReport report_;
};

}  // namespace

CheckpointReport convert_checkpoint(const std::string& source, const std::string& target,
                                    const ConvertCheckpointOptions& options) {
  return CheckpointConverter(source, options).run(target);
}

}  // namespace narrowfloat
