// The GEMM of NVFP4 weights rounded to E4M3 (moe spec 11.3) where E4M3 operands do not fit.
#include "ops/grouped_gemm/sm90/gemm_kernel.cuh"

namespace narrowfloat {

void launch_gemm_nvfp4_rounded(const GemmParams& params, const GemmLaunch& shape, Stream stream) {
  launch_gemm<Nvfp4RoundedWeights, true>(params, shape, stream);
}

}  // namespace narrowfloat
