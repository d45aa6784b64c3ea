// The kernels of quantize_blocks.cuh for mxfp8.
#include "ops/quantize/sm90/launch_dense.cuh"
#include "ops/quantize/sm90/quantize_blocks.h"

namespace narrowfloat {

void launch_quantize_mxfp8_blocks(const QuantizeProblem& problem, const QuantizeParams& params,
                                  Stream stream) {
  launch_quantize_blocks_of<Mxfp8>(problem, params, stream);
}

}  // namespace narrowfloat
