// The GEMM of NVFP4 weights.
#include "ops/grouped_gemm/sm90/gemm_kernel.cuh"

namespace narrowfloat {

void launch_gemm_nvfp4(const GemmParams& params, const GemmLaunch& shape, Stream stream) {
  launch_gemm<Nvfp4Weights, false>(params, shape, stream);
}

}  // namespace narrowfloat
