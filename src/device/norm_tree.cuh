// The upper levels of the sum of squares of a norm (formats/rms_norm.h): the lanes of a warp hold
// neighbouring subtrees, and so do the sums of warps in shared memory. a + b is b + a, so all lanes
// get the same bits.
#pragma once

#include "base/float_ops.h"
#include "device/reduce.cuh"

namespace narrowfloat {

inline constexpr int kMaxNormSums = 1024;

// Sums the tree over one value per lane, starting with adjacent lanes. Every lane gets the sum.
__device__ inline float warp_tree_sum(float value) {
#pragma unroll
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    value = add_rn(value, __shfl_xor_sync(kFullWarp, value, distance));
  }
  return value;
}

// Sums the tree over sums[0 .. count), at most kMaxNormSums. Every thread gets the sum.
__device__ inline float tree_of_sums(const float* sums, int count) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  float value = warp_tree_sum(lane < count ? sums[lane] : 0.0F);
  if (count <= kWarpSize) return value;
#pragma unroll 1
  for (int group = 1; group * kWarpSize < count; ++group) {
    const int i = group * kWarpSize + lane;
    const float sum = warp_tree_sum(i < count ? sums[i] : 0.0F);
    if (lane == group) value = sum;
  }
  const int groups = (count + kWarpSize - 1) / kWarpSize;
  return warp_tree_sum(lane < groups ? value : 0.0F);
}

}  // namespace narrowfloat
