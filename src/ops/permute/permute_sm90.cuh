// What both CUDA permutations share (moe spec 5.1): a stable counting sort whose unit is a run of
// neighbouring slots that one warp walks in order.
//
//   counters[run][expert]   first how many slots of the expert the run has, then the row of the
//                           run's next slot of that expert
//
// Runs are in the order of the slots, so rows within an expert are too. Within a warp the lanes
// with equal experts find each other, and the lowest of them counts for all: no atomics.
//
// What no slot is sorted to holds -1 (rows) or 0 (tiles). These are filled over the whole buffers
// first; a barrier or a launch lies between that and the placing of slots.
#pragma once

#include "base/fast_division.h"
#include "device/ptx/grid_dependency.cuh"
#include "device/scan.cuh"
#include "device/vector_io.cuh"
#include "ops/permute/permute_problem.h"
#include "runtime/cuda/cuda_devices.h"
#include "runtime/cuda/launch.h"

namespace narrowfloat {

inline constexpr int kPermuteMaxThreads = 1024;
// Of shared counters: 40 KB.
inline constexpr int kPermuteMaxCounters = 10240;

struct PermuteParams {
  PermuteArgs args;
  uint32_t num_slots = 0;  // Of all tokens.
  uint32_t expert_offset = 0;
  uint32_t experts = 0;
  uint32_t tile_shift = 0;
  uint32_t max_rows = 0;
  uint32_t max_tiles = 0;
  FastDivisor slots;  // Of a token.
};

inline PermuteParams make_permute_params(const PermuteProblem& problem, const PermuteArgs& args) {
  const PermutationLayout& layout = problem.layout;
  PermuteParams params;
  params.args = args;
  params.num_slots = static_cast<uint32_t>(layout.tokens * layout.slots);
  params.expert_offset = static_cast<uint32_t>(problem.expert_offset);
  params.experts = static_cast<uint32_t>(layout.local_experts);
  while ((int32_t{1} << params.tile_shift) < layout.token_tile) ++params.tile_shift;
  params.max_rows = static_cast<uint32_t>(layout.max_rows);
  params.max_tiles = static_cast<uint32_t>(layout.max_tiles);
  params.slots = FastDivisor(static_cast<uint32_t>(layout.slots));
  return params;
}

__device__ inline uint32_t round_up_to_tile(const PermuteParams& params, uint32_t count) {
  const uint32_t last = (1U << params.tile_shift) - 1;
  return (count + last) & ~last;
}

// The local expert of a slot in [0, num_slots); of any other, and of one that is not local,
// `experts`.
__device__ inline uint32_t local_expert(const PermuteParams& params, uint32_t slot, uint32_t end) {
  if (slot >= end) return params.experts;
  const auto id = static_cast<uint32_t>(load_readonly<int32_t>(params.args.ids + slot));
  // Modulo 2^32, where ids below the offset are large.
  return min(id - params.expert_offset, params.experts);
}

// Thread `thread` of `threads` writes its share of the rows and tiles that hold nothing.
__device__ inline void clear_maps(const PermuteParams& params, uint32_t thread, uint32_t threads) {
  for (uint32_t row = thread; row < params.max_rows; row += threads) {
    params.args.row_to_token[row] = -1;
    params.args.row_to_slot[row] = -1;
  }
  for (uint32_t tile = thread; tile < params.max_tiles; tile += threads) {
    params.args.tile_to_expert[tile] = 0;
    params.args.tile_row_end[tile] = 0;
  }
}

// Neighbouring slots, a multiple of 32 but for the last run.
struct SlotRun {
  uint32_t begin;
  uint32_t end;
};

// Run `index` of those that slots [begin, end) are cut into.
__device__ inline SlotRun slot_run(uint32_t begin, uint32_t end, uint32_t slots_per_run,
                                   uint32_t index) {
  const uint32_t first = min(end - begin, index * slots_per_run) + begin;
  return {.begin = first, .end = min(end - first, slots_per_run) + first};
}

// Returns counters[expert] plus the number of lower lanes with the same expert, and adds the number
// of all lanes with it to the counter. All lanes of the warp take part; the warp owns the counters.
__device__ inline uint32_t take_places(uint32_t* shared_counters, uint32_t expert, bool is_local) {
  const unsigned lane = threadIdx.x % kWarpSize;
  const unsigned same = __match_any_sync(kFullWarp, expert);
  const unsigned lower = same & ((1U << lane) - 1);
  const uint32_t first = is_local ? shared_counters[expert] : 0U;
  __syncwarp();
  if (is_local && lower == 0) shared_counters[expert] = first + __popc(same);
  __syncwarp();
  return first + __popc(lower);
}

__device__ inline void count_run(const PermuteParams& params, const SlotRun& run,
                                 uint32_t* shared_counters) {
  for (uint32_t first = run.begin; first < run.end; first += kWarpSize) {
    const uint32_t expert = local_expert(params, first + threadIdx.x % kWarpSize, run.end);
    take_places(shared_counters, expert, expert < params.experts);
  }
}

// Counters hold rows. The slot that opens a tile describes the tile; shared_row_ends[e] is one past
// the expert's last row.
__device__ inline void place_run(const PermuteParams& params, const SlotRun& run,
                                 uint32_t* shared_counters, const uint32_t* shared_row_ends) {
  const uint32_t tile_rows = 1U << params.tile_shift;
  for (uint32_t first = run.begin; first < run.end; first += kWarpSize) {
    const uint32_t slot = first + threadIdx.x % kWarpSize;
    const uint32_t expert = local_expert(params, slot, run.end);
    const bool is_local = expert < params.experts;
    const uint32_t row = take_places(shared_counters, expert, is_local);
    if (slot < run.end) params.args.slot_to_row[slot] = is_local ? static_cast<int32_t>(row) : -1;
    if (!is_local) continue;
    params.args.row_to_token[row] = static_cast<int32_t>(params.slots.quotient(slot));
    params.args.row_to_slot[row] = static_cast<int32_t>(slot);
    if (row % tile_rows != 0) continue;
    const uint32_t tile = row >> params.tile_shift;
    params.args.tile_to_expert[tile] = static_cast<int32_t>(expert);
    params.args.tile_row_end[tile] =
        static_cast<int32_t>(row + min(tile_rows, shared_row_ends[expert] - row));
  }
}

// Experts [begin, end) of this thread, neighbours, so that sums over threads are sums over experts.
struct ExpertRange {
  uint32_t begin;
  uint32_t end;
};
__device__ inline ExpertRange own_experts(const PermuteParams& params) {
  const uint32_t each = (params.experts + blockDim.x - 1) / blockDim.x;
  const uint32_t begin = min(threadIdx.x * each, params.experts);
  return {.begin = begin, .end = min(begin + each, params.experts)};
}

__device__ inline void store_totals(const PermuteParams& params, uint32_t num_rows) {
  params.args.num_rows[0] = static_cast<int32_t>(num_rows);
  params.args.num_tiles[0] = static_cast<int32_t>(num_rows >> params.tile_shift);
}

}  // namespace narrowfloat
