// Dequantizes a checkpoint: every quantized weight becomes one unquantized tensor, everything else
// is copied, and the configs lose the declaration.
#include <chrono>
#include <cmath>

#include "base/throw_error.h"
#include "checkpoint/escape.h"
#include "layers/config_rewrite.h"
#include "layers/encode_settings.h"
#include "layers/memory_plan.h"
#include "layers/nonfinite.h"
#include "layers/rewrite.h"
#include "layers/source_facts.h"
#include "layers/weight_reader.h"
#include "tensor/element_io.h"

namespace narrowfloat {
namespace {

class CheckpointDequantizer {
 public:
  CheckpointDequantizer(const std::string& source, const DequantizeCheckpointOptions& options)
      : options_(options), source_(source), memory_(memory_budget(options.max_memory_bytes)) {}

  CheckpointReport run(const std::string& target) {
    const auto start = std::chrono::steady_clock::now();
    check_options();
    check_number_of_tensors(source_);
    report_.warnings = source_warnings(source_);
    plan();
    memory_.check();
    RewriteJob job{.source = source_, .target = target, .items = std::move(items_)};
    job.metadata = base_metadata(source_);
    job.metadata[kSettingsKey] = fmt::format("dtype={}", name(options_.dtype));
    set_options(options_, job);
    if (!source_.config_text().empty()) {
      job.config_text = without_declaration(source_.config_text());
    }
    complete_report(rewrite_checkpoint(std::move(job)), memory_, start, report_);
    return std::move(report_);
  }

 private:
  void check_options() const {
    const DType dtype = options_.dtype;
    if (dtype != DType::kBF16 && dtype != DType::kF16 && dtype != DType::kF32) {
      throw_invalid("option dtype: expected BF16, F16 or F32, got {}", name(dtype));
    }
    check_max_shard_bytes(options_.max_shard_bytes);
  }

  void plan() {
    weights_ = recognise(source_);
    for (const LogicalTensor& weight : weights_) {
      TensorReport report;
      report.name = weight.name;
      report.shape = weight.shape;
      report.source_bytes = weight.size_bytes;
      if (weight.convention) {
        report.action = "dequantize";
        report.target_bytes = add_weight(weight);
        report_.quantized_source_bytes += weight.size_bytes;
      } else {
        report.action = "copy";
        report.reason = "not quantized";
        report.target_bytes = weight.size_bytes;
        memory_.add_copy(weight.size_bytes);
        items_.push_back(copy_item(source_, *source_.find(weight.name),
                                   [this] { return memory_.copy_buffer_bytes(); }));
      }
      report_.tensors.push_back(std::move(report));
    }
    if (report_.quantized_source_bytes == 0) {
      throw_invalid("{}: no tensor is quantized, so there is nothing to dequantize",
                    printable(source_.path()));
    }
  }

  // Returns the size of the unquantized tensor.
  uint64_t add_weight(const LogicalTensor& weight) {
    const CodeMatrix matrix = code_matrix(weight);
    const ConventionSpec& spec = convention_spec(*weight.convention);
    RowGrid grid = {.tile = format_info(spec.info.format).block_rows, .smallest = 1};
    if (weight.is_transposed) grid = {.tile = matrix.rows, .smallest = matrix.rows};
    const int64_t copies = weight.is_transposed ? 2 : 1;
    const RowRanges ranges = memory_.add(weight.name, matrix.all_rows(), grid, [&](int64_t rows) {
      return QuantizedWeight::buffer_bytes(spec, rows, matrix.cols) +
             output_bytes(copies * rows * matrix.cols);
    });
    const CheckpointTensor& values = *source_.find(weight.parts.front());
    RewriteItem item;
    item.name = weight.name;
    item.tensors = {{weight.name, options_.dtype, weight.shape}};
    item.source_bytes = weight.size_bytes;
    item.source_shard = values.shard;
    item.source_offset = values.info.offset;
    item.write = [this, &weight, ranges](SafetensorsWriter& writer) {
      dequantize_weight(weight, ranges, writer);
    };
    items_.push_back(std::move(item));
    return output_bytes(weight.num_elements());
  }

  [[nodiscard]] uint64_t output_bytes(int64_t elements) const {
    return static_cast<uint64_t>(elements) * static_cast<uint64_t>(bits(options_.dtype)) / 8;
  }

  void dequantize_weight(const LogicalTensor& weight, const RowRanges& ranges,
                         SafetensorsWriter& writer) {
    const CodeMatrix matrix = code_matrix(weight);
    const int64_t cols = matrix.cols;
    QuantizedReader reader(source_, weight, ranges.rows_at_a_time);
    std::vector<std::byte> output(output_bytes(ranges.rows_at_a_time * cols));
    std::vector<std::byte> transposed(weight.is_transposed ? output.size() : 0);
    BadScales bad;
    Overflows overflows;
    for_each_range(ranges, [&](int64_t first, int64_t count) {
      reader.load(first, count);
      const BadScales found =
          bad_scales(scale_type_of(reader.coded().spec()), reader.coded().scales());
      // Ranges within one tile see the same scales.
      if (first % format_info(reader.coded().spec().info.format).block_rows == 0) {
        bad.nonfinite += found.nonfinite;
        bad.negative += found.negative;
      }
      const TensorView values =
          TensorView::contiguous(output.data(), options_.dtype, {count, cols});
      reader.coded().decode(values);
      if (first_nonfinite(values) >= 0) count_overflows(reader.coded(), values, first, overflows);
      auto rows = std::span<const std::byte>(output).first(output_bytes(count * cols));
      if (weight.is_transposed) {
        const CodeMatrix experts = {count / matrix.rows, matrix.rows, cols};
        transpose_experts(experts, options_.dtype, rows, transposed);
        rows = std::span<const std::byte>(transposed).first(rows.size());
      }
      writer.write(weight.name, output_bytes(first * cols), rows);
    });
    if (overflows.count > 0) refuse_overflows(weight.name, overflows);
    warn_of_scales(weight.name, bad);
    if (overflows.beyond_f32 > 0) {
      report_.warnings.push_back(
          fmt::format("tensor '{}': {} value(s) are beyond the range of F32 and became infinite",
                      printable(weight.name), overflows.beyond_f32));
    }
  }

  // Elements that became infinite although codes and scales are finite.
  struct Overflows {
    int64_t count = 0;
    int64_t row = 0;  // Place of the first one.
    int64_t col = 0;
    double value = 0;
    int64_t beyond_f32 = 0;  // Not in `count`: no dtype holds them.
  };

  static void count_overflows(const QuantizedWeight& coded, const TensorView& values,
                              int64_t first_row, Overflows& overflows) {
    const int64_t cols = coded.cols();
    for (int64_t row = 0; row < coded.rows(); ++row) {
      const TensorView one_row = TensorView::contiguous(
          element_pointer(values.data, values.dtype, row * cols), values.dtype, {1, cols});
      if (first_nonfinite(one_row) < 0) continue;
      for (int64_t col = 0; col < cols; ++col) {
        const double value = coded.value(row, col);
        if (!std::isfinite(value) || is_finite(one_row, col)) continue;
        if (!std::isfinite(static_cast<float>(value))) {
          ++overflows.beyond_f32;
          continue;
        }
        if (overflows.count++ > 0) continue;
        overflows.row = first_row + row;
        overflows.col = col;
        overflows.value = value;
      }
    }
  }

  static bool is_finite(const TensorView& row, int64_t col) {
    return first_nonfinite(TensorView::contiguous(element_pointer(row.data, row.dtype, col),
                                                  row.dtype, {1, 1})) < 0;
  }

  // Nothing has been committed.
  [[noreturn]] void refuse_overflows(const std::string& weight, const Overflows& overflows) const {
    const char* const advice = options_.dtype == DType::kF16 ? "use bf16 or fp32" : "use fp32";
    throw_invalid(
        "option dtype: tensor '{}' has {} value(s) beyond the range of {}, the first, {:g}, at "
        "[{}, {}]; {}",
        printable(weight), overflows.count, name(options_.dtype), overflows.value, overflows.row,
        overflows.col, advice);
  }

  void warn_of_scales(const std::string& weight, const BadScales& bad) {
    const auto warn = [&](int64_t count, const char* what) {
      if (count == 0) return;
      report_.warnings.push_back(
          fmt::format("tensor '{}': {} block scale(s) are {}", printable(weight), count, what));
    };
    warn(bad.nonfinite, "NaN or infinite, and so are all values of their blocks");
    warn(bad.negative, "negative, which no quantizer writes; values keep that sign");
  }

  const DequantizeCheckpointOptions& options_;
  const Checkpoint source_;
  MemoryPlan memory_;
  std::vector<LogicalTensor> weights_;
  std::vector<RewriteItem> items_;
  CheckpointReport report_;
};

}  // namespace

CheckpointReport dequantize_checkpoint(const std::string& source, const std::string& target,
                                       const DequantizeCheckpointOptions& options) {
  return CheckpointDequantizer(source, options).run(target);
}

}  // namespace narrowfloat
