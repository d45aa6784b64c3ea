// Sizes and offsets of the parts of a workspace, with overflow as an error.
#include "comm/workspace_layout.h"

#include <bit>

#include "base/int_math.h"
#include "base/throw_error.h"

namespace narrowfloat {
namespace {

constexpr int64_t kMostBytes = int64_t{1} << 62;

// a + factor * b for numbers that are not negative.
int64_t add_product(int64_t a, int64_t factor, int64_t b) {
  if (b > (kMostBytes - a) / factor) {
    throw_invalid("oneshot_bytes, twoshot_bytes: the workspace would exceed 2^62 bytes");
  }
  return a + factor * b;
}

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
  if (ranks <= 2) return {8 * kMiB, 32 * kMiB};
  if (ranks <= 4) return {1 * kMiB, 32 * kMiB};
  return {256 * kKiB, 32 * kMiB};
}

PeerRegion peer_region(int ranks, const AllReduceCapacities& capacities) {
  require_ranks(ranks);
  PeerRegion region;
  region.slot_capacity = padded("oneshot_bytes", capacities.oneshot_bytes, kMostOneShotBytes);
  const int64_t area = padded("twoshot_bytes", capacities.twoshot_bytes, kMostBytes);
  region.abort = 0;
  region.barriers = kControlLine;
  region.control = region.barriers + kMostCtas * kControlLine;
  region.oneshot = region.control + round_up(int64_t{sizeof(LocalControl)}, kControlLine);
  region.staging =
      add_product(region.oneshot, int64_t{kOneShotBuffers} * ranks, region.slot_capacity);
  region.result = add_product(region.staging, 1, area);
  region.size_bytes = add_product(region.result, 1, area);
  return region;
}

int64_t allreduce_workspace_bytes(int ranks, const AllReduceCapacities& capacities) {
  return peer_region(ranks, capacities).size_bytes;
}

}  // namespace narrowfloat
