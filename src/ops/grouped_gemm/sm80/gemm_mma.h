// Launchers of the portable GEMM (gemm_mma.cuh), one a coding of weights.
#pragma once

#include "ops/grouped_gemm/sm80/mma_image.h"
#include "ops/grouped_gemm/sm90/gemm_params.h"

namespace narrowfloat {

// Shared memory of a CTA, at most: what compute capability 8.6 has.
inline constexpr int kMmaSharedBytes = 99 * 1024;

// Weight rows of a CTA, at least.
inline constexpr int kLeastMmaCtaRows = 64;

// A launch of the kernel for pieces of `tokens` rows: 8, 16, 32, 64 or 128.
inline constexpr int kMostMmaTokens = 128;
struct MmaLaunch {
  int tokens = 8;
  int device = 0;
};

// GemmParams as for Hopper, but for the image: `blocks` strips of `k_tiles` chunks, `block_bytes`
// from a strip to the next.
void launch_mma_16_bit(const GemmParams& params, const MmaLaunch& shape, Stream stream);
void launch_mma_8_bit(MmaCoding coding, const GemmParams& params, const MmaLaunch& shape,
                      Stream stream);
void launch_mma_4_bit(MmaCoding coding, bool has_groups, const GemmParams& params,
                      const MmaLaunch& shape, Stream stream);

}  // namespace narrowfloat
