// The kernels of quantize_rows.cuh for NVFP4 with 4-over-6.
#include "ops/quantize/sm90/launch_rows.cuh"
#include "ops/quantize/sm90/quantize_rows.h"

namespace narrowfloat {

void launch_quantize_rows_four_over_six(const QuantizeProblem& problem,
                                        const QuantizeParams& params, Stream stream) {
  if (problem.format == FormatId::kNvfp4PerToken) {
    return launch_quantize_rows_of<Nvfp4PerToken, FourOverSixTable, FourOverSixLongRows>(
        problem, params, stream);
  }
  launch_quantize_rows_of<Nvfp4, FourOverSixTable, FourOverSixLongRows>(problem, params, stream);
}

}  // namespace narrowfloat
