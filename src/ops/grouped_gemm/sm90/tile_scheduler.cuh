// The order of work of the Hopper GEMM: which 128 or 256 weight rows a block multiplies with which
// token tile, read from the permutation on the device.
//
// Tiles are taken in groups of kTileGroup; inside a group all tiles of the same weight rows
// come first. So blocks that run at the same time share weights and the activations of a few tiles,
// and both stay in L2.
//
// A block's first item is that of its number. The following ones are dealt in the same order (where
// narrow items come last, from the other end in every other turn) or, in a layer, claimed from a
// counter: blocks that share memory unevenly would end their items at different times. One producer
// thread knows which; a ring in shared memory tells all warps:
//
//   choose_next()   that thread, once an item, when its copies are requested, or nearly all are
//   next()          all warps that read the list, each when it is done with the item: those of a
//                   block, its producer's (tile_scheduler.cuh), or the one that finds items for
//                   them
//
// A team, two blocks of a cluster, has one number for both: an item is then a pair of neighbouring
// token tiles, one each. The first block's thread sends it to both, and all their warps say there
// when they have taken it. A row team has one item, of which each block has a part of the weight
// rows.
//
// An item has a piece of a token tile, `tokens` rows or what there is. Behind a full piece, what is
// left of the expert is its tail: up to `tail_tokens` rows of the next piece come with the item
// before instead of one of their own, which would read and decode the same weights again.
//
// An item's result does not depend on who computes it. Every block claims until it gets an item
// behind the last one, so that the counter ends at the number of items; row teams claim none.
#pragma once

#include "device/ptx/cluster.cuh"
#include "device/reduce.cuh"
#include "device/ring.cuh"
#include "ops/grouped_gemm/sm90/gemm_params.h"

namespace narrowfloat {

struct WorkItem {
  int expert = 0;
  int block = 0;  // The first block of 64 weight rows.
  int64_t first_row = 0;
  int num_rows = 0;  // 0: nothing to multiply.
  // Rows here or in the other block of a team: both pass the same stages.
  bool has_copies = false;
  bool is_shared = false;  // In both, of the same expert.
  bool is_narrow = false;  // One block of weight rows, an expert's last.
};

// What an item is made of.
struct WorkTiling {
  int tokens;       // Of a piece.
  int tail_tokens;  // Most of a tail.
  int blocks;       // Of 64 weight rows.
  int team;         // Blocks of threads that take neighbouring token tiles of the same weight rows.

  template <class Shape>
  __device__ static WorkTiling of(int passes) {
    return {.tokens = Shape::kPieceTokens,
            .tail_tokens = Shape::kTokens - Shape::kPieceTokens,
            .blocks = passes * Shape::kRowTeam * Shape::kTileBlocks,
            .team = Shape::kTeam};
  }
};

// Items on their way to a block's warps. The producer is ahead by several short ones.
struct ItemQueue {
  static constexpr int kSlots = 4;
  RingBarriers<kSlots> barriers;
  uint32_t items[kSlots];
};

// kTakesNarrow: the block of weight rows that is left alone behind an expert's last whole tile is
// an item of its own, and these items are the last.
// kRowTeam: blocks of a cluster that take neighbouring weight rows of an item, its `blocks` all
// together, and then no other item.
template <bool kTakesNarrow, int kRowTeam = 1>
class WorkListOf {
 public:
  // By one thread, before a block barrier: `warps` take the items.
  __device__ static void init(ItemQueue& shared_queue, uint32_t warps) {
    Ring<ItemQueue::kSlots>(shared_queue.barriers).init(1, warps);
  }

  // is_early: before previous kernels are done.
  __device__ WorkListOf(const GemmParams& params, ItemQueue& shared_queue, const WorkTiling& tiling,
                        bool is_early = false)
      : params_(params),
        shared_queue_(shared_queue),
        is_early_(is_early),
        tiling_(tiling),
        row_tiles_(row_tiles(params, tiling)),
        index_(blockIdx.x / (team() * kRowTeam)) {}

  [[nodiscard]] __device__ bool has_next() const {
    if constexpr (kTakesNarrow) {
      if (has_narrow()) return index_ < num_columns() * (row_tiles_ + 1);
    }
    return index_ < num_columns() * row_tiles_;
  }

  // Items before this one.
  [[nodiscard]] __device__ uint32_t taken() const { return taken_; }
  // In a ring of items: of the one with `number` items in front of it.
  [[nodiscard]] __device__ static RingPosition<ItemQueue::kSlots> position_of(uint32_t number) {
    return {.stage = static_cast<int>(number % kSlots), .parity = number / kSlots % 2};
  }

  // Previous kernels are done from here on.
  __device__ void end_early() { is_early_ = false; }

  // The one of the block's number.
  [[nodiscard]] __device__ bool is_first() const { return taken_ == 0; }

  __device__ void choose_next() const {
    if constexpr (kRowTeam == 1) send_next();
  }
  __device__ void next() {
    if constexpr (kRowTeam > 1) {
      index_ = UINT32_MAX;
    } else {
      const Position at = position();
      ring().wait_full(at);
      index_ = shared_queue_.items[at.stage];
      __syncwarp();
      release(at, threadIdx.x % 32 == 0);
      ++taken_;
    }
  }

  [[nodiscard]] __device__ WorkItem item() const {
    if constexpr (kTakesNarrow) {
      const uint32_t full_items = num_columns() * row_tiles_;
      if (index_ >= full_items) return narrow_item(index_ - full_items);
    }
    const uint32_t most_columns = kTileGroup / team();
    const uint32_t group_items = most_columns * row_tiles_;
    const uint32_t group = index_ / group_items;
    const uint32_t in_group = index_ - group * group_items;
    const uint32_t group_columns = min(most_columns, num_columns() - group * most_columns);
    const uint32_t row_tile = in_group / group_columns;
    const uint32_t column = group * most_columns + (in_group - row_tile * group_columns);
    const uint32_t piece = team() > 1 ? team() * column + cluster_rank() : column;
    WorkItem item = item_of(piece);
    item.block = tiling_.blocks * static_cast<int>(row_tile);
    if constexpr (kRowTeam > 1) {
      item.block += tiling_.blocks / kRowTeam * static_cast<int>(cluster_rank());
    }
    if (team() > 1) {
      join_team(piece, item);
    } else if (tiling_.tail_tokens > 0) {
      join_tail(piece, item);
    }
    return item;
  }

 private:
  static constexpr uint32_t kTileGroup = 8;
  static constexpr uint32_t kSlots = ItemQueue::kSlots;
  using Position = RingPosition<ItemQueue::kSlots>;

  __device__ void send_next() const {
    const Position at = position();
    if (team() > 1) {
      // This thread has taken the slot's item before, so its phase has ended.
      arrive_and_expect(ring().full(at), sizeof(uint32_t));
      if (cluster_rank() != 0) return;
    }
    const uint32_t teams = gridDim.x / team();
    const uint32_t before =
        params_.next_item == nullptr ? dealt(teams) : atomicAdd(params_.next_item, 1U);
    ring().wait_empty(at);
    if (team() > 1) {
      const uint32_t slot = shared_address(&shared_queue_.items[at.stage]);
      for (uint32_t rank = 0; rank < team(); ++rank) {
        send_to_block(slot, rank, before + teams, ring().full(at));
      }
    } else {
      shared_queue_.items[at.stage] = before + teams;
      arrive(ring().full(at));
    }
  }

  // Of an expert, without the narrow one.
  __device__ static uint32_t row_tiles(const GemmParams& params, const WorkTiling& tiling) {
    const bool is_left = kTakesNarrow && params.blocks % tiling.blocks == 1;
    return static_cast<uint32_t>((params.blocks + (is_left ? 0 : tiling.blocks - 1)) /
                                 tiling.blocks);
  }
  [[nodiscard]] __device__ bool has_narrow() const { return params_.blocks % tiling_.blocks == 1; }

  [[nodiscard]] __device__ Ring<ItemQueue::kSlots> ring() const {
    return Ring<ItemQueue::kSlots>(shared_queue_.barriers);
  }
  // Of the item after this one.
  [[nodiscard]] __device__ Position position() const { return position_of(taken_); }

  // Behind everybody's first one. Where narrow items come last, teams take turns from the other
  // end: who has an item more than others gets a narrow one last.
  [[nodiscard]] __device__ uint32_t dealt(uint32_t teams) const {
    const uint32_t own = blockIdx.x / team();
    if constexpr (kTakesNarrow) {
      if (has_narrow() && taken_ % 2 == 0) return taken_ * teams + teams - 1 - own;
    }
    return taken_ * teams + own;
  }

  [[nodiscard]] __device__ WorkItem narrow_item(uint32_t column) const {
    const uint32_t piece = team() * column + cluster_rank();
    WorkItem item = item_of(piece);
    item.block = tiling_.blocks * static_cast<int>(row_tiles_);
    item.is_narrow = true;
    join_team(piece, item);
    return item;
  }

  // To the block that chooses.
  __device__ void release(const Position& at, bool is_first_lane) const {
    if (team() > 1) {
      // Without a branch: the warp is whole when it comes to the team's barrier.
      arrive_in_block_if(is_first_lane, ring().empty(at), 0);
    } else if (is_first_lane) {
      ring().release(at);
    }
  }
  [[nodiscard]] __device__ uint32_t team() const { return static_cast<uint32_t>(tiling_.team); }

  // Pieces that a team takes together.
  [[nodiscard]] __device__ uint32_t num_columns() const {
    return (num_pieces() + team() - 1) / team();
  }
  // Of token tiles. Read for each item: kernels have no register for it.
  [[nodiscard]] __device__ uint32_t num_pieces() const {
    const int tiles = min(max(load(params_.num_tiles), 0), params_.max_tiles);
    return static_cast<uint32_t>(tiles * params_.splits);
  }

  // L1 may have older lines until previous kernels are done.
  [[nodiscard]] __device__ int32_t load(const int32_t* value) const {
    return is_early_ ? __ldcg(value) : *value;
  }

  // Whatever the device holds: no row outside the buffers, no expert outside the weights.
  [[nodiscard]] __device__ WorkItem item_of(uint32_t piece) const {
    if (team() > 1 && piece >= num_pieces()) return {};
    const auto splits = static_cast<uint32_t>(params_.splits);
    const uint32_t tile = piece / splits;
    const int64_t tile_row = static_cast<int64_t>(tile) * params_.token_tile;
    WorkItem item;
    const int expert = load(params_.tile_experts + tile);
    item.first_row = tile_row + static_cast<int64_t>(piece % splits) * tiling_.tokens;
    int64_t end = min(tile_row + params_.token_tile, params_.row_limit);
    end = min(end, static_cast<int64_t>(load(params_.row_ends + tile)));
    end = min(end, item.first_row + tiling_.tokens);
    if (has_expert(expert) && end > item.first_row) {
      item.expert = expert;
      item.num_rows = static_cast<int>(end - item.first_row);
      item.has_copies = true;
    }
    return item;
  }

  // What the other block of the team has of the item.
  __device__ void join_team(uint32_t piece, WorkItem& item) const {
    const WorkItem other = item_of(piece ^ 1U);
    item.is_shared = item.has_copies && other.has_copies && other.expert == item.expert;
    item.has_copies = item.has_copies || other.has_copies;
  }

  // Only behind a full piece, whose rows end where those of the next one begin.
  __device__ void join_tail(uint32_t piece, WorkItem& item) const {
    if (is_full(item) && piece + 1 < num_pieces()) {
      const WorkItem next = item_of(piece + 1);
      if (next.expert == item.expert && is_tail(next)) item.num_rows += next.num_rows;
    } else if (is_tail(item) && piece > 0) {
      const WorkItem before = item_of(piece - 1);
      if (before.expert == item.expert && is_full(before)) item = {};
    }
  }
  [[nodiscard]] __device__ bool is_full(const WorkItem& item) const {
    return item.num_rows == tiling_.tokens;
  }
  [[nodiscard]] __device__ bool is_tail(const WorkItem& item) const {
    return item.num_rows > 0 && item.num_rows <= tiling_.tail_tokens;
  }

  [[nodiscard]] __device__ bool has_expert(int expert) const {
    if (expert < 0 || expert >= params_.experts) return false;
    return params_.expert_forms == nullptr || params_.expert_forms[expert] == params_.form;
  }

  const GemmParams& params_;
  ItemQueue& shared_queue_;
  bool is_early_;
  WorkTiling tiling_;
  uint32_t row_tiles_;
  uint32_t index_;
  uint32_t taken_ = 0;  // From the ring.
};

using WorkList = WorkListOf<false>;

template <class Shape>
using WorkListFor = WorkListOf<false, Shape::kRowTeam>;

// Items on their way from the warp of a block that finds them (tile_scheduler.cuh) to others, which
// then load nothing of the permutation: in shared memory, until all that read an item are done with
// it.
//
//   finder, one thread   publish(i, item) for its i-th item, then an item of kNoBlock: the end
//   readers, all warps   while (has_item()) { item() ... advance() }
//
// Readers are consumers, and the warps that copy where another one of the producer's finds items.

inline constexpr int kNoBlock = -1;

struct PublishedItems {
  static constexpr int kSlots = ItemQueue::kSlots;
  RingBarriers<kSlots> barriers;
  WorkItem items[kSlots];
};

class ItemRing {
 public:
  // By one thread, before a block barrier: `warps` read the items.
  __device__ static void init(PublishedItems& shared, uint32_t warps) {
    Ring<PublishedItems::kSlots>(shared.barriers).init(1, warps);
  }

  __device__ explicit ItemRing(PublishedItems& shared) : shared_(shared) {}

  __device__ void publish(uint32_t number, const WorkItem& item) const {
    const auto at = WorkList::position_of(number);
    ring().wait_empty(at);
    shared_.items[at.stage] = item;
    arrive(ring().full(at));
  }

  [[nodiscard]] __device__ bool has_item() const {
    ring().wait_full(WorkList::position_of(taken_));
    return item().block != kNoBlock;
  }
  [[nodiscard]] __device__ const WorkItem& item() const {
    return shared_.items[WorkList::position_of(taken_).stage];
  }
  // By all lanes of a warp. From the first one, so that the compiler knows it to be the same in
  // all: it takes uniform registers then, none of the main loop's. Without what teams and narrow
  // items have, which no reader of it does.
  [[nodiscard]] __device__ WorkItem uniform_item() const {
    const auto uniform = [](auto value) { return __shfl_sync(kFullWarp, value, 0); };
    const WorkItem& own = item();
    return {.expert = uniform(own.expert),
            .block = uniform(own.block),
            .first_row = uniform(own.first_row),
            .num_rows = uniform(own.num_rows),
            .has_copies = uniform(own.has_copies ? 1 : 0) != 0};
  }
  __device__ void advance(int lane) {
    ring().release_warp(WorkList::position_of(taken_), lane);
    ++taken_;
  }

 private:
  [[nodiscard]] __device__ Ring<PublishedItems::kSlots> ring() const {
    return Ring<PublishedItems::kSlots>(shared_.barriers);
  }

  PublishedItems& shared_;
  uint32_t taken_ = 0;
};

}  // namespace narrowfloat
