// The kernels of quantize_rows.cuh for 4-bit formats.
#include "ops/quantize/sm90/launch_rows.cuh"
#include "ops/quantize/sm90/quantize_rows.h"

namespace narrowfloat {

void launch_quantize_rows_fp4(const QuantizeProblem& problem, const QuantizeParams& params,
                              Stream stream) {
  switch (problem.format) {
    case FormatId::kNvfp4:
      return launch_quantize_rows_of<Nvfp4, Norm4BitTable, LongRows>(problem, params, stream);
    case FormatId::kNvfp4PerToken:
      return launch_quantize_rows_of<Nvfp4PerToken, Norm4BitTable, LongRows>(problem, params,
                                                                             stream);
    default:
      return launch_quantize_rows_of<Mxfp4, Norm4BitTable, LongRows>(problem, params, stream);
  }
}

}  // namespace narrowfloat
