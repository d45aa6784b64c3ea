// The kernels of quantize_rows.cuh for norms into 8-bit formats.
#include "ops/quantize/sm90/launch_rows.cuh"
#include "ops/quantize/sm90/quantize_rows.h"

namespace narrowfloat {

void launch_quantize_norm_rows_fp8(const QuantizeProblem& problem, const QuantizeParams& params,
                                   Stream stream) {
  switch (problem.format) {
    case FormatId::kMxfp8:
      return launch_quantize_norm_rows<Mxfp8>(problem, params, stream);
    case FormatId::kFp8Block1x128:
      return launch_quantize_norm_rows<Fp8Block1x128>(problem, params, stream);
    default:
      return launch_quantize_norm_rows<Fp8Tensor>(problem, params, stream);
  }
}

}  // namespace narrowfloat
