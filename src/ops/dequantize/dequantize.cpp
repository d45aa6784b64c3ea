// The public dequantizer: checks, selects an implementation, runs it.
#include <array>

#include <fmt/format.h>

#include "base/throw_error.h"
#include "ops/dequantize/dequantize_problem.h"
#include "runtime/dispatch.h"
#include "tensor/block_math.h"
#include "tensor/view_checks.h"

namespace narrowfloat {
namespace {

GlobalScaleAxis global_scale_axis(const QuantizedView& input) {
  const FormatInfo& info = format_info(input.format);
  const TensorView& global = input.global_scale;
  if (!info.has_global_scale) {
    if (!global.is_absent()) {
      throw_invalid("input.global_scale: {} has none; leave it unset", info.name);
    }
    return GlobalScaleAxis::kNone;
  }
  // A missing global scale is 1 (spec 7); a row scale cannot be missing.
  if (global.is_absent() && !info.has_row_scale) return GlobalScaleAxis::kNone;
  const int64_t count = global.num_elements();
  require_vector("input.global_scale", global, DType::kF32, count, input.scales.device);
  if (info.has_row_scale) {
    if (count == input.batch * input.rows) return GlobalScaleAxis::kBatchRow;
    throw_invalid("input.global_scale: {} needs one value per row, {}, got {}", info.name,
                  input.batch * input.rows, to_string(global));
  }
  const bool says_batch =
      global.rank == 2 && global.shape[0] == input.batch && global.shape[1] == 1;
  if (count == 1) return GlobalScaleAxis::kTensor;
  if (count == input.rows && !says_batch) return GlobalScaleAxis::kRow;
  if (count == input.batch) return GlobalScaleAxis::kBatch;
  throw_invalid("input.global_scale: expected [1], [{}] (rows) or [{}, 1] (batch), got {}",
                input.rows, input.batch, to_string(global));
}

struct Lowered {
  DequantizeProblem problem;
  DequantizeArgs args;
};

void lower_row_offsets(const DequantizeOptions& options, Lowered& lowered) {
  if (options.row_offsets.is_absent()) return;
  const DequantizeProblem& problem = lowered.problem;
  if (problem.format != FormatId::kFp8Block1x128 || problem.layout != ScaleLayoutId::kMnMajor ||
      problem.batch != 1) {
    throw_invalid("row_offsets: only for fp8_1x128 with mn_major scales and batch 1");
  }
  require_row_offsets(options.row_offsets, problem.rows, problem.device);
  const int64_t count = options.row_offsets.num_elements();
  lowered.problem.groups = count - 1;
  lowered.args.row_offsets = {static_cast<const int64_t*>(options.row_offsets.data),
                              static_cast<size_t>(count)};
}

Lowered lower(const QuantizedView& input, const TensorView& output,
              const DequantizeOptions& options) {
  const FormatInfo& info = format_info(input.format);
  Lowered lowered;
  DequantizeProblem& problem = lowered.problem;
  problem.format = input.format;
  problem.layout = input.scales.layout;
  problem.output = output.dtype;
  problem.device = input.values.device;
  problem.batch = input.batch;
  problem.rows = input.rows;
  problem.cols = input.cols;
  lower_row_offsets(options, lowered);
  int64_t scale_rows = scale_extents(info, input.rows, input.cols).rows;
  if (problem.groups > 0) scale_rows = grouped_scale_row(input.rows, problem.groups);
  require_quantized("input", input, scale_rows);
  problem.global_axis = global_scale_axis(input);
  problem.global_scale_divides = options.global_scale_divides;
  if (options.global_scale_divides && !info.has_global_scale) {
    throw_invalid("global_scale_divides: {} has no global scale", info.name);
  }
  require_dtype("output", output, {DType::kF32, DType::kBF16, DType::kF16});
  require_device("output", output.device, problem.device);
  const RowMatrix rows = require_rows("output", output, input.cols);
  if (rows.rows != input.batch * input.rows) {
    throw_invalid("output: expected {} x {} rows, got {}", input.batch, input.rows,
                  to_string(output));
  }
  require_cuda_alignment("input.values", input.values.data, problem.device);
  require_cuda_alignment("input.scales", input.scales.data, problem.device);
  if (output.num_elements() > 0) {  // Otherwise the stride may be any number.
    require_cuda_rows("output", output.data, rows.stride * (bits(output.dtype) / 8),
                      problem.device);
  }
  const std::array outputs{byte_range("output", output)};
  const std::array inputs{byte_range("input.values", input.values),
                          byte_range("input.scales", input.scales),
                          byte_range("input.global_scale", input.global_scale),
                          byte_range("row_offsets", options.row_offsets)};
  require_disjoint(outputs, inputs);
  lowered.args.values = static_cast<const uint8_t*>(input.values.data);
  lowered.args.value_row_bytes = input.values.shape[static_cast<size_t>(input.values.rank - 1)];
  lowered.args.scales = input.scales;
  lowered.args.global_scale = static_cast<const float*>(input.global_scale.data);
  lowered.args.output = output.data;
  lowered.args.output_stride = rows.stride;
  return lowered;
}

}  // namespace

std::span<const DequantizeImpl> dequantize_impls() {
  static const std::array kImpls {
#if defined(NARROWFLOAT_CUDA)
    kDequantizeSm90, kDequantizeSm80,
#endif
#if defined(NARROWFLOAT_VECTOR_LEVELS)
        kDequantizeCpuAvx512, kDequantizeCpuAvx2,
#endif
        kDequantizeCpuBaseline, kDequantizeCpuReference
  };
  return kImpls;
}

std::string to_string(const DequantizeProblem& problem) {
  return fmt::format("{} {} {}x{}x{} -> {} on {}", name(problem.format), name(problem.layout),
                     problem.batch, problem.rows, problem.cols, name(problem.output),
                     to_string(problem.device));
}

void dequantize(const QuantizedView& input, const TensorView& output,
                const DequantizeOptions& options, Stream stream) {
  const Lowered lowered = lower(input, output, options);
  // Other extents of an output without elements may be any numbers, too many to go over.
  if (output.num_elements() == 0) return;
  select("dequantize", dequantize_impls(), lowered.problem)
      .run(lowered.problem, lowered.args, stream);
}

}  // namespace narrowfloat
