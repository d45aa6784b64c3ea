// See region_probe.h.
#include "runtime/comm/region_probe.h"

#include <algorithm>
#include <array>
#include <span>
#include <vector>

#include "base/int_math.h"
#include "base/throw_error.h"
#include "runtime/comm/phase.h"
#include "runtime/comm/system_error.h"

namespace narrowfloat {
namespace {

// A cell has a line of its own, as the words of barriers do.
constexpr int64_t kProbeCellBytes = 128;
constexpr int64_t kProbeEndBytes = SymmetricMemory::kMaxRanks * kProbeCellBytes;
constexpr int64_t kProbeBytes = 2 * kProbeEndBytes;

using Pattern = std::array<uint64_t, 2>;

std::array<int64_t, 2> cells_of(int writer, int64_t mapped_bytes) {
  const int64_t offset = writer * kProbeCellBytes;
  return {offset, mapped_bytes - kProbeEndBytes + offset};
}

// Differs from run to run, between writers, between regions and between cells.
Pattern pattern_of(uint64_t nonce, int writer, int owner, int64_t offset) {
  const auto place = static_cast<uint64_t>(offset) * 64 + static_cast<uint64_t>(writer) * 8 +
                     static_cast<uint64_t>(owner);
  return {nonce ^ place, ~nonce + place};
}

}  // namespace

int64_t mapped_bytes(int64_t size_bytes, int64_t granularity) {
  return round_up(std::max(size_bytes, kProbeBytes), granularity);
}

void probe_regions(Bootstrap& bootstrap, const SymmetricMemory& memory, int64_t mapped_bytes,
                   RegionAccess& access) {
  const int rank = memory.rank();
  uint64_t nonce = 0;
  fill_random(std::as_writable_bytes(std::span(&nonce, 1)));
  const std::vector<uint64_t> nonces = gather_values(bootstrap, nonce);
  run_phase(bootstrap, "writing into the peers' memory", [&] {
    for (int owner = 0; owner < memory.ranks(); ++owner) {
      for (const int64_t offset : cells_of(rank, mapped_bytes)) {
        const Pattern pattern = pattern_of(nonce, rank, owner, offset);
        access.write(memory.region(owner) + offset, &pattern, sizeof(pattern));
      }
    }
  });
  const auto expect = [&](int writer, int owner, std::string_view seen_by) {
    for (const int64_t offset : cells_of(writer, mapped_bytes)) {
      Pattern found{};
      access.read(&found, memory.region(owner) + offset, sizeof(found));
      if (found == pattern_of(nonces[static_cast<size_t>(writer)], writer, owner, offset)) continue;
      throw_error(ErrorKind::kDevice,
                  "what rank {} wrote into the memory of rank {} at byte {} does not arrive: {} "
                  "reads other bytes there",
                  writer, owner, offset, seen_by);
    }
  };
  run_phase(bootstrap, "reading what peers have written", [&] {
    for (int peer = 0; peer < memory.ranks(); ++peer) {
      expect(peer, rank, "its owner");
      expect(rank, peer, "the writer");
    }
  });
}

}  // namespace narrowfloat
