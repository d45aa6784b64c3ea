// Checks every requirement of the quantizers before anything is written.
#include "ops/quantize/quantize_checks.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "base/bad_enumerator.h"
#include "base/int_math.h"
#include "base/throw_error.h"
#include "formats/global_scale.h"
#include "tensor/block_math.h"
#include "tensor/element_io.h"
#include "tensor/view_checks.h"

namespace narrowfloat {
namespace {

bool is_fp4(FormatId format) { return format_info(format).element_bits == 4; }

void require_default(std::string_view option, bool is_default, FormatId format) {
  if (is_default) return;
  throw_invalid("{}: {} has no use for it; leave it unset", option, name(format));
}

void require_positive(std::string_view argument, float value) {
  if (std::isfinite(value) && value > 0.0F) return;
  throw_invalid("{}: expected a finite value > 0, got {}", argument, value);
}

// Refuses values that were cast into an enumeration.
void check_enumerators(const QuantizeOptions& options) {
  name(options.math);
  name(options.mx_scale);
  name(options.fp8_rule);
  const auto error = static_cast<unsigned>(options.four_over_six.error);
  const auto error_math = static_cast<unsigned>(options.four_over_six.error_math);
  if (error > 1) throw_bad_enumerator("four_over_six.error", static_cast<int>(error));
  if (error_math > 1) {
    throw_bad_enumerator("four_over_six.error_math", static_cast<int>(error_math));
  }
}

void check_input_dtype(const QuantizeCall& call) {
  const FormatId format = call.output.format;
  if (call.source == RowSourceKind::kSmooth) {
    return require_dtype("input", call.input, {DType::kBF16});
  }
  if (call.source != RowSourceKind::kPlain) {
    return require_dtype("input", call.input, {DType::kBF16, DType::kF16});
  }
  if (format == FormatId::kNvfp4 || format == FormatId::kMxfp4) {
    return require_dtype("input", call.input,
                         {DType::kF32, DType::kBF16, DType::kF16, DType::kF8E4M3});
  }
  require_dtype("input", call.input, {DType::kF32, DType::kBF16, DType::kF16});
}

// Refuses options that the format does not have.
void check_option_use(const QuantizeCall& call) {
  const QuantizeOptions& options = call.options;
  const FormatId format = call.output.format;
  const FormatInfo& info = format_info(format);
  const bool is_fp8_input = call.input.dtype == DType::kF8E4M3;
  const bool takes_encode_scale =
      format == FormatId::kNvfp4 || (format == FormatId::kMxfp4 && is_fp8_input);
  const bool is_fp8 = info.scale_type == ScaleType::kF32;
  const bool is_mx = info.scale_type == ScaleType::kUE8M0;
  require_default("encode_scale", !options.encode_scale || takes_encode_scale, format);
  require_default("encode_scales", options.encode_scales.is_absent() || takes_encode_scale, format);
  require_default("four_over_six", !options.four_over_six.enabled || info.has_global_scale, format);
  require_default("base_decode_scale", !options.base_decode_scale || info.has_row_scale, format);
  require_default("base_decode_scales",
                  options.base_decode_scales.is_absent() || info.has_row_scale, format);
  require_default("row_list", options.row_list.is_absent() || info.has_row_scale, format);
  require_default("mx_scale", options.mx_scale == Ue8m0Rounding::kUp || is_mx, format);
  require_default("fp8_rule", options.fp8_rule == Fp8ScaleRule::kReciprocal || is_fp8, format);
  require_default("fp8_eps", !options.fp8_eps || is_fp8, format);
  require_default("fp8_decode_scale", !options.fp8_decode_scale || format == FormatId::kFp8Tensor,
                  format);
  require_default("valid_rows", options.valid_rows.is_absent() || !is_fp8, format);
  require_default("row_offsets",
                  options.row_offsets.is_absent() || format == FormatId::kFp8Block1x128, format);
}

void check_option_combinations(const QuantizeCall& call) {
  const QuantizeOptions& options = call.options;
  const bool is_fp8_input = call.input.dtype == DType::kF8E4M3;
  if (options.encode_scale && !options.encode_scales.is_absent()) {
    throw_invalid("encode_scale: give either it or encode_scales, not both");
  }
  if (options.encode_scale) require_positive("encode_scale", *options.encode_scale);
  if (options.base_decode_scale && !options.base_decode_scales.is_absent()) {
    throw_invalid("base_decode_scale: give either it or base_decode_scales, not both");
  }
  if (options.base_decode_scale) require_positive("base_decode_scale", *options.base_decode_scale);
  if (options.fp8_decode_scale) {
    require_positive("fp8_decode_scale", *options.fp8_decode_scale);
    if (options.fp8_eps || options.fp8_rule != Fp8ScaleRule::kReciprocal) {
      throw_invalid(
          "fp8_decode_scale: a given scale leaves nothing for fp8_rule and fp8_eps to do");
    }
  }
  if (is_fp8_input && options.four_over_six.enabled) {
    throw_invalid("four_over_six: not offered for F8_E4M3 input; use F32, F16 or BF16");
  }
  if (is_fp8_input && options.mx_scale != Ue8m0Rounding::kUp) {
    throw_invalid("mx_scale: only up is defined for F8_E4M3 input, got {}", name(options.mx_scale));
  }
  const int e4m3_max = options.four_over_six.e4m3_max;
  if (e4m3_max != 448 && e4m3_max != 256) {
    throw_invalid("four_over_six.e4m3_max: expected 448 or 256, got {}", e4m3_max);
  }
  if (!options.four_over_six.enabled && options.four_over_six != FourOverSix{}) {
    throw_invalid("four_over_six: its options need four_over_six.enabled");
  }
  if (!options.valid_rows.is_absent() && is_norm(call.source)) {
    throw_invalid("valid_rows: not offered for the norm forms");
  }
  if (!options.row_list.is_absent() && is_norm(call.source)) {
    throw_invalid("row_list: not offered for the norm forms");
  }
  if (!options.valid_rows.is_absent() && !options.row_list.is_absent()) {
    throw_invalid("valid_rows: give either it or row_list, not both");
  }
}

BlockRules block_rules(const QuantizeCall& call) {
  const QuantizeOptions& options = call.options;
  const bool divides_scale =
      options.fp8_rule == Fp8ScaleRule::kAmaxDiv || options.fp8_rule == Fp8ScaleRule::kPow2Ceil;
  const float eps = options.fp8_eps.value_or(divides_scale ? 1e-4F : 0.0F);
  if (!std::isfinite(eps) || eps < 0.0F) {
    throw_invalid("fp8_eps: expected a finite value >= 0, got {}", eps);
  }
  // With a smaller value a zero block's scale would be zero or denormal and its codes NaN.
  constexpr float kLeastEps = 448.0F * 0x1p-126F;
  if (divides_scale && eps < kLeastEps) {
    throw_invalid("fp8_eps: rule {} needs at least {}, got {}", name(options.fp8_rule), kLeastEps,
                  eps);
  }
  if (options.math == MathMode::kFast && options.fp8_rule == Fp8ScaleRule::kReciprocal &&
      eps != 0.0F) {
    throw_invalid("fp8_eps: expected 0 for rule reciprocal in fast mode, got {}", eps);
  }
  return {.mx_rounding = options.mx_scale,
          .fp8_rule = options.fp8_rule,
          .fp8_eps = eps,
          .input_max = largest_finite(call.input.dtype)};
}

// A scale in host memory is read and checked here; one in device memory is read by the kernel.
void lower_base_scale(const TensorView& scale, LoweredQuantize& lowered) {
  if (scale.is_absent()) return;
  require_vector("base_decode_scales", scale, DType::kF32, 1, lowered.problem.device);
  const auto* place = static_cast<const float*>(scale.data);
  if (lowered.problem.device.type == DeviceType::kCpu) {
    require_positive("base_decode_scales", *place);
    lowered.args.base_decode_scale = *place;
  } else {
    lowered.args.device_base = place;
  }
}

// Lowers source and axis of the encode scales, and the size of the decode scales stored from them.
void lower_encode_scales(const QuantizeCall& call, LoweredQuantize& lowered) {
  QuantizeProblem& problem = lowered.problem;
  const QuantizeOptions& options = call.options;
  const bool has_global = format_info(problem.format).has_global_scale;
  if (problem.format == FormatId::kNvfp4PerToken) {
    const auto range = 6.0F * static_cast<float>(options.four_over_six.e4m3_max);
    lowered.args.base_decode_scale = options.base_decode_scale.value_or(1.0F / range);
    lower_base_scale(options.base_decode_scales, lowered);
  } else if (!options.encode_scales.is_absent()) {
    problem.encode_source = EncodeScaleSource::kTensor;
    const int64_t per_axis = problem.has_valid_rows ? problem.batch : problem.rows;
    const int64_t count = options.encode_scales.num_elements();
    if (count != 1 && count != per_axis) {
      throw_invalid("encode_scales: expected 1 or {} values, got {}", per_axis,
                    to_string(options.encode_scales));
    }
    require_vector("encode_scales", options.encode_scales, DType::kF32, count, problem.device);
    lowered.args.encode_scales = static_cast<const float*>(options.encode_scales.data);
    if (count != 1) {
      problem.encode_axis =
          problem.has_valid_rows ? EncodeScaleAxis::kBatch : EncodeScaleAxis::kRow;
    }
  } else if (options.encode_scale) {
    problem.encode_source = EncodeScaleSource::kHost;
    lowered.args.encode_scale = *options.encode_scale;
  } else if (has_global) {
    problem.encode_source = EncodeScaleSource::kAmax;
    if (problem.has_valid_rows) problem.encode_axis = EncodeScaleAxis::kBatch;
  }
}

void lower_global_scale(const QuantizeCall& call, LoweredQuantize& lowered) {
  const QuantizeProblem& problem = lowered.problem;
  const FormatInfo& info = format_info(problem.format);
  const TensorView& global = call.output.global_scale;
  if (!info.has_global_scale) {
    if (!global.is_absent()) {
      throw_invalid("output.global_scale: {} has none; leave it unset", info.name);
    }
    return;
  }
  int64_t count = 1;
  if (info.has_row_scale) count = problem.batch * problem.rows;
  if (problem.encode_axis == EncodeScaleAxis::kRow) count = problem.rows;
  if (problem.encode_axis == EncodeScaleAxis::kBatch) count = problem.batch;
  require_vector("output.global_scale", global, DType::kF32, count, problem.device);
  const bool says_batch = global.rank == 2 && global.shape[0] == problem.batch;
  if (problem.encode_axis == EncodeScaleAxis::kBatch && count == problem.rows && count > 1 &&
      !says_batch) {
    throw_invalid("output.global_scale: {} values could be meant per row; use shape [{}, 1]", count,
                  count);
  }
  lowered.args.global_scale = static_cast<float*>(global.data);
}

void lower_row_selection(const QuantizeCall& call, LoweredQuantize& lowered) {
  QuantizeProblem& problem = lowered.problem;
  const QuantizeOptions& options = call.options;
  if (!options.row_list.is_absent()) {
    if (problem.batch != 1) throw_invalid("row_list: expected batch 1, got {}", problem.batch);
    const int64_t count = options.row_list.num_elements();
    require_vector("row_list", options.row_list, DType::kI32, count, problem.device);
    problem.has_row_list = true;
    lowered.args.row_list = {static_cast<const int32_t*>(options.row_list.data),
                             static_cast<size_t>(count)};
  }
  if (!options.valid_rows.is_absent()) {
    require_vector("valid_rows", options.valid_rows, DType::kI32, problem.batch, problem.device);
    problem.has_valid_rows = true;
    lowered.args.valid_rows = {static_cast<const int32_t*>(options.valid_rows.data),
                               static_cast<size_t>(problem.batch)};
  }
  if (!options.row_offsets.is_absent()) {
    if (problem.batch != 1) throw_invalid("row_offsets: expected batch 1, got {}", problem.batch);
    if (call.output.scales.layout != ScaleLayoutId::kMnMajor) {
      throw_invalid("row_offsets: need scales in layout mn_major, got {}",
                    name(call.output.scales.layout));
    }
    require_row_offsets(options.row_offsets, problem.rows, problem.device);
    problem.groups = options.row_offsets.num_elements() - 1;
    lowered.args.row_offsets = {static_cast<const int64_t*>(options.row_offsets.data),
                                static_cast<size_t>(problem.groups + 1)};
  }
}

void lower_input(const QuantizeCall& call, LoweredQuantize& lowered) {
  const QuantizeProblem& problem = lowered.problem;
  const auto cols = checked_mul(call.source == RowSourceKind::kSiluMul ? 2 : 1, problem.cols);
  if (!cols) throw_invalid("input: twice {} columns are more than 2^63", problem.cols);
  const BatchedRows input =
      require_batched_rows("input", call.input, problem.batch, problem.rows, *cols);
  lowered.args.input = call.input.data;
  lowered.args.input_batch_stride = input.batch_stride;
  lowered.args.input_stride = input.row_stride;
  if (call.source == RowSourceKind::kSmooth || is_norm(call.source)) {
    const std::string_view argument = is_norm(call.source) ? "weight" : "smooth";
    require_vector(argument, call.vector, call.input.dtype, problem.cols, problem.device);
    lowered.args.vector = call.vector.data;
  }
}

void lower_norm(const QuantizeCall& call, LoweredQuantize& lowered) {
  const QuantizeProblem& problem = lowered.problem;
  const int64_t rows = problem.batch * problem.rows;
  if (problem.cols < 64 && problem.cols != 0) {
    throw_invalid("input: RMSNorm needs at least 64 columns, got {}", problem.cols);
  }
  if (!std::isfinite(call.norm.eps) || call.norm.eps < 0.0F) {
    throw_invalid("norm.eps: expected a finite value >= 0, got {}", call.norm.eps);
  }
  lowered.args.norm_eps = call.norm.eps;
  if (call.source == RowSourceKind::kAddRmsNorm) {
    require_dtype("residual", call.residual, {call.input.dtype});
    require_device("residual", call.residual.device, problem.device);
    const RowMatrix residual = require_rows("residual", call.residual, problem.cols);
    if (residual.rows != rows) {
      throw_invalid("residual: expected {} rows as the input, got {}", rows,
                    to_string(call.residual));
    }
    lowered.args.residual = call.residual.data;
    lowered.args.residual_stride = residual.stride;
  }
  if (!call.norm.norm_output.is_absent()) {
    require_vector("norm.norm_output", call.norm.norm_output, call.input.dtype, rows * problem.cols,
                   problem.device);
    lowered.args.norm_output = call.norm.norm_output.data;
  }
  if (call.norm.extra_scales.data != nullptr) {
    const ScaleView& extra = call.norm.extra_scales;
    const ScaleView& scales = call.output.scales;
    require_scales("norm.extra_scales", extra, problem.format);
    require_device("norm.extra_scales", extra.device, problem.device);
    if (extra.batch != scales.batch || extra.rows != scales.rows || extra.blocks != scales.blocks) {
      throw_invalid("norm.extra_scales: expected the extents of output.scales, {} x {} x {}",
                    scales.batch, scales.rows, scales.blocks);
    }
    lowered.args.extra_scales = extra;
  }
}

void check_overlap(const QuantizeCall& call) {
  const QuantizedView& output = call.output;
  const QuantizeOptions& options = call.options;
  const std::array outputs{byte_range("output.values", output.values),
                           byte_range("output.scales", output.scales),
                           byte_range("output.global_scale", output.global_scale),
                           byte_range("norm.norm_output", call.norm.norm_output),
                           byte_range("norm.extra_scales", call.norm.extra_scales),
                           byte_range("residual", call.residual)};
  const std::array inputs{byte_range("input", call.input),
                          byte_range("weight", call.vector),
                          byte_range("encode_scales", options.encode_scales),
                          byte_range("base_decode_scales", options.base_decode_scales),
                          byte_range("row_list", options.row_list),
                          byte_range("valid_rows", options.valid_rows),
                          byte_range("row_offsets", options.row_offsets)};
  require_disjoint(outputs, inputs);
}

// Checks the alignment that loads and stores on CUDA devices need.
void check_cuda_alignment(const QuantizeCall& call, const QuantizeArgs& args) {
  if (call.input.num_elements() == 0) return;  // Its strides may be any numbers.
  const Device device = call.input.device;
  const int64_t width = element_bytes(call.input.dtype);
  require_cuda_rows("input", args.input, args.input_stride * width, device);
  require_cuda_rows("input", args.input, args.input_batch_stride * width, device);
  require_cuda_alignment(is_norm(call.source) ? "weight" : "smooth", args.vector, device);
  require_cuda_rows("residual", args.residual, args.residual_stride * width, device);
  require_cuda_alignment("norm.norm_output", args.norm_output, device);
  require_cuda_alignment("norm.extra_scales", args.extra_scales.data, device);
  require_cuda_alignment("output.values", args.values, device);
  require_cuda_alignment("output.scales", args.scales.data, device);
}

// Rows without columns, and batches without rows, may be any numbers, too many to go over. They are
// dropped unless something is stored for each, which bounds them by the memory there is.
void drop_empty(LoweredQuantize& lowered) {
  QuantizeProblem& problem = lowered.problem;
  if (problem.batch > 0 && problem.rows > 0 && problem.cols > 0) return;
  const bool has_row_scale = format_info(problem.format).has_row_scale;
  const bool stores_rows = has_row_scale || problem.encode_axis == EncodeScaleAxis::kRow;
  const bool stores_batches = has_row_scale || problem.encode_axis == EncodeScaleAxis::kBatch ||
                              lowered.args.scales.capacity > 0;
  if (!stores_rows) problem.rows = 0;
  if (!stores_batches) problem.batch = std::min<int64_t>(problem.batch, 1);
}

}  // namespace

LoweredQuantize lower(const QuantizeCall& call) {
  const QuantizedView& output = call.output;
  const FormatInfo& info = format_info(output.format);
  check_enumerators(call.options);
  check_input_dtype(call);
  check_option_use(call);
  check_option_combinations(call);

  LoweredQuantize lowered;
  QuantizeProblem& problem = lowered.problem;
  problem.format = output.format;
  problem.layout = output.scales.layout;
  problem.math = call.options.math;
  problem.input = call.input.dtype;
  problem.source = call.source;
  problem.device = call.input.device;
  problem.batch = output.batch;
  problem.rows = output.rows;
  problem.cols = output.cols;
  problem.four_over_six = call.options.four_over_six;
  problem.rules = block_rules(call);
  lower_row_selection(call, lowered);

  int64_t scale_rows = scale_extents(info, output.rows, output.cols).rows;
  if (problem.groups > 0) scale_rows = grouped_scale_row(output.rows, problem.groups);
  require_quantized("output", output, scale_rows);
  require_device("output", output.scales.device, problem.device);
  const int64_t row_extent = output.values.shape[static_cast<size_t>(output.values.rank - 1)];
  problem.value_cols = is_fp4(output.format) ? output.cols : row_extent;

  lower_input(call, lowered);
  lower_encode_scales(call, lowered);
  lower_global_scale(call, lowered);
  if (is_norm(call.source)) lower_norm(call, lowered);
  check_overlap(call);
  lowered.args.values = static_cast<uint8_t*>(output.values.data);
  lowered.args.value_row_bytes = row_extent;
  lowered.args.scales = output.scales;
  lowered.args.fp8_decode_scale = call.options.fp8_decode_scale;
  problem.has_fp8_decode_scale = call.options.fp8_decode_scale.has_value();
  check_cuda_alignment(call, lowered.args);
  drop_empty(lowered);
  return lowered;
}

}  // namespace narrowfloat
