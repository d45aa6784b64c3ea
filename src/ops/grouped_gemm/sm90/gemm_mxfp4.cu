// The GEMM of MXFP4 weights with any scales: the form of experts that gemm_mxfp4_near.cu does not
// take.
#include "ops/grouped_gemm/sm90/gemm_kernel.cuh"

namespace narrowfloat {

void launch_gemm_mxfp4(const GemmParams& params, const GemmLaunch& shape, Stream stream) {
  launch_gemm<Mxfp4Weights, false>(params, shape, stream);
}

}  // namespace narrowfloat
