// Maxima over the lanes of a warp and over a CTA. Maxima of magnitudes are taken on their bit
// patterns, which order like the numbers (NaN above infinity), so they are exact in any order.
#pragma once

#include "base/host_device.h"

namespace narrowfloat {

inline constexpr unsigned kFullWarp = 0xFFFFFFFFU;
inline constexpr int kWarpSize = 32;

// Maximum over groups of `kLanes` neighbouring lanes (a power of two); every lane gets its group's
// maximum. All lanes of the warp take part.
template <int kLanes>
__device__ inline uint32_t group_max(uint32_t value) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    value = max(value, __shfl_xor_sync(kFullWarp, value, distance));
  }
  return value;
}

// Maximum over all threads of a CTA of whole warps; every thread gets it. `shared_scratch`: one
// value per warp. All threads of the CTA take part; a second call needs a barrier of its own before
// it.
__device__ inline uint32_t block_max(uint32_t value, uint32_t* shared_scratch) {
  const int warps = static_cast<int>(blockDim.x) / kWarpSize;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  value = __reduce_max_sync(kFullWarp, value);
  if (lane == 0) shared_scratch[threadIdx.x / kWarpSize] = value;
  __syncthreads();
  return __reduce_max_sync(kFullWarp, lane < warps ? shared_scratch[lane] : 0U);
}

}  // namespace narrowfloat
