// The GEMM of bf16 weights.
#include "ops/grouped_gemm/sm90/gemm_kernel.cuh"

namespace narrowfloat {

void launch_gemm_bf16(const GemmParams& params, const GemmLaunch& shape, Stream stream) {
  launch_gemm<Bf16Weights, false>(params, shape, stream);
}

}  // namespace narrowfloat
