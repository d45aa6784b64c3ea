// The GEMM of MXFP4 weights of which a row's scales are within 2^126: those of models.
#include "ops/grouped_gemm/sm90/gemm_kernel.cuh"

namespace narrowfloat {

void launch_gemm_mxfp4_near(const GemmParams& params, const GemmLaunch& shape, Stream stream) {
  launch_gemm<Mxfp4NearWeights, false>(params, shape, stream);
}

}  // namespace narrowfloat
