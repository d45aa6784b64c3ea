// The GEMM of NVFP4 weights and activations with a scale every 128 columns.
#include "ops/grouped_gemm/sm90/gemm_kernel.cuh"

namespace narrowfloat {

void launch_gemm_nvfp4_groups(const GemmParams& params, const GemmLaunch& shape, Stream stream) {
  launch_gemm<Nvfp4Weights, true>(params, shape, stream);
}

}  // namespace narrowfloat
