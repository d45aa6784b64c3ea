// The portable GEMM of bf16 and 8-bit weights.
#include "ops/grouped_gemm/sm80/gemm_mma.cuh"

namespace narrowfloat {

void launch_mma_16_bit(const GemmParams& params, const MmaLaunch& shape, Stream stream) {
  launch_mma<MmaCoding::kBf16, false>(params, shape, stream);
}

void launch_mma_8_bit(MmaCoding coding, const GemmParams& params, const MmaLaunch& shape,
                      Stream stream) {
  if (coding == MmaCoding::kE4m3) {
    return launch_mma<MmaCoding::kE4m3, false>(params, shape, stream);
  }
  if (coding == MmaCoding::kMxfp8) {
    return launch_mma<MmaCoding::kMxfp8, false>(params, shape, stream);
  }
  launch_mma<MmaCoding::kE4m3Scaled, true>(params, shape, stream);
}

}  // namespace narrowfloat
