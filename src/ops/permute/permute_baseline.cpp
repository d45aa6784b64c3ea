// cpu_baseline: a stable counting sort in two levels (moe spec 5.1).
//
// Tokens are cut into chunks, each with its own counters for all experts. Chunks count in parallel;
// a serial pass over experts and, within an expert, chunks turns counts into the row of each
// chunk's first slot; chunks then place their slots in parallel. Chunks are in the order of the
// tokens, so the sort is stable for any number of chunks. Counters are on the stack, which bounds
// the number of chunks if there are many experts; a small batch is one chunk and runs serially.
#include <algorithm>
#include <array>

#include "base/int_math.h"
#include "ops/permute/permute_problem.h"
#include "runtime/parallel.h"

namespace narrowfloat {
namespace {

constexpr int64_t kCounters = 4 * kMaxLocalExperts;
constexpr int64_t kSlotsPerChunk = 8192;

class ChunkedSort {
 public:
  ChunkedSort(const PermuteProblem& problem, const PermuteArgs& args)
      : layout_(problem.layout),
        expert_offset_(static_cast<uint32_t>(problem.expert_offset)),
        args_(args) {
    const int64_t wanted = ceil_div(layout_.tokens * layout_.slots, kSlotsPerChunk);
    const int64_t chunks = std::clamp<int64_t>(wanted, 1, kCounters / layout_.local_experts);
    tokens_per_chunk_ = std::max<int64_t>(1, ceil_div(layout_.tokens, chunks));
    chunks_ = ceil_div(layout_.tokens, tokens_per_chunk_);
    std::fill_n(counters_.begin(), chunks_ * layout_.local_experts, 0);
  }

  void run() {
    for_each_chunk([&](int64_t chunk) { count(chunk); });
    const int64_t rows = lay_out_experts();
    clear_rows(rows, layout_.max_rows);
    const int64_t tiles = rows / layout_.token_tile;
    std::fill(args_.tile_to_expert + tiles, args_.tile_to_expert + layout_.max_tiles, 0);
    std::fill(args_.tile_row_end + tiles, args_.tile_row_end + layout_.max_tiles, 0);
    args_.num_rows[0] = static_cast<int32_t>(rows);
    args_.num_tiles[0] = static_cast<int32_t>(tiles);
    for_each_chunk([&](int64_t chunk) { place(chunk); });
  }

 private:
  template <typename Body>
  void for_each_chunk(const Body& body) {
    parallel_for(chunks_, 1, [&](int64_t begin, int64_t end) {
      for (int64_t chunk = begin; chunk < end; ++chunk) body(chunk);
    });
  }

  // Calls body(local expert, slot index, token) for every slot of a chunk; the expert of a slot
  // that is not local is one past the last.
  template <typename Body>
  void for_each_slot(int64_t chunk, const Body& body) const {
    const auto experts = static_cast<uint32_t>(layout_.local_experts);
    const int64_t end = std::min((chunk + 1) * tokens_per_chunk_, layout_.tokens);
    for (int64_t token = chunk * tokens_per_chunk_; token < end; ++token) {
      for (int64_t slot = token * layout_.slots; slot < (token + 1) * layout_.slots; ++slot) {
        // The subtraction is modulo 2^32: ids below the offset become large.
        const uint32_t expert = static_cast<uint32_t>(args_.ids[slot]) - expert_offset_;
        body(std::min(expert, experts), slot, token);
      }
    }
  }

  int32_t* counters(int64_t chunk) { return counters_.data() + chunk * layout_.local_experts; }

  void count(int64_t chunk) {
    int32_t* const counts = counters(chunk);
    const auto experts = static_cast<uint32_t>(layout_.local_experts);
    for_each_slot(chunk, [&](uint32_t expert, int64_t /*slot*/, int64_t /*token*/) {
      if (expert < experts) ++counts[expert];
    });
  }

  // Turns counts into the row of each chunk's first slot of each expert. Writes the tiles and the
  // padding rows. Returns the rows in use.
  int64_t lay_out_experts() {
    int64_t base = 0;
    for (int32_t expert = 0; expert < layout_.local_experts; ++expert) {
      int64_t row = base;
      for (int64_t chunk = 0; chunk < chunks_; ++chunk) {
        int32_t& counter = counters(chunk)[expert];
        const int32_t count = counter;
        counter = static_cast<int32_t>(row);
        row += count;
      }
      const int64_t end = base + round_up(row - base, layout_.token_tile);
      for (int64_t first = base; first < end; first += layout_.token_tile) {
        const int64_t tile = first / layout_.token_tile;
        args_.tile_to_expert[tile] = expert;
        args_.tile_row_end[tile] = static_cast<int32_t>(std::min(first + layout_.token_tile, row));
      }
      clear_rows(row, end);
      base = end;
    }
    return base;
  }

  void clear_rows(int64_t begin, int64_t end) const {
    std::fill(args_.row_to_token + begin, args_.row_to_token + end, -1);
    std::fill(args_.row_to_slot + begin, args_.row_to_slot + end, -1);
  }

  void place(int64_t chunk) {
    int32_t* const next_row = counters(chunk);
    const auto experts = static_cast<uint32_t>(layout_.local_experts);
    for_each_slot(chunk, [&](uint32_t expert, int64_t slot, int64_t token) {
      if (expert >= experts) {
        args_.slot_to_row[slot] = -1;
        return;
      }
      const int32_t row = next_row[expert]++;
      args_.slot_to_row[slot] = row;
      args_.row_to_token[row] = static_cast<int32_t>(token);
      args_.row_to_slot[row] = static_cast<int32_t>(slot);
    });
  }

  PermutationLayout layout_;
  uint32_t expert_offset_;
  PermuteArgs args_;
  int64_t tokens_per_chunk_ = 1;
  int64_t chunks_ = 0;
  std::array<int32_t, kCounters> counters_;  // [chunks, local experts]
};

void run_baseline(const PermuteProblem& problem, const PermuteArgs& args, Stream /*stream*/) {
  ChunkedSort(problem, args).run();
}

Support supports(const PermuteProblem& problem) { return cpu_only(problem.device); }

}  // namespace

const PermuteImpl kPermuteCpuBaseline{"cpu_baseline", supports, run_baseline};

}  // namespace narrowfloat
