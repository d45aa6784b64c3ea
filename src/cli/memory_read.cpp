// A sum over 256 MiB, more than caches hold, in pieces that the threads take from a counter.
#include "cli/memory_read.h"

#include <atomic>
#include <cstdint>
#include <numeric>
#include <vector>

#include "cli/threads.h"
#include "cli/timing.h"

namespace narrowfloat::cli {

double read_gb_per_second(double min_seconds) {
  constexpr int64_t kPieces = 64;
  constexpr int64_t kPieceWords = 1 << 19;
  const std::vector<uint64_t> words(static_cast<size_t>(kPieces * kPieceWords), 1);
  std::atomic<uint64_t> total{0};  // Used, so that no compiler drops the reads.
  const auto read_all = [&] {
    for_each_index(kPieces, [&](int64_t piece) {
      const auto begin = words.begin() + piece * kPieceWords;
      total += std::accumulate(begin, begin + kPieceWords, uint64_t{0});
    });
  };
  const Timing timing = time_runs(read_all, min_seconds);
  const double bytes = static_cast<double>(words.size()) * sizeof(uint64_t);
  return total > 0 ? billions_per_second(bytes, timing.median_seconds) : 0;
}

}  // namespace narrowfloat::cli
