// See quantize_params.h.
#include "ops/quantize/sm90/quantize_params.h"

#include <algorithm>

#include "runtime/cuda/fast_math.h"
#include "tensor/element_io.h"

namespace narrowfloat {
namespace {

ScaleTensors scale_tensors(const ScaleView& view) {
  if (view.data == nullptr || view.batch == 0) return {};
  return {.data = static_cast<uint8_t*>(view.data),
          .layout = view.layout,
          .extents = {view.rows, view.blocks},
          .tensor_bytes = view.capacity / view.batch * bytes(view.type)};
}

// A scale given by the host is finite and positive, so NaN needs no care here.
ScalePair host_pair(const QuantizeProblem& problem, const QuantizeArgs& args) {
  const float g = args.encode_scale;
  if (format_info(problem.format).scale_type != ScaleType::kE4M3) return {g, 1.0F};
  return effective_math(problem) == MathMode::kExact ? Nvfp4::scale_pair<ExactMath>(g)
                                                     : Nvfp4::scale_pair<FastMath>(g);
}

}  // namespace

RowInput row_input(const QuantizeProblem& problem) {
  const bool is_f16 = problem.input == DType::kF16;
  switch (problem.source) {
    case RowSourceKind::kSmooth:
      return RowInput::kSmooth;
    case RowSourceKind::kSiluMul:
      return is_f16 ? RowInput::kSiluF16 : RowInput::kSiluBf16;
    case RowSourceKind::kRmsNorm:
    case RowSourceKind::kAddRmsNorm:
      return is_f16 ? RowInput::kNormF16 : RowInput::kNormBf16;
    case RowSourceKind::kPlain:
      break;
  }
  if (problem.input == DType::kF32) return RowInput::kF32;
  if (problem.input == DType::kF8E4M3) return RowInput::kE4m3;
  return is_f16 ? RowInput::kF16 : RowInput::kBf16;
}

QuantizeParams make_quantize_params(const QuantizeProblem& problem, const QuantizeArgs& args) {
  const int64_t width = element_bytes(problem.input);
  QuantizeParams params{};
  params.row_input = row_input(problem);
  params.is_fast = problem.math == MathMode::kFast;
  params.input = static_cast<const uint8_t*>(args.input);
  params.input_batch_stride = args.input_batch_stride * width;
  params.input_row_stride = args.input_stride * width;
  params.vector = static_cast<const uint8_t*>(args.vector);
  params.residual = static_cast<uint8_t*>(args.residual);
  params.residual_row_stride = args.residual_stride * width;
  params.norm_output = static_cast<uint8_t*>(args.norm_output);
  params.norm_eps = args.norm_eps;
  params.values = args.values;
  params.value_row_bytes = args.value_row_bytes;
  params.scales = scale_tensors(args.scales);
  params.extra_scales = scale_tensors(args.extra_scales);
  params.global_scale = args.global_scale;
  params.encode_source = problem.encode_source;
  params.encode_axis = problem.encode_axis;
  params.host_pair = host_pair(problem, args);
  params.encode_scales = args.encode_scales;
  params.e4m3_max = static_cast<float>(problem.four_over_six.e4m3_max);
  params.base_decode_scale = args.base_decode_scale;
  params.device_base = args.device_base;
  params.has_fp8_decode_scale = args.fp8_decode_scale.has_value();
  params.fp8_decode_scale = args.fp8_decode_scale.value_or(1.0F);
  params.rules = problem.rules;
  params.four_over_six = problem.four_over_six;
  params.batch = problem.batch;
  params.rows = problem.rows;
  params.cols = problem.cols;
  params.value_cols = problem.value_cols;
  params.row_list = problem.has_row_list ? args.row_list.data() : nullptr;
  params.num_listed_rows = static_cast<int64_t>(args.row_list.size());
  params.valid_rows = problem.has_valid_rows ? args.valid_rows.data() : nullptr;
  params.row_offsets = problem.groups > 0 ? args.row_offsets.data() : nullptr;
  params.groups = problem.groups;
  params.rows_per_batch = FastDivisor(static_cast<uint32_t>(std::max<int64_t>(1, problem.rows)));
  return params;
}

Support sm90_extents(const QuantizeProblem& problem) {
  constexpr int64_t kMaxRows = (int64_t{1} << 31) - 1;
  constexpr int64_t kMaxBatch = 65535;
  if (problem.batch > kMaxBatch) return Support::no("batch must be below 65536");
  if (problem.batch * problem.rows > kMaxRows) return Support::no("rows must be below 2^31");
  if (problem.value_cols > kMaxRows) return Support::no("columns must be below 2^31");
  if (problem.math == MathMode::kFast) return has_fast_math(problem.device);
  return Support::yes();
}

}  // namespace narrowfloat
