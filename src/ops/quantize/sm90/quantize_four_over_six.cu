// The kernels of quantize_rows.cuh for nvfp4 with 4-over-6.
#include "ops/quantize/sm90/launch_rows.cuh"
#include "ops/quantize/sm90/quantize_rows.h"

namespace narrowfloat {

void launch_quantize_four_over_six(const QuantizeProblem& problem, const QuantizeParams& params,
                                   Stream stream) {
  launch_quantize_four_over_six_rows<Nvfp4>(problem, params, stream);
}

}  // namespace narrowfloat
