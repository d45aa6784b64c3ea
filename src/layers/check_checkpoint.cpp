// Headers and configs first (check_structure.h), then the contents of every tensor in ranges of
// rows. With a source, the same pass measures the error and quantizes the source's rows again with
// the settings that the files record.
#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

#include "base/throw_error.h"
#include "checkpoint/conventions/declaration.h"
#include "checkpoint/escape.h"
#include "checkpoint/file_io.h"
#include "layers/block_scales.h"
#include "layers/check_findings.h"
#include "layers/check_judgement.h"
#include "layers/check_structure.h"
#include "layers/code_statistics.h"
#include "layers/nonfinite.h"
#include "layers/selection.h"
#include "layers/source_facts.h"
#include "layers/statistics_file.h"
#include "layers/value_reader.h"
#include "narrowfloat/runtime.h"

namespace narrowfloat {
namespace {

constexpr uint64_t kCheckBudget = uint64_t{128} << 20;  // Buffers of one tensor.
// Buffers hold at most this for an element: floats of both sides, twice where they are transposed,
// codes of both sides, scales.
constexpr uint64_t kCheckBytesPerElement = 20;
constexpr std::string_view kOurKeyPrefix = "narrowfloat.";
constexpr const char* kSourceKey = "narrowfloat.source";
constexpr const char* kVersionKey = "narrowfloat.version";

// The maximum over all rows of a source weight.
float weight_amax(const Checkpoint& source, const CheckpointTensor& tensor) {
  const int64_t cols = PlainReader::cols_of(tensor.info.shape);
  const RowRanges ranges = plan_row_ranges(
      PlainReader::rows_of(tensor.info.shape), kCheckBudget, {},
      [&](int64_t rows) { return static_cast<uint64_t>(rows * cols) * sizeof(float); });
  PlainReader reader(source, tensor, ranges.rows_at_a_time);
  float amax = 0;
  for_each_range(ranges, [&](int64_t first, int64_t count) {
    reader.load(first, count);
    float range_amax = 0;
    tensor_amax(reader.view(), TensorView::contiguous(&range_amax, DType::kF32, {1}));
    amax = std::max(amax, range_amax);
  });
  return amax;
}

bool read_scale_format(const Checkpoint& checkpoint) {
  const std::string& text = checkpoint.config_text();
  if (text.empty()) return false;
  const nlohmann::json config = nlohmann::json::parse(text);
  const auto quantization = config.find("quantization_config");
  return quantization != config.end() && string_member(*quantization, "scale_fmt") == "ue8m0";
}

class CheckpointChecker {
 public:
  CheckpointChecker(const std::string& path, const CheckCheckpointOptions& options)
      : options_(options), checkpoint_(path), is_ue8m0_declared_(read_scale_format(checkpoint_)) {
    if (options.against.empty()) return;
    if (options.scales_only) {
      throw_invalid("option scales_only: comparing with a source needs the codes; leave out one");
    }
    source_.emplace(options.against);
  }

  CheckpointCheck run() {
    for (const std::string& warning : checkpoint_.warnings()) {
      findings_.warning(rules::kFiles, "", warning);
    }
    read_metadata();
    result_.fingerprint = source_fingerprint(checkpoint_);
    std::vector<LogicalTensor> tensors = recognise_or_find(checkpoint_, findings_);
    check_structure(checkpoint_, tensors, findings_);
    for (LogicalTensor& tensor : tensors)
      result_.tensors.push_back({std::move(tensor), {}, {}, {}});
    check_global_scales();
    if (source_) compare_names();
    check_contents();
    result_.total = figures_of(total_.total());
    result_.findings = findings_.sorted();
    return std::move(result_);
  }

 private:
  void read_metadata() {
    for (const SafetensorsReader& shard : checkpoint_.shards()) {
      for (const auto& [key, value] : shard.metadata()) {
        if (key.starts_with(kOurKeyPrefix)) result_.metadata.emplace(key, value);
      }
    }
    const auto settings = result_.metadata.find(kSettingsKey);
    if (settings != result_.metadata.end()) settings_ = parse_settings(settings->second);
    result_.is_calibrated = settings_.has_statistics();
  }

  // Global scales are finite, positive, of the right sense, and equal where weights are merged.
  void check_global_scales() {
    std::map<std::string, std::vector<std::pair<const LogicalTensor*, float>>> groups;
    for (const CheckedTensor& checked : result_.tensors) {
      const LogicalTensor& tensor = checked.tensor;
      if (tensor.convention) groups_[group_of(tensor)].push_back(&tensor);
      const std::optional<float> scale = ValueReader(checkpoint_, tensor).stored_global_scale();
      if (!scale) continue;
      if (!std::isfinite(*scale) || *scale <= 0) {
        unreadable_.insert(tensor.name);
        findings_.error(
            rules::kGlobalScale, tensor.name,
            fmt::format("the global scale must be finite and positive, got {}", *scale));
        continue;
      }
      check_sense(tensor, *scale);
      const std::string key = shared_scale_key(tensor.name);
      if (!key.empty()) groups[key].emplace_back(&tensor, *scale);
    }
    for (const auto& [unused_key, members] : groups) check_merged_scales(members);
  }

  void check_sense(const LogicalTensor& tensor, float scale) {
    const bool is_encode =
        convention_spec(*tensor.convention).global_sense == GlobalScaleSense::kEncode;
    if (is_encode ? scale > 1 : scale < 1) return;
    findings_.warning(rules::kGlobalScale, tensor.name,
                      fmt::format("the global scale is {:g}, but {} stores {}; was its reciprocal "
                                  "written?",
                                  scale, convention_info(*tensor.convention).name,
                                  is_encode ? "divisors, far above 1" : "factors, far below 1"));
  }

  void check_merged_scales(const std::vector<std::pair<const LogicalTensor*, float>>& members) {
    const auto& [first, first_scale] = members.front();
    for (const auto& [tensor, scale] : members) {
      if (scale == first_scale || tensor->convention != first->convention) continue;
      findings_.warning(
          rules::kMerged, tensor->name,
          fmt::format("its global scale is {:g}, that of '{}', which loaders merge with it, is "
                      "{:g} ({:.4f} times): loaders that take one for both inflate the other; "
                      "option fix makes them equal",
                      scale, printable(first->name), first_scale, first_scale / scale));
    }
  }

  void compare_names() {
    source_tensors_ = recognise(*source_);
    std::map<std::string_view, const LogicalTensor*> names;
    for (const LogicalTensor& tensor : source_tensors_) names.emplace(tensor.name, &tensor);
    for (const CheckedTensor& checked : result_.tensors) {
      const LogicalTensor& tensor = checked.tensor;
      const auto found = names.find(tensor.name);
      if (found == names.end()) {
        findings_.error(rules::kSource, tensor.name, "is not in the source");
        continue;
      }
      if (found->second->shape == tensor.shape) {
        pairs_.emplace(tensor.name, found->second);
      } else {
        findings_.error(
            rules::kSource, tensor.name,
            fmt::format("has the shape [{}], in the source it is [{}]",
                        fmt::join(tensor.shape, ", "), fmt::join(found->second->shape, ", ")));
      }
      names.erase(found);
    }
    for (const auto& [name, unused_tensor] : names) {
      findings_.error(rules::kSource, std::string(name), "is in the source, but missing here");
    }
    const auto recorded = result_.metadata.find(kSourceKey);
    const std::string& actual = result_.source_fingerprint = source_fingerprint(*source_);
    is_recorded_source_ = recorded != result_.metadata.end() && recorded->second == actual;
    if (recorded != result_.metadata.end() && !is_recorded_source_) {
      // Conversions and repairs record the quantized checkpoint that they read.
      findings_.add(rules::kSource, settings_.encode ? Severity::kWarning : Severity::kNote, "",
                    fmt::format("was made from another source: the files record {}, {} is {}",
                                printable(recorded->second), printable(source_->path()), actual));
    }
    if (settings_.has_statistics()) {
      findings_.add(
          rules::kRequantized, Severity::kNote, "",
          "experts are not quantized again: that takes the statistics of calibration that "
          "the files name, but do not have");
    }
  }

  void check_contents() {
    uint64_t total_bytes = 0;
    uint64_t done_bytes = 0;
    for (const CheckedTensor& checked : result_.tensors) total_bytes += checked.tensor.size_bytes;
    for (CheckedTensor& checked : result_.tensors) {
      if (options_.cancelled && options_.cancelled()) {
        result_.cancelled = true;
        return;
      }
      if (!checked.tensor.convention) {
        check_plain(checked.tensor);
      } else if (!unreadable_.contains(checked.tensor.name)) {
        check_quantized(checked);
      }
      done_bytes += checked.tensor.size_bytes;
      if (options_.progress) options_.progress({checked.tensor.name, done_bytes, total_bytes});
    }
  }

  // Plain tensors have no NaN, and the source's bytes.
  void check_plain(const LogicalTensor& tensor) {
    if (options_.scales_only) return;
    const CheckpointTensor& stored = *checkpoint_.find(tensor.name);
    const DType dtype = stored.info.dtype;
    if (dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBF16) {
      const int64_t cols = PlainReader::cols_of(tensor.shape);
      const RowRanges ranges = plan_row_ranges(
          PlainReader::rows_of(tensor.shape), kCheckBudget, {},
          [&](int64_t rows) { return static_cast<uint64_t>(rows * cols) * sizeof(float); });
      PlainReader reader(checkpoint_, stored, ranges.rows_at_a_time);
      int64_t nonfinite = 0;
      for_each_range(ranges, [&](int64_t first, int64_t count) {
        reader.load(first, count);
        nonfinite += count_nonfinite(reader.view());
      });
      result_.read_bytes += tensor.size_bytes;
      if (nonfinite > 0) {
        findings_.error(
            rules::kNonfinite, tensor.name,
            fmt::format("{} of {} elements are NaN or infinite", nonfinite, tensor.num_elements()));
      }
    }
    const auto pair = pairs_.find(tensor.name);
    if (pair == pairs_.end()) return;
    const ValueReader own(checkpoint_, tensor);
    const ValueReader origin(*source_, *pair->second);
    result_.read_bytes += tensor.size_bytes + pair->second->size_bytes;
    if (own.description() != origin.description()) {
      findings_.warning(
          rules::kSource, tensor.name,
          fmt::format("is {}, in the source it is {}", own.description(), origin.description()));
    } else if (!parts_equal(own, origin, 0)) {
      findings_.error(rules::kSource, tensor.name,
                      "is not quantized, but its bytes are not those of the source");
    }
  }

  void check_quantized(CheckedTensor& checked) {
    if (options_.scales_only) {
      read_scales(checked);
    } else {
      read_codes(checked);
    }
    judge_statistics(checked.tensor, *checked.statistics, is_ue8m0_declared_, findings_);
  }

  void read_scales(CheckedTensor& checked) {
    const LogicalTensor& tensor = checked.tensor;
    const CodeMatrix matrix = code_matrix(tensor);
    const ConventionSpec& spec = convention_spec(*tensor.convention);
    const int64_t tile = format_info(spec.info.format).block_rows;
    const RowRanges ranges = plan_row_ranges(
        matrix.all_rows(), kCheckBudget, {.tile = tile, .smallest = tile},
        [&](int64_t rows) { return QuantizedWeight::buffer_bytes(spec, rows, matrix.cols); });
    QuantizedReader reader(checkpoint_, tensor, ranges.rows_at_a_time);
    CodeStatistics& statistics = checked.statistics.emplace();
    statistics.code_counts.clear();
    for_each_range(ranges, [&](int64_t first, int64_t count) {
      reader.load_scales_only(first, count);
      count_block_scales(format_info(spec.info.format).scale_type, reader.coded().scales(),
                         statistics);
    });
    result_.read_bytes += checkpoint_.find(tensor.parts[1])->info.size_bytes;
  }

  // One pass over the rows of both sides.
  void read_codes(CheckedTensor& checked) {
    const LogicalTensor& tensor = checked.tensor;
    const auto pair = pairs_.find(tensor.name);
    ValueReader own(checkpoint_, tensor);
    std::optional<ValueReader> origin;
    if (pair != pairs_.end()) origin.emplace(*source_, *pair->second);
    const RowRanges ranges = ranges_of(own, origin);
    own.prepare(ranges.rows_at_a_time);
    const bool is_measured = origin && origin->has_values();
    if (is_measured) origin->prepare(ranges.rows_at_a_time);
    const CodeMatrix matrix = code_matrix(tensor);
    const ConventionSpec& spec = convention_spec(*tensor.convention);
    StatisticsCounter counter(spec, matrix.all_rows(), matrix.cols);
    std::optional<QuantizedWeight> again;
    TensorScale scale;
    if (is_measured && can_quantize_again(tensor, *pair->second)) {
      scale = scale_again(tensor);
      again.emplace(spec, ranges.rows_at_a_time, matrix.cols, scale.stored);
      checked.requantization.emplace();
      const std::optional<float> stored = own.stored_global_scale();
      checked.requantization->has_other_global_scale = stored && *stored != scale.stored;
    }
    ErrorAccumulator errors;
    for_each_range(ranges, [&](int64_t first, int64_t count) {
      const FloatRows y = own.load(first, count);
      counter.add(own.coded());
      if (!is_measured) return;
      const FloatRows x = origin->load(first, count);
      const std::optional<ClipLimits> limits = own.clip_limits();
      const int64_t cols = PlainReader::cols_of(tensor.shape);
      add_errors(errors, {first, count, cols}, x, y, limits ? &*limits : nullptr);
      if (!again) return;
      again->set_rows(count);
      encode(origin->plain(), encode_settings(), scale.encode, *again);
      add_differences(own.coded(), *again, *checked.requantization);
    });
    checked.statistics = counter.result();
    checked.statistics->global_scale =
        static_cast<double>(own.stored_global_scale().value_or(1.0F));
    result_.read_bytes += tensor.size_bytes;
    if (!is_measured) return;
    result_.read_bytes += pair->second->size_bytes;
    checked.figures = figures_of(errors.total());
    total_.add(errors.total());
    judge_error(tensor, *checked.figures, settings_.has_gptq && may_have_statistics(tensor),
                findings_);
    judge_requantization(checked);
  }

  [[nodiscard]] static RowRanges ranges_of(const ValueReader& own,
                                           const std::optional<ValueReader>& origin) {
    RowGrid grid = own.grid();
    if (origin) {
      grid.tile = std::max(grid.tile, origin->grid().tile);
      grid.smallest = std::max(grid.smallest, origin->grid().smallest);
    }
    grid.smallest = grid.tile;  // A block is counted in one range.
    const std::vector<int64_t>& shape = own.tensor().shape;
    const int64_t cols = PlainReader::cols_of(shape);
    return plan_row_ranges(PlainReader::rows_of(shape), kCheckBudget, grid, [&](int64_t rows) {
      return static_cast<uint64_t>(rows * cols) * kCheckBytesPerElement;
    });
  }

  [[nodiscard]] bool can_quantize_again(const LogicalTensor& tensor,
                                        const LogicalTensor& origin) const {
    if (settings_.has_statistics() && may_have_statistics(tensor)) return false;
    const bool is_plain = !origin.convention && origin.dtype != DType::kF64;
    return is_plain && tensor.shape.size() == 2 && convention_info(*tensor.convention).is_written;
  }

  // Calibration is about experts in formats with block scales.
  static bool may_have_statistics(const LogicalTensor& tensor) {
    return is_expert_matrix(tensor.name) &&
           has_block_scales(convention_info(*tensor.convention).format);
  }

  // Weights of one group have one global scale.
  static std::string group_of(const LogicalTensor& tensor) {
    const std::string key = shared_scale_key(tensor.name);
    if (key.empty()) return tensor.name;
    return fmt::format("{} {}", key, convention_info(*tensor.convention).name);
  }

  // The scale of a whole tensor, of the maximum over all weights that share it.
  TensorScale scale_again(const LogicalTensor& tensor) {
    const ConventionSpec& spec = convention_spec(*tensor.convention);
    if (!has_tensor_scale(spec)) return {};
    const std::string group = group_of(tensor);
    auto known = group_amax_.find(group);
    if (known == group_amax_.end()) {
      float amax = 0;
      for (const LogicalTensor* member : groups_.at(group)) {
        const auto pair = pairs_.find(member->name);
        if (pair == pairs_.end() || pair->second->convention) continue;
        amax = std::max(amax, weight_amax(*source_, *source_->find(member->name)));
        result_.read_bytes += pair->second->size_bytes;
      }
      known = group_amax_.emplace(group, amax).first;
    }
    return tensor_scale(spec, encode_settings(), known->second);
  }

  [[nodiscard]] EncodeSettings encode_settings() const {
    return settings_.encode.value_or(EncodeSettings{});
  }

  static void add_differences(QuantizedWeight& stored, QuantizedWeight& again,
                              Requantization& result) {
    const FormatInfo& format = format_info(stored.spec().info.format);
    result.different_codes += count_different_codes(format, stored.values(), again.values());
    result.different_scales += count_different_scales(format, stored.scales(), again.scales());
  }

  // Files that record how they were made must be what that makes.
  void judge_requantization(const CheckedTensor& checked) {
    if (!checked.requantization || checked.requantization->is_identical()) return;
    const Requantization& found = *checked.requantization;
    const bool is_promised = settings_.encode && is_recorded_source_;
    const auto made_by = result_.metadata.find(kVersionKey);
    const bool is_ours =
        is_promised && made_by != result_.metadata.end() && made_by->second == version();
    const CodeStatistics& statistics = *checked.statistics;
    findings_.add(
        rules::kRequantized,
        is_ours       ? Severity::kError
        : is_promised ? Severity::kWarning
                      : Severity::kNote,
        checked.tensor.name,
        fmt::format("the source, quantized again{}, has other bytes: {} of {} codes and {} of {} "
                    "scales differ{}",
                    is_promised ? " with the recorded settings" : " with default settings",
                    found.different_codes, statistics.codes, found.different_scales,
                    statistics.blocks,
                    found.has_other_global_scale ? ", and the global scale" : ""));
  }

  const CheckCheckpointOptions& options_;
  const Checkpoint checkpoint_;
  std::optional<Checkpoint> source_;
  std::vector<LogicalTensor> source_tensors_;
  std::map<std::string_view, const LogicalTensor*> pairs_;  // The source's, by name.
  std::set<std::string_view> unreadable_;  // Names of weights whose values mean nothing.
  RecordedSettings settings_;
  bool is_recorded_source_ = false;
  const bool is_ue8m0_declared_;  // config.json says that F32 scales are powers of two.
  std::map<std::string, std::vector<const LogicalTensor*>> groups_;  // Quantized ones, by group.
  std::map<std::string, float> group_amax_;
  ErrorAccumulator total_;
  FindingList findings_;
  CheckpointCheck result_;
};

}  // namespace

std::vector<Finding> FindingList::sorted() {
  std::stable_sort(findings_.begin(), findings_.end(), [](const Finding& a, const Finding& b) {
    return std::pair(a.severity, std::string_view(a.tensor)) <
           std::pair(b.severity, std::string_view(b.tensor));
  });
  return std::move(findings_);
}

std::string_view name(Severity severity) {
  switch (severity) {
    case Severity::kError:
      return "error";
    case Severity::kWarning:
      return "warning";
    case Severity::kNote:
      break;
  }
  return "note";
}

int64_t CheckpointCheck::count(Severity severity) const {
  return std::count_if(findings.begin(), findings.end(),
                       [&](const Finding& finding) { return finding.severity == severity; });
}

bool CheckpointCheck::passed() const {
  return count(Severity::kError) == 0 && count(Severity::kWarning) == 0;
}

void write_report(const std::string& path, std::string_view text) {
  write_file_atomically(path, text);
}

CheckpointCheck check_checkpoint(const std::string& path, const CheckCheckpointOptions& options) {
  return CheckpointChecker(path, options).run();
}

}  // namespace narrowfloat
