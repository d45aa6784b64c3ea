// The GEMM of MXFP4 weights as E4M3.
#include "ops/grouped_gemm/sm90/fragments_fp8.cuh"
#include "ops/grouped_gemm/sm90/gemm_kernel.cuh"

namespace narrowfloat {

void launch_gemm_mxfp4_fp8(const GemmParams& params, const GemmLaunch& shape, Stream stream) {
  launch_gemm<Mxfp4Fp8Weights, true>(params, shape, stream);
}

}  // namespace narrowfloat
