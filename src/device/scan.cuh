// Prefix sums over a warp and over a CTA.
#pragma once

#include "device/reduce.cuh"

namespace narrowfloat {

// The sum over this lane and all lanes before it. All lanes of the warp take part.
__device__ inline uint32_t warp_inclusive_sum(uint32_t value) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
#pragma unroll
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    const uint32_t before = __shfl_up_sync(kFullWarp, value, distance);
    if (lane >= distance) value += before;
  }
  return value;
}

struct BlockSum {
  uint32_t before;  // Sum over the threads before this one.
  uint32_t total;   // Sum over all threads.
};

// Prefix sum over a CTA of whole warps, in the order of threadIdx.x. `shared_scratch`: one value
// per warp. All threads of the CTA take part; a second call needs a barrier of its own before it.
__device__ inline BlockSum block_sum(uint32_t value, uint32_t* shared_scratch) {
  const int warps = static_cast<int>(blockDim.x) / kWarpSize;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const uint32_t inclusive = warp_inclusive_sum(value);
  if (lane == kWarpSize - 1) shared_scratch[warp] = inclusive;
  __syncthreads();
  const uint32_t warps_inclusive = warp_inclusive_sum(lane < warps ? shared_scratch[lane] : 0U);
  const uint32_t warps_before = __shfl_sync(kFullWarp, warps_inclusive, max(warp - 1, 0));
  return {.before = inclusive - value + (warp > 0 ? warps_before : 0U),
          .total = __shfl_sync(kFullWarp, warps_inclusive, kWarpSize - 1)};
}

}  // namespace narrowfloat
