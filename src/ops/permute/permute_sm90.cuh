// The common part of both CUDA permutations (moe spec 5.1): a stable counting sort over runs of
// neighbouring slots; one warp processes a run in order.
//
//   counters[run][expert]   first how many slots of the expert the run has, then the row of the
//                           run's first slot of that expert
//   row of a slot           counters[run][expert] + its rank among the run's slots of that expert
//
// Runs are in the order of the slots, so rows within an expert are too. Within a warp the lanes
// with equal experts find each other, and the lowest of them counts for all.
//
// Rows without a slot hold -1 and tiles without a slot hold 0. The whole buffers are filled with
// these values first; a barrier or a launch separates that from the placing of slots.
#pragma once

#include <algorithm>
#include <bit>

#include "base/fast_division.h"
#include "device/ptx/grid_dependency.cuh"
#include "device/scan.cuh"
#include "device/vector_io.cuh"
#include "moe_shared/small_batch.cuh"
#include "ops/permute/permute_problem.h"
#include "runtime/cuda/cuda_devices.h"
#include "runtime/cuda/launch.h"

namespace narrowfloat {

inline constexpr int kPermuteMaxThreads = 1024;

// Warps whose own counters fit in 48 KB of shared memory, beside two words per expert.
inline int64_t permute_warps(int64_t experts) {
  constexpr int64_t kSharedWords = 12160;
  return std::clamp<int64_t>(kSharedWords / experts - 2, 1, kPermuteMaxThreads / kWarpSize);
}

struct PermuteParams {
  PermuteArgs args;
  uint32_t num_slots = 0;  // Slots of all tokens.
  uint32_t expert_offset = 0;
  uint32_t experts = 0;
  uint32_t expert_bits = 0;  // Bits of the largest local expert's number.
  uint32_t tile_shift = 0;
  uint32_t max_rows = 0;
  uint32_t max_tiles = 0;
  FastDivisor slots;  // Slots of a token.
};

inline PermuteParams make_permute_params(const PermuteProblem& problem, const PermuteArgs& args) {
  const PermutationLayout& layout = problem.layout;
  PermuteParams params;
  params.args = args;
  params.num_slots = static_cast<uint32_t>(layout.tokens * layout.slots);
  params.expert_offset = static_cast<uint32_t>(problem.expert_offset);
  params.experts = static_cast<uint32_t>(layout.local_experts);
  params.expert_bits = static_cast<uint32_t>(std::bit_width(params.experts - 1));
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

// The local expert of a slot below `end`; `experts` for other slots and for experts that are not
// local.
__device__ inline uint32_t local_expert(const PermuteParams& params, uint32_t slot, uint32_t end) {
  if (slot >= end) return params.experts;
  const auto id = static_cast<uint32_t>(load_readonly<int32_t>(params.args.ids + slot));
  // The subtraction is modulo 2^32: ids below the offset become large.
  return min(id - params.expert_offset, params.experts);
}

struct TileRange {
  uint32_t begin;
  uint32_t end;
};

// Marks the CTA's share of the tiles and of the rows in them as empty, and clears the layer's
// words.
__device__ inline TileRange clear_own_tiles(const PermuteParams& params) {
  const uint32_t each = (params.max_tiles + gridDim.x - 1) / gridDim.x;
  const uint32_t begin = min(blockIdx.x * each, params.max_tiles);
  const uint32_t end = min(begin + each, params.max_tiles);
  for (uint32_t row = (begin << params.tile_shift) + threadIdx.x; row < end << params.tile_shift;
       row += blockDim.x) {
    params.args.row_to_token[row] = -1;
    params.args.row_to_slot[row] = -1;
  }
  for (uint32_t tile = begin + threadIdx.x; tile < end; tile += blockDim.x) {
    params.args.tile_to_expert[tile] = 0;
    params.args.tile_row_end[tile] = 0;
  }
  const WordsToClear& cleared = params.args.cleared;
  if (blockIdx.x == 0 && threadIdx.x < cleared.count) cleared.words[threadIdx.x] = 0;
  return {.begin = begin, .end = end};
}

// Neighbouring slots, a multiple of 32 except for the last run.
struct SlotRun {
  uint32_t begin;
  uint32_t end;
};

// Run `index` of slots [begin, end), cut into runs.
__device__ inline SlotRun slot_run(uint32_t begin, uint32_t end, uint32_t slots_per_run,
                                   uint32_t index) {
  const uint32_t first = min(end - begin, index * slots_per_run) + begin;
  return {.begin = first, .end = min(end - first, slots_per_run) + first};
}

// A warp's next slots of a run: each lane has kParts slots, 32 apart. Kernels have few parts: in
// decode each instruction is fetched once and executed once, so code size matters.
template <int kParts>
struct SlotBatch {
  static constexpr uint32_t kSlots = kParts * kWarpSize;

  uint32_t expert[kParts];
  uint32_t rank[kParts];  // Rank among the slots of the run with the same expert.
};

// The slot of this lane in part `part` of the batch that begins with slot `first`.
__device__ inline uint32_t slot_of_batch(uint32_t first, int part) {
  return first + static_cast<uint32_t>(part) * kWarpSize + threadIdx.x % kWarpSize;
}

// Ranks the slots of a batch and counts them. All lanes take part; the warp owns the counters.
template <int kParts>
__device__ inline SlotBatch<kParts> count_batch(const PermuteParams& params, const SlotRun& run,
                                                uint32_t first, uint32_t* shared_counters) {
  SlotBatch<kParts> batch;
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    batch.expert[i] = local_expert(params, slot_of_batch(first, i), run.end);
  }
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    if (slot_of_batch(first, i) - threadIdx.x % kWarpSize >= run.end) continue;
    const bool is_local = batch.expert[i] < params.experts;
    const unsigned same = lanes_with_expert(batch.expert[i], is_local, params.expert_bits);
    const unsigned lower = same & ((1U << threadIdx.x % kWarpSize) - 1);
    const uint32_t before = is_local ? shared_counters[batch.expert[i]] : 0U;
    __syncwarp();
    if (is_local && lower == 0) shared_counters[batch.expert[i]] = before + __popc(same);
    __syncwarp();
    batch.rank[i] = before + __popc(lower);
  }
  return batch;
}

// Counts a run and returns its first batch. Ranks of later batches are kept in slot_to_row.
template <int kParts>
__device__ inline SlotBatch<kParts> count_run(const PermuteParams& params, const SlotRun& run,
                                              uint32_t* shared_counters) {
  const SlotBatch<kParts> kept = count_batch<kParts>(params, run, run.begin, shared_counters);
  for (uint32_t first = run.begin + SlotBatch<kParts>::kSlots; first < run.end;
       first += SlotBatch<kParts>::kSlots) {
    const SlotBatch<kParts> batch = count_batch<kParts>(params, run, first, shared_counters);
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const uint32_t slot = slot_of_batch(first, i);
      if (slot < run.end) params.args.slot_to_row[slot] = static_cast<int32_t>(batch.rank[i]);
    }
  }
  return kept;
}

template <int kParts>
__device__ inline SlotBatch<kParts> load_batch(const PermuteParams& params, const SlotRun& run,
                                               uint32_t first) {
  SlotBatch<kParts> batch;
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    const uint32_t slot = slot_of_batch(first, i);
    batch.expert[i] = local_expert(params, slot, run.end);
    if (slot < run.end) batch.rank[i] = static_cast<uint32_t>(params.args.slot_to_row[slot]);
  }
  return batch;
}

// The rows of a run's slots, and the part of the maps that this CTA writes.
struct Placement {
  const uint32_t* shared_rows;      // [experts]: the run's first row of an expert.
  const uint32_t* shared_row_ends;  // [experts]: one past the expert's last row.
  TileRange tiles;                  // The tiles to write, with the rows in them.
  SlotRun slots;
};

// The slot that is a tile's first row describes the tile.
__device__ inline void place_row(const PermuteParams& params, const Placement& to, uint32_t slot,
                                 uint32_t expert, uint32_t row) {
  const uint32_t tile_rows = 1U << params.tile_shift;
  const uint32_t tile = row >> params.tile_shift;
  if (tile < to.tiles.begin || tile >= to.tiles.end) return;
  params.args.row_to_token[row] = static_cast<int32_t>(params.slots.quotient(slot));
  params.args.row_to_slot[row] = static_cast<int32_t>(slot);
  if (row % tile_rows != 0) return;
  const uint32_t rows_left = to.shared_row_ends[expert] - row;
  params.args.tile_to_expert[tile] = static_cast<int32_t>(expert);
  params.args.tile_row_end[tile] = static_cast<int32_t>(row + min(tile_rows, rows_left));
}

template <int kParts>
__device__ inline void place_batch(const PermuteParams& params, const SlotRun& run, uint32_t first,
                                   const SlotBatch<kParts>& batch, const Placement& to) {
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    const uint32_t slot = slot_of_batch(first, i);
    if (slot >= run.end) continue;
    const uint32_t expert = batch.expert[i];
    const bool is_local = expert < params.experts;
    const uint32_t row = is_local ? to.shared_rows[expert] + batch.rank[i] : 0xFFFFFFFFU;
    if (is_local) place_row(params, to, slot, expert, row);
    if (slot >= to.slots.begin && slot < to.slots.end) {
      params.args.slot_to_row[slot] = static_cast<int32_t>(row);
    }
  }
}

// `kept`: the result of count_run().
template <int kParts>
__device__ inline void place_run(const PermuteParams& params, const SlotRun& run,
                                 const SlotBatch<kParts>& kept, const Placement& to) {
  place_batch(params, run, run.begin, kept, to);
  for (uint32_t first = run.begin + SlotBatch<kParts>::kSlots; first < run.end;
       first += SlotBatch<kParts>::kSlots) {
    place_batch(params, run, first, load_batch<kParts>(params, run, first), to);
  }
}

// Turns counts of one expert, by run, into rows from `row` on; returns the row after them. Several
// loads are in flight at once, which the compiler cannot arrange: a store may alias the next load.
__device__ inline uint32_t lay_out_runs(uint32_t* shared_counters, uint32_t experts,
                                        uint32_t num_runs, uint32_t row) {
  constexpr uint32_t kAtOnce = 8;
  for (uint32_t first = 0; first < num_runs; first += kAtOnce) {
    uint32_t counts[kAtOnce];
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      counts[i] = first + i < num_runs ? shared_counters[(first + i) * experts] : 0U;
    }
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      if (first + i < num_runs) shared_counters[(first + i) * experts] = row;
      row += counts[i];
    }
  }
  return row;
}

// Experts [begin, end) of this thread. They are neighbours, so that sums over threads are sums over
// experts.
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
