// Sizes and offsets of the parts of a workspace. The limits of the capacities keep all of them far
// below 2^63.
#include "comm/workspace_layout.h"

#include <bit>

#include "base/int_math.h"
#include "base/throw_error.h"

namespace narrowfloat {
namespace {

void require_ranks(int ranks) {
  if (ranks >= 1 && ranks <= kMaxRanks) return;
  throw_invalid("ranks: expected 1 to {}, got {}", kMaxRanks, ranks);
}

int64_t padded(std::string_view name, int64_t bytes, int64_t most) {
  if (bytes < 0 || bytes > most) {
    throw_invalid("{}: expected 0 to 2^{} bytes, got {}", name,
                  std::countr_zero(static_cast<uint64_t>(most)), bytes);
  }
  return round_up(bytes, kControlLine);
}

}  // namespace

AllReduceCapacities default_allreduce_capacities(int ranks) {
  require_ranks(ranks);
  constexpr int64_t kKiB = 1024;
  constexpr int64_t kMiB = 1024 * kKiB;
  if (ranks <= 2) return {2 * kMiB, 32 * kMiB};
  if (ranks <= 4) return {256 * kKiB, 32 * kMiB};
  return {128 * kKiB, 32 * kMiB};
}

PeerRegion peer_region(int ranks, const AllReduceCapacities& capacities) {
  require_ranks(ranks);
  PeerRegion region;
  region.slot_capacity = padded("oneshot_bytes", capacities.oneshot_bytes, kMostOneShotBytes);
  // About 4 MiB of 16-bit elements.
  region.chunk_leaves = 312 * kChunkUnit;
  // The ranges of the last chunk are as long as the longest: up to ranks - 1 leaves more in all.
  constexpr int64_t kMostLeafBytes = 32;
  static_assert(kMaxRanks * kMostLeafBytes % kControlLine == 0);
  region.area_bytes = padded("twoshot_bytes", capacities.twoshot_bytes, kMostTwoShotBytes) +
                      kMaxRanks * kMostLeafBytes;
  region.abort = 0;
  region.barriers = kControlLine;
  region.control = region.barriers + kMostCtas * kControlLine;
  region.oneshot = region.control + round_up(int64_t{sizeof(LocalControl)}, kControlLine);
  region.staging = region.oneshot + int64_t{kOneShotBuffers} * ranks * region.slot_capacity;
  region.result = region.staging + kTwoShotStagings * region.area_bytes;
  region.size_bytes = region.result + region.area_bytes;
  return region;
}

int64_t allreduce_workspace_bytes(int ranks, const AllReduceCapacities& capacities) {
  return peer_region(ranks, capacities).size_bytes;
}

}  // namespace narrowfloat
