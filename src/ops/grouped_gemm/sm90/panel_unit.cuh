// A unit of 128 columns of two operands that are E4M3 panels in shared memory.
#pragma once

#include "device/ptx/wgmma_e4m3_shared.cuh"

namespace narrowfloat {

// Starts the instructions whose sums begin anew. a and b: descriptors in the 128-byte swizzle.
template <int kSums>
__device__ inline void multiply_unit(float (&sums)[kSums], uint64_t a, uint64_t b) {
#pragma unroll
  for (int k = 0; k < 4; ++k) wgmma_e4m3(sums, a + 2 * k, b + 2 * k, k > 0 ? 1 : 0);
}

}  // namespace narrowfloat
