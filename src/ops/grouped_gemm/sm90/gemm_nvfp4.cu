// Launchers of the GEMM for NVFP4 weights, one a weight encoding and a way of promotion.
#include "ops/grouped_gemm/sm90/gemm_kernel_sm90.cuh"
#include "ops/grouped_gemm/sm90/weight_decoder.cuh"

namespace narrowfloat {

// The GEMM of NVFP4 weights.
void launch_gemm_nvfp4(const GemmParams& params, const GemmLaunch& shape, Stream stream) {
  launch_gemm<Nvfp4Weights, false>(params, shape, stream);
}

// The GEMM of NVFP4 weights and activations with a scale every 128 columns.
void launch_gemm_nvfp4_groups(const GemmParams& params, const GemmLaunch& shape, Stream stream) {
  launch_gemm<Nvfp4Weights, true>(params, shape, stream);
}

// The GEMM of NVFP4 weights rounded to E4M3 (moe spec 11.3) where E4M3 operands do not fit.
void launch_gemm_nvfp4_rounded(const GemmParams& params, const GemmLaunch& shape, Stream stream) {
  launch_gemm<Nvfp4RoundedWeights, true>(params, shape, stream);
}

// The GEMM of NVFP4 weights rounded to E4M3 (moe spec 11.3).
void launch_gemm_nvfp4_fp8(const GemmParams& params, const GemmLaunch& shape, Stream stream) {
  launch_gemm<Nvfp4Fp8Weights, true>(params, shape, stream);
}

// The GEMM of NVFP4 weights rounded to E4M3, of activations with a scale a row.
void launch_gemm_nvfp4_fp8_token(const GemmParams& params, const GemmLaunch& shape, Stream stream) {
  launch_gemm<Nvfp4Fp8Weights, false>(params, shape, stream);
}

}  // namespace narrowfloat
