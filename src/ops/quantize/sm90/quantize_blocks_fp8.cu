// The kernels of quantize_blocks.cuh for FP8 1x128 and FP8 per tensor.
#include "ops/quantize/sm90/launch_dense.cuh"
#include "ops/quantize/sm90/quantize_blocks.h"

namespace narrowfloat {

void launch_quantize_fp8_blocks(const QuantizeProblem& problem, const QuantizeParams& params,
                                Stream stream) {
  if (problem.format == FormatId::kFp8Tensor) {
    return launch_quantize_blocks_of<Fp8Tensor>(problem, params, stream);
  }
  launch_quantize_blocks_of<Fp8Block1x128>(problem, params, stream);
}

}  // namespace narrowfloat
