// The kernels of quantize_rows.cuh for nvfp4_per_token with 4-over-6.
#include "ops/quantize/sm90/launch_rows.cuh"
#include "ops/quantize/sm90/quantize_rows.h"

namespace narrowfloat {

void launch_quantize_four_over_six_token_rows(const QuantizeProblem& problem,
                                              const QuantizeParams& params, Stream stream) {
  launch_quantize_four_over_six_rows<Nvfp4PerToken>(problem, params, stream);
}

}  // namespace narrowfloat
