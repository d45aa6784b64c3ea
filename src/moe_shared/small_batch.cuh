// The permutation of up to 512 slots (moe spec 5.1) by CTAs that have a thread per slot and a
// thread per expert.
//
//   runs of 32 slots   masks[run][expert]: the slots of the run that have the expert
//   thread of expert   count = bits of its masks; rows before = sum over the experts before, each
//                      rounded up to whole tiles
//   thread of slot     row = first row of its expert + bits of earlier runs' masks + lower bits of
//                      its own
//
// Several CTAs compute the whole permutation and each writes a share of the result, so that no CTA
// needs a word of another. Rows and tiles without a slot hold -1 (rows) or 0 (tiles); they are
// filled first.
#pragma once

#include <bit>

#include "base/fast_division.h"
#include "base/int_math.h"
#include "device/scan.cuh"
#include "narrowfloat/permute.h"

namespace narrowfloat {

inline constexpr int64_t kSmallBatchSlots = 512;
inline constexpr int64_t kSmallBatchExperts = 512;

struct SmallBatchParams {
  int32_t* slot_to_row = nullptr;
  int32_t* row_to_token = nullptr;
  int32_t* row_to_slot = nullptr;
  int32_t* num_rows = nullptr;
  int32_t* tile_to_expert = nullptr;
  int32_t* tile_row_end = nullptr;
  int32_t* num_tiles = nullptr;
  uint32_t num_slots = 0;  // Slots of all tokens.
  uint32_t num_runs = 0;
  uint32_t expert_offset = 0;
  uint32_t experts = 0;
  uint32_t expert_bits = 0;  // Bits of the largest local expert's number.
  uint32_t tile_shift = 0;
  uint32_t max_tiles = 0;
  FastDivisor slots;  // Slots of a token.
};

inline SmallBatchParams make_small_batch_params(const PermutationLayout& layout,
                                                int32_t expert_offset, const Permutation& maps) {
  const auto ints = [](const TensorView& view) { return static_cast<int32_t*>(view.data); };
  SmallBatchParams params{.slot_to_row = ints(maps.slot_to_row),
                          .row_to_token = ints(maps.row_to_token),
                          .row_to_slot = ints(maps.row_to_slot),
                          .num_rows = ints(maps.num_rows),
                          .tile_to_expert = ints(maps.tile_to_expert),
                          .tile_row_end = ints(maps.tile_row_end),
                          .num_tiles = ints(maps.num_tiles)};
  params.num_slots = static_cast<uint32_t>(layout.tokens * layout.slots);
  params.num_runs = ceil_div(params.num_slots, uint32_t{kWarpSize});
  params.expert_offset = static_cast<uint32_t>(expert_offset);
  params.experts = static_cast<uint32_t>(layout.local_experts);
  params.expert_bits = static_cast<uint32_t>(std::bit_width(params.experts - 1));
  while ((int32_t{1} << params.tile_shift) < layout.token_tile) ++params.tile_shift;
  params.max_tiles = static_cast<uint32_t>(layout.max_tiles);
  params.slots = FastDivisor(static_cast<uint32_t>(layout.slots));
  return params;
}

// Shared memory of a CTA, in the order of its members.
struct SmallBatchShared {
  uint32_t* ids;         // [kSmallBatchSlots]: the sort keys of slots, written by the caller.
  uint32_t* scratch;     // A word per warp.
  uint32_t* first_rows;  // [experts]
  uint32_t* row_ends;    // [experts]: one past the expert's last slot.
  uint32_t* masks;       // [runs][experts]

  static constexpr int64_t kScratchWords = 32;
  static int64_t words(const SmallBatchParams& params) {
    return kSmallBatchSlots + kScratchWords + int64_t{params.num_runs + 2} * params.experts;
  }
  __device__ SmallBatchShared(const SmallBatchParams& params, uint32_t* shared)
      : ids(shared),
        scratch(ids + kSmallBatchSlots),
        first_rows(scratch + kScratchWords),
        row_ends(first_rows + params.experts),
        masks(row_ends + params.experts) {}
};

// The rank of this CTA among the CTAs that share the result.
struct CtaShare {
  uint32_t rank;
  uint32_t ctas;
};

// A CTA's share [begin, end) of `count` elements.
struct ShareRange {
  uint32_t begin;
  uint32_t end;
  [[nodiscard]] __device__ bool has(uint32_t index) const { return index >= begin && index < end; }
};
__device__ inline ShareRange share_of(const CtaShare& share, uint32_t count) {
  const uint32_t each = (count + share.ctas - 1) / share.ctas;
  const uint32_t begin = min(share.rank * each, count);
  return {.begin = begin, .end = min(begin + each, count)};
}

__device__ inline void clear_masks(const SmallBatchParams& params, const SmallBatchShared& shared) {
  for (uint32_t i = threadIdx.x; i < params.num_runs * params.experts; i += blockDim.x) {
    shared.masks[i] = 0;
  }
}

// Marks the CTA's tiles and the rows in them as empty. The caller places a barrier before
// place_small_batch().
__device__ inline void clear_tiles(const SmallBatchParams& params, const CtaShare& share) {
  const ShareRange tiles = share_of(share, params.max_tiles);
  const uint32_t end = tiles.end << params.tile_shift;
  for (uint32_t row = (tiles.begin << params.tile_shift) + threadIdx.x; row < end;
       row += blockDim.x) {
    params.row_to_token[row] = -1;
    params.row_to_slot[row] = -1;
  }
  for (uint32_t tile = tiles.begin + threadIdx.x; tile < tiles.end; tile += blockDim.x) {
    params.tile_to_expert[tile] = 0;
    params.tile_row_end[tile] = 0;
  }
}

// The lanes with the same local expert as this one, by a vote on each bit of its number. (MATCH.ANY
// takes several times as long for a warp with different experts.)
__device__ inline unsigned lanes_with_expert(uint32_t expert, bool is_local, uint32_t expert_bits) {
  unsigned same = __ballot_sync(kFullWarp, is_local);
#pragma unroll 4
  for (uint32_t bit = 0; bit < expert_bits; ++bit) {
    const bool is_set = (expert >> bit & 1U) != 0;
    const unsigned set = __ballot_sync(kFullWarp, is_set);
    same &= is_set ? set : ~set;
  }
  return same;
}

// Counts the bits of an expert's masks in runs [0, num_runs).
__device__ inline uint32_t slots_in_runs(const SmallBatchParams& params,
                                         const SmallBatchShared& shared, uint32_t expert,
                                         uint32_t num_runs) {
  uint32_t count = 0;
#pragma unroll 4
  for (uint32_t run = 0; run < num_runs; ++run) {
    count += static_cast<uint32_t>(__popc(shared.masks[run * params.experts + expert]));
  }
  return count;
}

// The thread of an expert computes where its rows begin and end. Ends with a barrier.
__device__ inline void lay_out_small_batch(const SmallBatchParams& params,
                                           const SmallBatchShared& shared, const CtaShare& share) {
  const uint32_t expert = threadIdx.x;
  const bool has_expert = expert < params.experts;
  const uint32_t count = has_expert ? slots_in_runs(params, shared, expert, params.num_runs) : 0U;
  const uint32_t last = (1U << params.tile_shift) - 1;
  const BlockSum rows = block_sum((count + last) & ~last, shared.scratch);
  if (has_expert) {
    shared.first_rows[expert] = rows.before;
    shared.row_ends[expert] = rows.before + count;
  }
  if (share.rank == 0 && threadIdx.x == 0) {
    params.num_rows[0] = static_cast<int32_t>(rows.total);
    params.num_tiles[0] = static_cast<int32_t>(rows.total >> params.tile_shift);
  }
  __syncthreads();
}

// The slot that is a tile's first row describes the tile.
__device__ inline void store_small_batch_row(const SmallBatchParams& params, uint32_t slot,
                                             uint32_t expert, uint32_t row, uint32_t row_end) {
  const uint32_t tile_rows = 1U << params.tile_shift;
  params.row_to_token[row] = static_cast<int32_t>(params.slots.quotient(slot));
  params.row_to_slot[row] = static_cast<int32_t>(slot);
  if (row % tile_rows != 0) return;
  params.tile_to_expert[row >> params.tile_shift] = static_cast<int32_t>(expert);
  params.tile_row_end[row >> params.tile_shift] =
      static_cast<int32_t>(min(row + tile_rows, row_end));
}

// Called by a CTA of at least as many threads as slots and as experts, after its ids and its
// cleared masks are visible to it.
__device__ inline void place_small_batch(const SmallBatchParams& params,
                                         const SmallBatchShared& shared, const CtaShare& share) {
  const uint32_t slot = threadIdx.x;
  const uint32_t run = slot / kWarpSize;
  const bool has_slot = slot < params.num_slots;
  // The subtraction is modulo 2^32: ids below the offset become large.
  const uint32_t expert =
      has_slot ? min(shared.ids[slot] - params.expert_offset, params.experts) : params.experts;
  const bool is_local = expert < params.experts;
  const unsigned same = lanes_with_expert(expert, is_local, params.expert_bits);
  const unsigned lower = same & ((1U << slot % kWarpSize) - 1);
  if (is_local && lower == 0) shared.masks[run * params.experts + expert] = same;
  __syncthreads();
  lay_out_small_batch(params, shared, share);
  if (!has_slot) return;
  uint32_t row = 0xFFFFFFFFU;
  if (is_local) {
    row = shared.first_rows[expert] + slots_in_runs(params, shared, expert, run) +
          static_cast<uint32_t>(__popc(lower));
    if (share_of(share, params.max_tiles).has(row >> params.tile_shift)) {
      store_small_batch_row(params, slot, expert, row, shared.row_ends[expert]);
    }
  }
  if (share_of(share, params.num_slots).has(slot)) {
    params.slot_to_row[slot] = static_cast<int32_t>(row);
  }
}

}  // namespace narrowfloat
