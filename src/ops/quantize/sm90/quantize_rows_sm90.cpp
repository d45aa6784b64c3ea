// sm90_rows: quantizers that need a whole row or whole blocks in a thread: NVFP4 per token, norms
// into formats with blocks inside a row, 4-over-6. Up to five launches: maxima, where no scale is
// given (for norms by a kernel that also adds the residual); clearing scale tensors with gaps; a
// kernel of quantize_token_dense.cuh or quantize_stream.cuh for the usual cases, else of
// quantize_rows.cuh; scales of tensors.
#include "ops/quantize/sm90/quantize_rows.h"

#include "ops/quantize/quantize_impls.h"
#include "ops/quantize/sm90/scale_clearing.h"
#include "ops/quantize/sm90/tensor_scales.h"
#include "runtime/cuda/cuda_devices.h"

namespace narrowfloat {
namespace {

bool has_row_scale(const QuantizeProblem& problem) {
  return format_info(problem.format).has_row_scale;
}

Support supports(const QuantizeProblem& problem) {
  if (problem.format == FormatId::kFp8Block128x128) return Support::no("blocks span rows");
  if (is_norm(problem.source)) {
    const Support norm = norm_extents(problem);
    if (!norm.ok()) return norm;
  } else if (!has_row_scale(problem) && !problem.four_over_six.enabled) {
    return Support::no("only for row scales, norms and 4-over-6");
  }
  return sm90_extents(problem);
}

void launch_elements(const QuantizeProblem& problem, const QuantizeParams& params, Stream stream) {
  if (problem.four_over_six.enabled) {
    return launch_quantize_rows_four_over_six(problem, params, stream);
  }
  if (is_stream(problem, params)) return launch_quantize_stream(problem, params, stream);
  if (is_token_dense(problem)) return launch_quantize_token_dense(problem, params, stream);
  if (format_info(problem.format).element_bits == 4) {
    return launch_quantize_rows_fp4(problem, params, stream);
  }
  launch_quantize_rows_fp8(problem, params, stream);
}

// Finds the maxima into the slots of tensor_scales.h. Returns the parameters of the remaining work.
QuantizeParams launch_maxima(const QuantizeProblem& problem, const QuantizeParams& params,
                             Stream stream) {
  clear_amax_slots(problem, params, stream);
  if (!is_norm(problem.source)) {
    launch_find_amax(problem, params, stream);
    return params;
  }
  NormRowsResult result;
  if (problem.format == FormatId::kFp8Tensor) {
    result = {.amax_slots = reinterpret_cast<float*>(params.scales.data), .slots_per_batch = 1};
  } else {
    result = {.amax_slots = params.global_scale};
  }
  launch_prepare_norm_rows(problem, params, result, stream);
  return after_prepare_norm_rows(params);
}

void run(const QuantizeProblem& problem, const QuantizeArgs& args, Stream stream) {
  const CudaDeviceScope scope(problem.device);
  QuantizeParams params = make_quantize_params(problem, args);
  const bool is_from_amax = needs_amax(problem);
  const bool is_empty = problem.batch * problem.rows * problem.cols == 0;
  if (is_from_amax) {
    params = is_empty ? params : launch_maxima(problem, params, stream);
    if (is_empty) clear_amax_slots(problem, params, stream);
  }
  // The scales of row groups and of listed rows have gaps that no row's threads write.
  if (problem.groups > 0 || problem.has_row_list) clear_scale_tensors(params, stream);
  if (has_row_scale(problem) && (problem.has_row_list || is_empty)) {
    clear_row_scales(problem, params, stream);
  }
  if (!is_empty) launch_elements(problem, params, stream);
  if (!has_row_scale(problem) && (is_from_amax || is_empty)) {
    launch_store_tensor_scales(problem, params, stream);
  }
}

}  // namespace

const QuantizeImpl kQuantizeSm90Rows{"sm90_rows", on_own_code<supports>, run};
const QuantizeImpl kQuantizeSm80Rows{"sm80_rows", on_portable_code<supports>, run};

}  // namespace narrowfloat
