// The kernels of quantize_rows.cuh for norms into 4-bit formats.
#include "ops/quantize/sm90/launch_rows.cuh"
#include "ops/quantize/sm90/quantize_rows.h"

namespace narrowfloat {

void launch_quantize_norm_rows_fp4(const QuantizeProblem& problem, const QuantizeParams& params,
                                   Stream stream) {
  switch (problem.format) {
    case FormatId::kNvfp4:
      return launch_quantize_norm_rows<Nvfp4>(problem, params, stream);
    case FormatId::kNvfp4PerToken:
      return launch_quantize_norm_rows<Nvfp4PerToken>(problem, params, stream);
    default:
      return launch_quantize_norm_rows<Mxfp4>(problem, params, stream);
  }
}

}  // namespace narrowfloat
