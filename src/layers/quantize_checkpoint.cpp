// Quantizes a checkpoint: selects the weights, computes the global scales, encodes range by range.
//
// A weight that fits into the memory budget is read once; a larger one is read once for its maximum
// and once in ranges of rows. Weights that consumers merge (q, k, v; gate and up) share a global
// scale, so the maximum is that of all of them, in whatever shards they are stored.
#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <set>

#include "base/throw_error.h"
#include "checkpoint/conventions/declaration.h"
#include "checkpoint/escape.h"
#include "layers/block_scales.h"
#include "layers/code_measurement.h"
#include "layers/compensated_rounding.h"
#include "layers/config_rewrite.h"
#include "layers/format_groups.h"
#include "layers/format_rules.h"
#include "layers/format_search.h"
#include "layers/memory_plan.h"
#include "layers/nonfinite.h"
#include "layers/quantized_weight.h"
#include "layers/rewrite.h"
#include "layers/selection.h"
#include "layers/source_facts.h"
#include "layers/statistics_file.h"
#include "layers/weight_reader.h"
#include "narrowfloat/runtime.h"

namespace narrowfloat {
namespace {

// Rows of weights that are read for their scale and stay for their turn.
constexpr uint64_t kMaxKeptBytes = uint64_t{64} << 20;

constexpr double kMaxBits = 32;

// A weight to be quantized.
struct Task {
  const CheckpointTensor* tensor = nullptr;
  WeightChoice choice;
  std::vector<TensorSpec> parts;
  RowRanges ranges;
  std::string scale_key;
  float input_scale = 0;  // As stored; 0: none.
  // Statistics of what comes into it, where it is quantized with them.
  std::optional<ExpertStatistics> hessian;
  std::optional<ExpertStatistics> second_moment;
  TensorReport* report = nullptr;

  [[nodiscard]] const std::string& name() const { return tensor->info.name; }
  [[nodiscard]] const ConventionSpec& spec() const { return *choice.spec; }
  [[nodiscard]] int64_t rows() const { return tensor->info.shape[0]; }
  [[nodiscard]] int64_t cols() const { return tensor->info.shape[1]; }
};

class CheckpointQuantizer {
 public:
  CheckpointQuantizer(const std::string& source, const QuantizeCheckpointOptions& options)
      : options_(options),
        spec_(convention_spec(options.to)),
        settings_{options.math, options.mx_scale, options.scale_search},
        source_(source),
        memory_(memory_budget(options.max_memory_bytes)) {
    if (!options.gptq.empty()) hessians_.emplace(options.gptq, "gptq");
    if (!options.activation_moments.empty()) {
      moments_.emplace(options.activation_moments, "activation_moments");
    }
  }

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
    if (!spec_.info.is_written) {
      throw_invalid("option to: '{}' is a convention that is {}; expected one of {}",
                    spec_.info.name,
                    spec_.info.is_convert_target ? "written by conversions only" : "read only",
                    written_convention_names());
    }
    if (options_.rules.empty()) check_encode_settings(settings_, spec_);
    if (!options_.rules.empty() && options_.target_bits != 0) {
      throw_invalid("option target_bits: excludes option rules; use one of them");
    }
    if (!(options_.target_bits >= 0 && options_.target_bits <= kMaxBits)) {
      throw_invalid("option target_bits: expected a number of bits up to {}, got {}", kMaxBits,
                    options_.target_bits);
    }
    check_max_shard_bytes(options_.max_shard_bytes);
    check_statistics_options();
  }

  void check_statistics_options() const {
    if (!options_.rules.empty()) return;  // They are about the weights that have a use for them.
    if (hessians_ && !has_block_scales(spec_.info.format)) {
      throw_invalid("option gptq: is for nvfp4, mxfp4 and mxfp8, not for {}", spec_.info.name);
    }
    if (moments_ && settings_.scale_search != ScaleSearch::kFull) {
      throw_invalid(
          "option activation_moments: weighs the errors of option scale_search full only");
    }
  }

  void plan() {
    const std::vector<LogicalTensor> tensors = recognise(source_);
    refuse_quantized(tensors);
    SelectionRules rules = {spec_.info.format, options_.include, options_.exclude,
                            excluded_modules_of(source_.config_text(), source_.path())};
    std::vector<WeightChoice> choices = choose_formats(tensors, spec_, settings_, options_.rules);
    for (const WeightChoice& choice : choices) rules.formats.push_back(choice.format());
    std::vector<Selection> selections = select_tensors(tensors, rules);
    if (options_.target_bits != 0) reach_target_bits(tensors, choices, selections);
    note_groups(tensors, choices, selections);
    for (std::string& warning :
         unmatched_exclusions(tensors, rules.excluded_modules, source_.path())) {
      report_.warnings.push_back(std::move(warning));
    }
    report_.tensors.resize(tensors.size());
    for (size_t i = 0; i < tensors.size(); ++i) {
      TensorReport& report = report_.tensors[i];
      const CheckpointTensor& tensor = *source_.find(tensors[i].name);
      report.name = tensors[i].name;
      report.shape = tensors[i].shape;
      report.source_bytes = tensor.info.size_bytes;
      if (!selections[i].warning.empty()) report_.warnings.push_back(selections[i].warning);
      if (selections[i].quantize) {
        report.reason = selections[i].reason;
        add_task(tensor, choices[i], report);
      } else {
        add_copy(tensor, selections[i], report);
      }
    }
    if (tasks_.empty()) {
      throw_invalid(
          "{}: no tensor is left to quantize to {}; look at the reasons with a dry run, "
          "and at option include and option exclude",
          printable(source_.path()), spec_.info.name);
    }
    plan_kept_rows();
    check_activations();
    for (std::string& warning : formats_.warnings()) {
      report_.warnings.push_back(std::move(warning));
    }
    check_statistics();
    warn_of_merged_weights();
  }

  // The rows of weights that share a scale are read for it before their turn comes. They stay in
  // memory where it has room for those of a group, of which there is one at a time.
  void plan_kept_rows() {
    for (const auto& [key, group] : groups_) {
      uint64_t bytes = 0;
      bool are_whole = true;
      for (const Task* task : group) {
        bytes += task->tensor->info.size_bytes;
        are_whole = are_whole && task->ranges.rows_at_a_time == task->rows();
      }
      const bool is_small = are_whole && bytes <= kMaxKeptBytes;
      if (group.size() > 1 && is_small && memory_.keep(bytes)) kept_groups_.insert(key);
    }
  }

  // Gives some weights better formats, or none; the reasons are in the report.
  void reach_target_bits(const std::vector<LogicalTensor>& tensors,
                         std::vector<WeightChoice>& choices, std::vector<Selection>& selections) {
    std::vector<SearchedWeight> weights;
    std::vector<size_t> places;
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (!selections[i].quantize) continue;
      weights.push_back({source_.find(tensors[i].name), choices[i]});
      places.push_back(i);
    }
    if (weights.empty()) return;
    report_.notes.push_back(search_formats(source_, weights,
                                           {.base = spec_,
                                            .target_bits = options_.target_bits,
                                            .keep_nonfinite = options_.keep_nonfinite,
                                            .cancelled = options_.cancelled},
                                           memory_));
    for (size_t i = 0; i < weights.size(); ++i) {
      choices[places[i]] = weights[i].choice;
      selections[places[i]].reason = weights[i].explanation;
      selections[places[i]].quantize = weights[i].choice.spec != nullptr;
    }
  }

  // Sorts the modules that are quantized by what configs say about them.
  void note_groups(const std::vector<LogicalTensor>& tensors,
                   const std::vector<WeightChoice>& choices,
                   const std::vector<Selection>& selections) {
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (!selections[i].quantize) continue;
      const ConventionSpec& spec = *choices[i].spec;
      const bool has_scale = spec.input_scale.exists() && activation_amax(tensors[i].name) > 0;
      formats_.add(spec, has_scale, module_of(tensors[i].name));
    }
  }

  // Returns 0 if it is not known.
  [[nodiscard]] float activation_amax(const std::string& tensor) const {
    const auto found = options_.activation_amax.find(std::string(module_of(tensor)));
    return found == options_.activation_amax.end() ? 0 : found->second;
  }

  void check_activations() {
    if (options_.activation_amax.empty()) return;
    const auto has_scale = [](const auto& task) { return task->input_scale > 0; };
    const auto count = static_cast<size_t>(std::count_if(tasks_.begin(), tasks_.end(), has_scale));
    if (count == 0) {
      throw_invalid(
          "option activation_amax: names none of the {} modules that are quantized to NVFP4, or to "
          "FP8 with one scale, which alone have activation scales",
          std::count_if(tasks_.begin(), tasks_.end(),
                        [](const auto& task) { return task->spec().input_scale.exists(); }));
    }
    if (count == tasks_.size()) return;
    report_.warnings.push_back(fmt::format(
        "{} of {} weights have no activation scale (option activation_amax); the config "
        "says that only their weights are quantized",
        tasks_.size() - count, tasks_.size()));
  }

  void check_statistics() {
    const auto judge = [&](const char* option, const char* what, auto member) {
      const auto count =
          static_cast<size_t>(std::count_if(tasks_.begin(), tasks_.end(), [&](const auto& task) {
            return (*task.*member).has_value();
          }));
      if (count == 0) {
        throw_invalid(
            "option {}: the file has no {} for any of the {} weights that are quantized; it has "
            "them for experts that tokens came to, by the names of the model that was calibrated",
            option, what, tasks_.size());
      }
      if (count == tasks_.size()) return;
      report_.warnings.push_back(
          fmt::format("{} of {} weights have no {} (option {}) and are quantized without",
                      tasks_.size() - count, tasks_.size(), what, option));
    };
    if (hessians_) judge("gptq", "Hessian", &Task::hessian);
    if (moments_) judge("activation_moments", "second moments", &Task::second_moment);
  }

  // Loaders make one matrix of such weights, which has one format.
  void warn_of_merged_weights() {
    std::map<std::string, const Task*> first_of;
    std::set<std::string> named;
    for (const std::unique_ptr<Task>& task : tasks_) {
      const std::string key = shared_scale_key(task->name());
      if (key.empty()) continue;
      const Task& first = *first_of.emplace(key, task.get()).first->second;
      const bool is_same = &first.spec() == &task->spec() && first.input_scale == task->input_scale;
      if (is_same || !named.insert(key).second) continue;
      report_.warnings.push_back(
          fmt::format("tensors '{}' and '{}' are stored differently, but loaders merge them",
                      printable(first.name()), printable(task->name())));
    }
  }

  void refuse_quantized(const std::vector<LogicalTensor>& tensors) const {
    for (const LogicalTensor& tensor : tensors) {
      if (!tensor.convention) continue;
      throw_invalid(
          "{}: tensor '{}' is quantized already ({}); dequantize the checkpoint first, "
          "or convert it",
          printable(source_.path()), printable(tensor.name),
          convention_info(*tensor.convention).name);
    }
  }

  void add_copy(const CheckpointTensor& tensor, const Selection& selection, TensorReport& report) {
    report.action = "copy";
    report.reason = selection.reason;
    report.target_bytes = tensor.info.size_bytes;
    if (selection.is_linear) model_.ignored_modules.emplace_back(module_of(tensor.info.name));
    memory_.add_copy(tensor.info.size_bytes);
    items_.push_back(copy_item(source_, tensor, [this] { return memory_.copy_buffer_bytes(); }));
  }

  void add_task(const CheckpointTensor& tensor, const WeightChoice& choice, TensorReport& report) {
    auto task = std::make_unique<Task>();
    task->tensor = &tensor;
    task->choice = choice;
    task->report = &report;
    const ConventionSpec& spec = task->spec();
    const std::string module(module_of(task->name()));
    task->parts = stored_parts(spec, module + ".", task->rows(), task->cols(), formats_.is_mixed());
    const float amax = activation_amax(task->name());
    if (amax > 0 && spec.input_scale.exists()) {
      task->input_scale = tensor_scale(spec, {}, amax).stored;
      task->parts.push_back(input_scale_part(spec, module));
    }
    find_statistics(*task);
    if (has_tensor_scale(spec)) task->scale_key = shared_scale_key(tensor.info.name);
    const int64_t tile = format_info(spec.info.format).block_rows;
    task->ranges = memory_.add(tensor.info.name, task->rows(), {.tile = tile, .smallest = tile},
                               [&](int64_t rows) { return range_cost(*task, rows); });
    RewriteItem item = copy_item(source_, tensor, {});
    item.tensors = task->parts;
    item.write = [this, &task = *task](SafetensorsWriter& writer) {
      quantize_weight(task, writer);
    };
    report.action = "quantize";
    report.format = spec.info.name;
    report.target_bytes = QuantizedWeight::stored_bytes(spec, task->rows(), task->cols()) +
                          (task->parts.size() - 2) * sizeof(float);
    report_.quantized_source_bytes += tensor.info.size_bytes;
    if (!task->scale_key.empty()) groups_[task->scale_key].push_back(task.get());
    items_.push_back(std::move(item));
    tasks_.push_back(std::move(task));
  }

  void find_statistics(Task& task) const {
    if (!has_block_scales(task.spec().info.format)) return;
    if (hessians_) {
      task.hessian = hessians_->find_hessian(task.name(), task.cols());
      if (!task.hessian) {
        std::string& reason = task.report->reason;
        reason += reason.empty() ? "no Hessian" : "; no Hessian";
      }
    }
    if (moments_ && task.choice.settings.scale_search == ScaleSearch::kFull) {
      task.second_moment = moments_->find_second_moment(task.name(), task.cols());
    }
  }

  // Source rows, codes and scales, and for the figures some dequantized rows and their sums, with a
  // copy of their codes unless they are the whole range. The factor of a Hessian has no rows.
  uint64_t range_cost(const Task& task, int64_t rows) const {
    const ConventionSpec& spec = task.spec();
    const int64_t cols = task.cols();
    uint64_t cost = PlainReader::buffer_bytes(task.tensor->info, rows);
    cost += QuantizedWeight::buffer_bytes(spec, rows, cols);
    if (task.hessian) cost += HessianFactor::buffer_bytes(cols) + compensated_rounding_bytes(cols);
    if (task.second_moment) cost += static_cast<uint64_t>(cols) * sizeof(float);
    if (options_.measure) cost += CodeMeasurement::buffer_bytes(spec, rows, cols);
    return cost;
  }

  RewriteJob make_job(const std::string& target) {
    model_.writer_version = version();
    ignore_untied_head(source_, model_);
    RewriteJob job{.source = source_, .target = target, .items = std::move(items_)};
    job.metadata = metadata();
    set_options(options_, job);
    job.kept_files = options_.kept_files;
    for (const auto* file : {&hessians_, &moments_}) {
      if (*file) job.more_sources.push_back(&(*file)->file());
    }
    if (source_.is_directory()) formats_.set_configs(model_, job);
    return job;
  }

  std::map<std::string, std::string> metadata() const {
    std::map<std::string, std::string> metadata = base_metadata(source_);
    metadata[kConventionKey] = formats_.names();
    std::string& settings = metadata[kSettingsKey];
    settings = settings_text(settings_) + rules_text(options_.rules);
    if (hessians_) settings += gptq_text(hessians_->fingerprint());
    if (moments_) settings += activation_moments_text(moments_->fingerprint());
    return metadata;
  }

  // Loads rows of a weight, and checks that they are finite when they come from the file.
  TensorView load(const Task& task, PlainReader& reader, int64_t first, int64_t count) const {
    const bool is_new = reader.load(first, count);
    const TensorView view = reader.view();
    if (is_new && !options_.keep_nonfinite) {
      const int64_t at = first_nonfinite(view);
      if (at >= 0) {
        throw_error(ErrorKind::kCorruptData,
                    "{}: tensor '{}' has a NaN or infinity at [{}, {}]; repair it, exclude it, or "
                    "use option keep_nonfinite",
                    printable(source_.path()), printable(task.name()), first + at / task.cols(),
                    at % task.cols());
      }
    }
    return view;
  }

  float amax_of(const Task& task, PlainReader& reader) {
    float amax = 0;
    for_each_range(task.ranges, [&](int64_t first, int64_t count) {
      const TensorView rows = load(task, reader, first, count);
      const auto start = std::chrono::steady_clock::now();
      float range_amax = 0;
      tensor_amax(rows, TensorView::contiguous(&range_amax, DType::kF32, {1}));
      report_.quantize_seconds += seconds_since(start);
      amax = std::max(amax, range_amax);
    });
    return amax;
  }

  // The maximum over all weights that share a global scale with `task`. Their rows are in memory
  // one after another, its own last: `reader`, which is made for them, may keep them.
  float scale_amax(const Task& task, std::optional<PlainReader>& reader) {
    const auto known = group_amax_.find(task.scale_key);
    if (known != group_amax_.end()) return known->second;
    float amax = 0;
    kept_rows_.clear();
    if (!task.scale_key.empty()) {
      const bool is_kept = kept_groups_.contains(task.scale_key);
      for (const Task* member : groups_.at(task.scale_key)) {
        if (member == &task) continue;
        PlainReader other(source_, *member->tensor, member->ranges.rows_at_a_time);
        amax = std::max(amax, amax_of(*member, other));
        if (is_kept) kept_rows_.emplace(member, std::move(other));
      }
    }
    reader.emplace(source_, *task.tensor, task.ranges.rows_at_a_time);
    amax = std::max(amax, amax_of(task, *reader));
    if (!task.scale_key.empty()) group_amax_.emplace(task.scale_key, amax);
    return amax;
  }

  // Gate and up of an expert multiply the same rows; the factor of the last weight is kept.
  void load_factor(const Task& task) {
    if (factor_ && factor_of_ == task.hessian) return;
    factor_.reset();  // Before the next one takes memory.
    factor_of_ = task.hessian;
    if (!task.hessian) return;
    const ExpertStatistics& hessian = *task.hessian;
    const std::vector<float> diagonal = hessians_->read_second_moment(hessian);
    const auto start = std::chrono::steady_clock::now();
    factor_.emplace(
        diagonal,
        [&](int64_t row, std::span<float> values) { hessians_->read_row(hessian, row, values); },
        fmt::format("{}: tensor '{}', expert {},", printable(hessians_->path()),
                    printable(hessian.tensor->name), hessian.expert));
    report_.quantize_seconds += seconds_since(start);
  }

  void quantize_weight(const Task& task, SafetensorsWriter& writer) {
    const ConventionSpec& spec = task.spec();
    const EncodeSettings& settings = task.choice.settings;
    const std::vector<TensorSpec>& parts = task.parts;
    load_factor(task);
    std::vector<float> col_weights;
    if (task.second_moment) col_weights = moments_->read_second_moment(*task.second_moment);
    std::optional<PlainReader> reader;
    TensorScale scale;
    if (has_tensor_scale(spec)) scale = tensor_scale(spec, settings, scale_amax(task, reader));
    if (spec.global_scale.exists()) {
      writer.write(parts[2].name, 0, std::as_bytes(std::span(&scale.stored, 1)));
    }
    if (task.input_scale > 0) {
      writer.write(parts.back().name, 0, std::as_bytes(std::span(&task.input_scale, 1)));
    }
    if (const auto kept = kept_rows_.find(&task); kept != kept_rows_.end()) {
      reader.emplace(std::move(kept->second));
      kept_rows_.erase(kept);
    }
    if (!reader) reader.emplace(source_, *task.tensor, task.ranges.rows_at_a_time);
    QuantizedWeight coded(spec, task.ranges.rows_at_a_time, task.cols(), scale.stored);
    std::optional<CodeMeasurement> measurement;
    if (options_.measure) measurement.emplace(coded, task.ranges.rows_at_a_time);
    int64_t num_nonfinite = 0;
    uint64_t values_written = 0;
    uint64_t scales_written = 0;
    for_each_range(task.ranges, [&](int64_t first, int64_t count) {
      const TensorView rows = load(task, *reader, first, count);
      coded.set_rows(count);
      if (options_.keep_nonfinite) num_nonfinite += count_nonfinite(rows);
      const auto start = std::chrono::steady_clock::now();
      encode(rows, settings, scale.encode, coded, col_weights);
      if (factor_) round_compensated(rows, settings.math, scale.encode, *factor_, coded);
      report_.quantize_seconds += seconds_since(start);
      writer.write(parts[0].name, values_written, coded.values());
      const std::span<const std::byte> scales = coded.stored_scales(first);
      writer.write(parts[1].name, scales_written, scales);
      values_written += coded.values().size();
      scales_written += scales.size();
      if (measurement) measurement->add(first, reader->float_rows());
    });
    if (num_nonfinite > 0) {
      report_.warnings.push_back(fmt::format(
          "tensor '{}': {} of {} elements are NaN or infinite and were quantized as they "
          "are (option keep_nonfinite)",
          printable(task.name()), num_nonfinite, task.rows() * task.cols()));
    }
    if (!measurement) return;
    task.report->figures = figures_of(measurement->total());
    const int64_t num_overflows = task.report->figures->nonfinite - num_nonfinite;
    if (num_overflows > 0) {
      report_.warnings.push_back(fmt::format(
          "tensor '{}': {} of {} elements become infinite: they are finite, but their codes times "
          "their scales are beyond the range of F32; exclude it (option exclude)",
          printable(task.name()), num_overflows, task.rows() * task.cols()));
    }
    total_.add(measurement->total());
  }

  const QuantizeCheckpointOptions& options_;
  const ConventionSpec& spec_;
  const EncodeSettings settings_;
  const Checkpoint source_;
  MemoryPlan memory_;
  std::optional<StatisticsFile> hessians_;
  std::optional<StatisticsFile> moments_;
  std::optional<HessianFactor> factor_;
  std::optional<ExpertStatistics> factor_of_;
  QuantizedModel model_;
  std::vector<RewriteItem> items_;
  std::vector<std::unique_ptr<Task>> tasks_;
  std::map<std::string, std::vector<const Task*>> groups_;  // Key: shared scale key.
  std::map<std::string, float> group_amax_;
  std::set<std::string> kept_groups_;
  std::map<const Task*, PlainReader> kept_rows_;  // Rows of one group.
  FormatGroups formats_;                          // The modules that are quantized.
  ErrorAccumulator total_;
  CheckpointReport report_;
};

}  // namespace

CheckpointReport quantize_checkpoint(const std::string& source, const std::string& target,
                                     const QuantizeCheckpointOptions& options) {
  return CheckpointQuantizer(source, options).run(target);
}

}  // namespace narrowfloat
