// The portable GEMM of 4-bit weights.
#include "ops/grouped_gemm/sm80/gemm_mma.cuh"

namespace narrowfloat {

void launch_mma_4_bit(MmaCoding coding, bool has_groups, const GemmParams& params,
                      const MmaLaunch& shape, Stream stream) {
  if (coding == MmaCoding::kMxfp4) {
    if (has_groups) return launch_mma<MmaCoding::kMxfp4, true>(params, shape, stream);
    return launch_mma<MmaCoding::kMxfp4, false>(params, shape, stream);
  }
  if (has_groups) return launch_mma<MmaCoding::kNvfp4, true>(params, shape, stream);
  launch_mma<MmaCoding::kNvfp4, false>(params, shape, stream);
}

}  // namespace narrowfloat
