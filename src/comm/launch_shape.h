// Launch shapes and the choice of an algorithm: pure functions of sizes and of capabilities that
// are equal on all ranks, so that all ranks launch the same grid.
#pragma once

#include <cstdint>

#include "narrowfloat/allreduce.h"

namespace narrowfloat {

// The minimum over the ranks of what their GPUs offer.
struct LaunchLimits {
  int sms = 132;
  int max_cluster = 8;
  int max_warps = 16;  // A CTA has no more.

  friend bool operator==(const LaunchLimits&, const LaunchLimits&) = default;
};

// A chunk is 256 columns: what a warp takes in a step, lane l the leaf of 8 columns 8l to 8l + 7.
inline constexpr int64_t kChunkCols = 256;

struct AllReduceShape {
  int cluster = 1;   // CTAs that share a token.
  int warps = 1;     // A CTA has this many.
  int steps = 1;     // Chunks that a warp takes for a token.
  int clusters = 1;  // The grid has this many.

  [[nodiscard]] int ctas() const { return cluster * clusters; }
  friend bool operator==(const AllReduceShape&, const AllReduceShape&) = default;
};

// The CTAs of a cluster together have at most so many warps, and so many chunks of a token with
// those beyond the end of the row.
inline constexpr int kMostClusterWarps = 8 * 16;
inline constexpr int kMostClusterChunks = 256 + 64;

// Dynamic shared memory of a CTA: sums and maxima of two tokens and their barriers, then its part
// of the norm's weight and of two rows (ops/allreduce/sm90/device_row.cuh).
inline constexpr int64_t kRowSumBytes = 2 * 4 * (kMostClusterChunks + kMostClusterWarps) + 32;
constexpr int64_t row_memory_bytes(int64_t steps, int64_t warps, int element_bytes) {
  return kRowSumBytes + 3 * steps * warps * kChunkCols * element_bytes;
}

// Registers of a thread, which bound the CTAs that are resident at once. Two and four ranks have
// kernels of their own; more hold a leaf of each of eight ranks.
constexpr int allreduce_registers(int ranks, int element_bytes) {
  if (ranks == 1) return element_bytes == 4 ? 80 : 64;
  if (ranks <= 4) return 96;
  return element_bytes == 4 ? 168 : 128;
}

struct ShapeRequest {
  int64_t tokens = 0;
  int64_t hidden = 0;
  int ranks = 1;
  int element_bytes = 2;
};
AllReduceShape allreduce_shape(const ShapeRequest& request, const LaunchLimits& limits);

}  // namespace narrowfloat
