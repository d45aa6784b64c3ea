// The GEMM of MXFP8 weights.
#include "ops/grouped_gemm/sm90/gemm_kernel.cuh"

namespace narrowfloat {

void launch_gemm_mxfp8(const GemmParams& params, const GemmLaunch& shape, Stream stream) {
  launch_gemm<Mxfp8Weights, false>(params, shape, stream);
}

}  // namespace narrowfloat
