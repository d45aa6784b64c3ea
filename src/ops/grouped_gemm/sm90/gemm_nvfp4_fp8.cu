// The GEMM of NVFP4 weights rounded to E4M3 (moe spec 11.3).
#include "ops/grouped_gemm/sm90/fragments_fp8.cuh"
#include "ops/grouped_gemm/sm90/gemm_kernel.cuh"

namespace narrowfloat {

void launch_gemm_nvfp4_fp8(const GemmParams& params, const GemmLaunch& shape, Stream stream) {
  launch_gemm<Nvfp4Fp8Weights, true>(params, shape, stream);
}

}  // namespace narrowfloat
