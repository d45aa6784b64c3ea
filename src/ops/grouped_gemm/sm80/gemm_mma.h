// Launchers of the portable GEMM (gemm_mma.cuh), one a coding of weights.
#pragma once

#include "ops/grouped_gemm/sm80/mma_image.h"
#include "ops/grouped_gemm/sm90/gemm_params.h"

namespace narrowfloat {

// Rows that a CTA takes.
inline constexpr int kFewMmaTokens = 16;
inline constexpr int kManyMmaTokens = 64;

// `tokens`: one of the two. GemmParams as for Hopper, but for the image: `blocks` strips of `units`
// chunks, `block_bytes` from a strip to the next.
void launch_mma_16_bit(const GemmParams& params, int tokens, Stream stream);
void launch_mma_8_bit(MmaCoding coding, const GemmParams& params, int tokens, Stream stream);
void launch_mma_4_bit(MmaCoding coding, bool has_groups, const GemmParams& params, int tokens,
                      Stream stream);

}  // namespace narrowfloat
