// Selects the problems that the kernels of quantize_stream.cuh take, and the kernel.
#include "ops/quantize/sm90/quantize_rows.h"
#include "ops/quantize/sm90/row_runs.h"
#include "runtime/cuda/cuda_devices.h"

namespace narrowfloat {
namespace {

constexpr int64_t kMaxRuns = int64_t{1} << 30;
// Shared memory that the kernels of the widest row opt in to.
constexpr int kMaxSharedBytes = 132 * 1024;

// The second kernel of a norm counts too: the residual is its input.
bool is_stream_source(const QuantizeProblem& problem, const QuantizeParams& params) {
  const bool has_row_scale = format_info(problem.format).has_row_scale;
  if (is_norm(problem.source)) {
    return params.residual == nullptr && params.norm_output == nullptr &&
           params.extra_scales.data == nullptr && problem.format != FormatId::kFp8Tensor;
  }
  return has_row_scale &&
         (problem.source == RowSourceKind::kSiluMul || problem.source == RowSourceKind::kSmooth);
}

}  // namespace

bool is_stream(const QuantizeProblem& problem, const QuantizeParams& params) {
  const int64_t block_cols = format_info(problem.format).block_cols;
  const bool has_all_rows =
      problem.batch == 1 && !problem.has_row_list && !problem.has_valid_rows && problem.groups == 0;
  return is_stream_source(problem, params) && has_all_rows && problem.input == DType::kBF16 &&
         cuda_device(problem.device.index).max_shared_bytes_per_block >= kMaxSharedBytes &&
         problem.encode_axis == EncodeScaleAxis::kTensor && problem.value_cols == problem.cols &&
         problem.cols % block_cols == 0 && problem.cols <= kMaxStreamCols &&
         problem.rows * (problem.cols / kRowRun) < kMaxRuns;
}

void launch_quantize_stream(const QuantizeProblem& problem, const QuantizeParams& params,
                            Stream stream) {
  if (!is_norm(problem.source)) return launch_quantize_stream_token(problem, params, stream);
  if (format_info(problem.format).element_bits == 4) {
    return launch_quantize_stream_norm_fp4(problem, params, stream);
  }
  launch_quantize_stream_norm_fp8(problem, params, stream);
}

}  // namespace narrowfloat
