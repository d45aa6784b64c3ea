// Launchers of the GEMM for MXFP4 weights, one a weight encoding and a way of promotion.
#include "ops/grouped_gemm/sm90/gemm_kernel_sm90.cuh"
#include "ops/grouped_gemm/sm90/weight_decoder.cuh"

namespace narrowfloat {

// The GEMM of MXFP4 weights of which a row's scales are within 2^126: those of models.
void launch_gemm_mxfp4_near(const GemmParams& params, const GemmLaunch& shape, Stream stream) {
  launch_gemm<Mxfp4NearWeights, false>(params, shape, stream);
}

// The GEMM of MXFP4 weights with any scales: the encoding of experts
// whose scales lie further apart.
void launch_gemm_mxfp4(const GemmParams& params, const GemmLaunch& shape, Stream stream) {
  launch_gemm<Mxfp4Weights, false>(params, shape, stream);
}

// The GEMM of MXFP4 weights and activations with a scale every 128 columns.
void launch_gemm_mxfp4_groups(const GemmParams& params, const GemmLaunch& shape, Stream stream) {
  launch_gemm<Mxfp4Weights, true>(params, shape, stream);
}

// The GEMM of MXFP4 weights as E4M3.
void launch_gemm_mxfp4_fp8(const GemmParams& params, const GemmLaunch& shape, Stream stream) {
  launch_gemm<Mxfp4Fp8Weights, true>(params, shape, stream);
}

// The GEMM of MXFP4 weights as E4M3, of activations with a scale a row.
void launch_gemm_mxfp4_fp8_token(const GemmParams& params, const GemmLaunch& shape, Stream stream) {
  launch_gemm<Mxfp4Fp8Weights, false>(params, shape, stream);
}

}  // namespace narrowfloat
