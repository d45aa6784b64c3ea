// sm90_blocks: quantizers whose blocks lie inside a row and that need nothing of the row but its
// encode scale. Up to four launches: maxima, where no scale is given; clearing scale tensors with
// gaps; the kernel of quantize_blocks.cuh; scales of tensors.
#include "ops/quantize/sm90/quantize_blocks.h"

#include "ops/quantize/quantize_impls.h"
#include "ops/quantize/sm90/scale_clearing.h"
#include "ops/quantize/sm90/tensor_scales.h"
#include "runtime/cuda/cuda_devices.h"

namespace narrowfloat {
namespace {

Support supports(const QuantizeProblem& problem) {
  if (is_norm(problem.source)) return Support::no("norms need whole rows");
  if (format_info(problem.format).has_row_scale) return Support::no("row scales need whole rows");
  if (problem.four_over_six.enabled) return Support::no("4-over-6 needs whole blocks in a thread");
  if (problem.format == FormatId::kFp8Block128x128) return Support::no("blocks span rows");
  return sm90_extents(problem);
}

void launch_elements(const QuantizeProblem& problem, const QuantizeParams& params, Stream stream) {
  switch (problem.format) {
    case FormatId::kNvfp4:
      return launch_quantize_nvfp4_blocks(problem, params, stream);
    case FormatId::kMxfp4:
      return launch_quantize_mxfp4_blocks(problem, params, stream);
    case FormatId::kMxfp8:
      return launch_quantize_mxfp8_blocks(problem, params, stream);
    default:
      return launch_quantize_fp8_blocks(problem, params, stream);
  }
}

void run(const QuantizeProblem& problem, const QuantizeArgs& args, Stream stream) {
  const CudaDeviceScope scope(problem.device);
  const QuantizeParams params = make_quantize_params(problem, args);
  const bool is_from_amax = needs_amax(problem);
  if (is_from_amax) {
    clear_amax_slots(problem, params, stream);
    launch_find_amax(problem, params, stream);
  }
  // The scales of row groups have gaps that no row's thread writes.
  if (problem.groups > 0) clear_scale_tensors(params, stream);
  const bool is_empty = problem.batch * problem.rows * problem.cols == 0;
  if (!is_empty) launch_elements(problem, params, stream);
  if (is_from_amax || is_empty) launch_store_tensor_scales(problem, params, stream);
}

}  // namespace

const QuantizeImpl kQuantizeSm90Blocks{"sm90_blocks", on_own_code<supports>, run};
const QuantizeImpl kQuantizeSm80Blocks{"sm80_blocks", on_portable_code<supports>, run};

}  // namespace narrowfloat
