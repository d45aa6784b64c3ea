// The GEMM of E4M3 weights, per tensor and per 128 x 128.
#include "ops/grouped_gemm/sm90/fragments_fp8.cuh"
#include "ops/grouped_gemm/sm90/gemm_kernel.cuh"

namespace narrowfloat {

void launch_gemm_fp8(const GemmParams& params, const GemmLaunch& shape, Stream stream) {
  if (shape.tokens == 128 && takes_long_tiles(params)) {
    launch_gemm_fp8_long(params, shape, stream);
  } else {
    launch_gemm<Fp8Weights, true>(params, shape, stream);
  }
}

}  // namespace narrowfloat
