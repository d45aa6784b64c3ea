// Gives weights that consumers merge one global scale, the largest of theirs. The block scales of
// the others shrink by the ratio and are rounded to E4M3; where that rounding is coarse (denormal
// scales) their codes are rounded again for the new scale.
#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <map>
#include <memory>

#include "base/throw_error.h"
#include "checkpoint/conventions/declaration.h"
#include "checkpoint/escape.h"
#include "checkpoint/file_io.h"
#include "formats/minifloat.h"
#include "layers/encode_settings.h"
#include "layers/memory_plan.h"
#include "layers/rewrite.h"
#include "layers/selection.h"
#include "layers/source_facts.h"
#include "layers/value_reader.h"
#include "narrowfloat/check.h"
#include "runtime/parallel.h"

namespace narrowfloat {
namespace {

constexpr const char* kModelOptConfig = "hf_quant_config.json";
constexpr uint64_t kMaxModelOptConfigBytes = uint64_t{16} << 20;
constexpr int64_t kRescaleGrain = 4096;  // Blocks.

// The factor from a block scale to the values.
double decode_factor(const ConventionSpec& spec, float stored) {
  const auto scale = static_cast<double>(stored);
  return spec.global_sense == GlobalScaleSense::kEncode ? 1 / scale : scale;
}

// Rescales one block in place; `ratio`: old factor over new one.
void rescale_block(const ZeroScaleBytes& zero_scales, double ratio, std::byte& scale,
                   std::span<std::byte> codes) {
  const double old_scale = static_cast<double>(E4M3::decode(static_cast<uint8_t>(scale)));
  const bool is_zero = std::all_of(codes.begin(), codes.end(), [](std::byte pair) {
    return (pair & std::byte{0x77}) == std::byte{0};
  });
  if (is_zero || !std::isfinite(old_scale)) return;
  uint8_t stored = E4M3::encode(static_cast<float>(old_scale * ratio));
  if ((stored & E4M3::kMagnitudeMask) == 0) stored = zero_scales.underflow;
  scale = static_cast<std::byte>(stored);
  const double factor = old_scale * ratio / static_cast<double>(E4M3::decode(stored));
  std::array<uint8_t, 16> new_codes{};
  for (size_t code = 0; code < new_codes.size(); ++code) {
    const auto value = static_cast<double>(E2M1::decode(static_cast<uint8_t>(code)));
    new_codes[code] = E2M1::encode(static_cast<float>(value * factor));
  }
  for (std::byte& pair : codes) {
    const auto both = static_cast<uint8_t>(pair);
    pair = static_cast<std::byte>(new_codes[both & 0xFU] | new_codes[both >> 4] << 4);
  }
}

void rescale(QuantizedWeight& weight, double ratio) {
  const std::span<std::byte> scales = weight.scales();
  const std::span<std::byte> values = weight.values();
  const auto block_bytes =
      static_cast<size_t>(format_info(weight.spec().info.format).block_cols / 2);
  parallel_for(static_cast<int64_t>(scales.size()), kRescaleGrain, [&](int64_t begin, int64_t end) {
    for (auto block = static_cast<size_t>(begin); block < static_cast<size_t>(end); ++block) {
      rescale_block(*weight.spec().zero_scales, ratio, scales[block],
                    values.subspan(block * block_bytes, block_bytes));
    }
  });
}

class CheckpointFixer {
 public:
  CheckpointFixer(const std::string& source, const FixCheckpointOptions& options)
      : options_(options), source_(source), memory_(memory_budget(options.max_memory_bytes)) {}

  CheckpointReport run(const std::string& target) {
    const auto start = std::chrono::steady_clock::now();
    check_max_shard_bytes(options_.max_shard_bytes);
    check_number_of_tensors(source_);
    report_.warnings = source_warnings(source_);
    weights_ = recognise(source_);
    choose_scales();
    if (chosen_.empty()) {
      throw_invalid(
          "{}: no global scale differs from those that it is merged with, so there is "
          "nothing to fix",
          printable(source_.path()));
    }
    report_.tensors.resize(weights_.size());
    for (size_t i = 0; i < weights_.size(); ++i) add(weights_[i], report_.tensors[i]);
    memory_.check();
    complete_report(rewrite_checkpoint(make_job(target)), memory_, start, report_);
    report_.total = figures_of(total_.total());
    return std::move(report_);
  }

 private:
  // The scale that a weight gets where its own is another.
  void choose_scales() {
    struct Member {
      const LogicalTensor* weight;
      float stored;
      double factor;
    };
    std::map<std::string, std::vector<Member>> groups;
    for (const LogicalTensor& weight : weights_) {
      const std::optional<float> stored = ValueReader(source_, weight).stored_global_scale();
      const std::string key = shared_scale_key(weight.name);
      if (!stored || key.empty()) continue;
      const ConventionSpec& spec = convention_spec(*weight.convention);
      if (!std::isfinite(*stored) || *stored <= 0) {
        throw_error(ErrorKind::kCorruptData,
                    "{}: tensor '{}': the global scale must be finite and positive, got {}",
                    printable(source_.path()), printable(weight.name), *stored);
      }
      groups[fmt::format("{} {}", key, spec.info.name)].push_back(
          {&weight, *stored, decode_factor(spec, *stored)});
    }
    for (const auto& [unused_key, members] : groups) {
      const Member& largest =
          *std::max_element(members.begin(), members.end(),
                            [](const Member& a, const Member& b) { return a.factor < b.factor; });
      for (const Member& member : members) {
        if (member.stored != largest.stored) chosen_.emplace(member.weight, largest.stored);
      }
    }
  }

  // All parts of a weight stay together.
  void add(const LogicalTensor& weight, TensorReport& report) {
    const CheckpointTensor& values = *source_.find(weight.parts.front());
    RewriteItem item;
    item.name = weight.name;
    item.source_bytes = weight.size_bytes;
    item.source_shard = values.shard;
    item.source_offset = values.info.offset;
    for (const std::string& part : weight.parts) {
      const TensorInfo& info = source_.find(part)->info;
      item.tensors.push_back({part, info.dtype, info.shape});
    }
    report.name = weight.name;
    report.shape = weight.shape;
    report.source_bytes = weight.size_bytes;
    report.target_bytes = weight.size_bytes;
    const auto chosen = chosen_.find(&weight);
    if (chosen == chosen_.end()) {
      report.action = "copy";
      report.reason = "nothing to fix";
      memory_.add_copy(weight.size_bytes);
      item.write = [this, &weight](SafetensorsWriter& writer) { copy_parts(weight, 0, writer); };
    } else {
      report.action = "rescale";
      report_.quantized_source_bytes += weight.size_bytes;
      const ConventionSpec& spec = convention_spec(*weight.convention);
      const int64_t cols = weight.shape[1];
      const RowRanges ranges =
          memory_.add(weight.name, weight.shape[0], {.tile = 1, .smallest = 1}, [&](int64_t rows) {
            return QuantizedWeight::buffer_bytes(spec, rows, cols) + error_buffer_bytes(rows) +
                   2 * static_cast<uint64_t>(rows * cols) * sizeof(float);
          });
      item.write = [this, &weight, ranges, stored = chosen->second,
                    &report](SafetensorsWriter& writer) {
        write_rescaled(weight, ranges, stored, report, writer);
      };
    }
    items_.push_back(std::move(item));
  }

  void copy_parts(const LogicalTensor& weight, size_t first_part, SafetensorsWriter& writer) {
    for (size_t i = first_part; i < weight.parts.size(); ++i) {
      copy_item(source_, *source_.find(weight.parts[i]), [this] {
        return std::max<uint64_t>(memory_.copy_buffer_bytes(), kSmallestBuffer);
      }).write(writer);
    }
  }

  void write_rescaled(const LogicalTensor& weight, const RowRanges& ranges, float stored,
                      TensorReport& report, SafetensorsWriter& writer) {
    const ConventionSpec& spec = convention_spec(*weight.convention);
    const int64_t cols = weight.shape[1];
    QuantizedReader reader(source_, weight, ranges.rows_at_a_time);
    QuantizedWeight& coded = reader.coded();
    const double ratio = decode_factor(spec, coded.global_scale()) / decode_factor(spec, stored);
    std::vector<float> before(static_cast<size_t>(ranges.rows_at_a_time * cols));
    std::vector<float> after(before.size());
    ErrorAccumulator errors;
    uint64_t values_written = 0;
    uint64_t scales_written = 0;
    for_each_range(ranges, [&](int64_t first, int64_t count) {
      reader.load(first, count);
      coded.decode(TensorView::contiguous(before.data(), DType::kF32, {count, cols}));
      rescale(coded, ratio);
      coded.decode_with(stored, TensorView::contiguous(after.data(), DType::kF32, {count, cols}));
      writer.write(weight.parts[0], values_written, coded.values());
      writer.write(weight.parts[1], scales_written, coded.scales());
      values_written += coded.values().size();
      scales_written += coded.scales().size();
      add_errors(errors, {first, count, cols},
                 {DType::kF32, std::as_bytes(std::span(before)).data()},
                 {DType::kF32, std::as_bytes(std::span(after)).data()}, nullptr);
    });
    writer.write(weight.parts[2], 0, std::as_bytes(std::span(&stored, 1)));
    copy_parts(weight, 3, writer);  // The activation scale.
    report.figures = figures_of(errors.total());
    total_.add(errors.total());
  }

  RewriteJob make_job(const std::string& target) {
    RewriteJob job{.source = source_, .target = target, .items = std::move(items_)};
    job.metadata = base_metadata(source_);
    job.metadata[kSettingsKey] = "fix=global_scales" + recorded_settings(source_).statistics;
    for (const SafetensorsReader& shard : source_.shards()) {
      const auto convention = shard.metadata().find(kConventionKey);
      if (convention != shard.metadata().end()) job.metadata.insert(*convention);
    }
    job.config_text = source_.config_text();
    const std::vector<std::string>& files = source_.auxiliary_files();
    if (std::find(files.begin(), files.end(), kModelOptConfig) != files.end()) {
      job.extra_configs.push_back(
          {kModelOptConfig,
           read_file_bounded(join_path(source_.path(), kModelOptConfig), kMaxModelOptConfigBytes)});
    }
    set_options(options_, job);
    return job;
  }

  // Room for the scalar of a weight that is not copied.
  static constexpr uint64_t kSmallestBuffer = 64;

  const FixCheckpointOptions& options_;
  const Checkpoint source_;
  MemoryPlan memory_;
  std::vector<LogicalTensor> weights_;
  std::map<const LogicalTensor*, float> chosen_;  // The new stored scale.
  std::vector<RewriteItem> items_;
  ErrorAccumulator total_;
  CheckpointReport report_;
};

}  // namespace

CheckpointReport fix_checkpoint(const std::string& source, const std::string& target,
                                const FixCheckpointOptions& options) {
  return CheckpointFixer(source, options).run(target);
}

}  // namespace narrowfloat
