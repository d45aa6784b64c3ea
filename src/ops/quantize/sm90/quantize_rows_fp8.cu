// The kernels of quantize_rows.cuh for 8-bit formats.
#include "ops/quantize/sm90/launch_rows.cuh"
#include "ops/quantize/sm90/quantize_rows.h"

namespace narrowfloat {

void launch_quantize_rows_fp8(const QuantizeProblem& problem, const QuantizeParams& params,
                              Stream stream) {
  switch (problem.format) {
    case FormatId::kMxfp8:
      return launch_quantize_rows_of<Mxfp8, Norm8BitTable, LongRows>(problem, params, stream);
    case FormatId::kFp8Block1x128:
      return launch_quantize_rows_of<Fp8Block1x128, Norm8BitTable, LongRows>(problem, params,
                                                                             stream);
    default:
      return launch_quantize_rows_of<Fp8Tensor, Norm8BitTable, LongRows>(problem, params, stream);
  }
}

}  // namespace narrowfloat
