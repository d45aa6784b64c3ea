// The tile scheduler of the Hopper GEMM: which weight rows a CTA multiplies with which token tile,
// read from the permutation on the device.
//
// An output tile is 128, 192 or 256 weight rows by an m tile: `tokens` rows of a token tile of the
// permutation, or what there is. The ragged remainder of an expert after a full m tile, up to
// `remainder_tokens` rows, comes with the tile before instead of one of its own, which would read
// and decode the same weights again.
//
// Tiles are taken in groups of 8 or 16 m tiles (TileSizes); in a group all tiles of the same weight
// rows come first. So CTAs that run at the same time share weights and the activations of a few m
// tiles, and both stay in L2.
//
// A CTA's first tile is that of its number. The following ones come in the same order (static) or,
// in a layer, from a counter (dynamic): CTAs that share an SM unevenly would end their tiles at
// different times. One producer thread knows the next tile; a ring in shared memory tells all
// warps:
//
//   choose_next()   that thread calls it once a tile, when the tile's copies are requested
//   next()          all warps that read the schedule call it, each when it is done with the tile:
//                   those of a CTA, its producer's, or the one that finds tiles for the others
//
// Clusters with multicast have one number for both CTAs: they take two neighbouring m tiles, one
// each. The first CTA's thread sends the number to both, and all their warps say there when they
// have taken it. In clusters split along n each CTA has a part of one tile's weight rows.
//
// A tile's result does not depend on who computes it. Every CTA takes numbers until it gets one
// after the last tile, so that the counter ends at the number of tiles; clusters split along n take
// none from it.
#pragma once

#include "device/ptx/cluster.cuh"
#include "device/reduce.cuh"
#include "device/ring.cuh"
#include "ops/grouped_gemm/sm90/gemm_params.h"

namespace narrowfloat {

struct OutputTile {
  int expert = 0;
  int block = 0;  // The first of its n sub-tiles, which have 64 weight rows each.
  int64_t first_row = 0;
  int num_rows = 0;  // 0: nothing to multiply.
  // Rows here or in the other CTA of a cluster: both pass the same stages.
  bool has_copies = false;
  bool is_shared = false;  // In both, of the same expert.
  bool is_narrow = false;  // One n sub-tile, an expert's last.
};

// The sizes of a tile.
struct TileSizes {
  int tokens;            // Rows of an m tile.
  int remainder_tokens;  // Rows of a remainder, at most.
  int blocks;            // n sub-tiles, each of 64 weight rows.
  int cluster_ctas;      // CTAs that take neighbouring token tiles of the same weight rows.
  int group = 8;         // m tiles of which all tiles of the same weight rows come first.

  template <class Shape>
  __device__ static TileSizes of(int passes) {
    return {.tokens = Shape::kMTile,
            .remainder_tokens = Shape::kTokens - Shape::kMTile,
            .blocks = passes * Shape::kNSplit * Shape::kTileBlocks,
            .cluster_ctas = Shape::kMulticast};
  }
};

// Tiles on their way to a CTA's warps. The producer is ahead by several short ones.
struct TileQueue {
  static constexpr int kSlots = 4;
  RingBarriers<kSlots> barriers;
  uint32_t tiles[kSlots];
};

// kTakesNarrow: the n sub-tile that is left alone after an expert's last whole tile is a tile of
// its own, and these tiles are the last. kNSplit: CTAs of a cluster that take neighbouring weight
// rows of a tile, its `blocks` all together, and then no other tile.
template <bool kTakesNarrow, int kNSplit = 1>
class TileSchedulerOf {
 public:
  // Called by one thread, before a barrier of the CTA: `warps` take the tiles.
  __device__ static void init(TileQueue& shared_queue, uint32_t warps) {
    Ring<TileQueue::kSlots>(shared_queue.barriers).init(1, warps);
  }

  // is_early: before previous kernels are done.
  __device__ TileSchedulerOf(const GemmParams& params, TileQueue& shared_queue,
                             const TileSizes& sizes, bool is_early = false)
      : params_(params),
        shared_queue_(shared_queue),
        is_early_(is_early),
        sizes_(sizes),
        row_tiles_(row_tiles(params, sizes)),
        index_(blockIdx.x / (cluster_ctas() * kNSplit)) {}

  [[nodiscard]] __device__ bool has_next() const {
    if constexpr (kTakesNarrow) {
      if (has_narrow()) return index_ < num_columns() * (row_tiles_ + 1);
    }
    return index_ < num_columns() * row_tiles_;
  }

  // Tiles before this one.
  [[nodiscard]] __device__ uint32_t taken() const { return taken_; }
  // The place in a ring of the tile with `number` tiles before it.
  [[nodiscard]] __device__ static RingPosition<TileQueue::kSlots> position_of(uint32_t number) {
    return {.stage = static_cast<int>(number % kSlots), .parity = number / kSlots % 2};
  }

  // Previous kernels are done from here on.
  __device__ void end_early() { is_early_ = false; }

  // Whether this is the tile of the CTA's number.
  [[nodiscard]] __device__ bool is_first() const { return taken_ == 0; }

  __device__ void choose_next() const {
    if constexpr (kNSplit == 1) send_next();
  }
  __device__ void next() {
    if constexpr (kNSplit > 1) {
      index_ = UINT32_MAX;
    } else {
      const Position at = position();
      ring().wait_full(at);
      index_ = shared_queue_.tiles[at.stage];
      __syncwarp();
      release(at, threadIdx.x % 32 == 0);
      ++taken_;
    }
  }

  [[nodiscard]] __device__ OutputTile tile() const {
    if constexpr (kTakesNarrow) {
      const uint32_t full_tiles = num_columns() * row_tiles_;
      if (index_ >= full_tiles) return narrow_tile(index_ - full_tiles);
    }
    const uint32_t most_columns = static_cast<uint32_t>(sizes_.group) / cluster_ctas();
    const uint32_t group_tiles = most_columns * row_tiles_;
    const uint32_t group = index_ / group_tiles;
    const uint32_t in_group = index_ - group * group_tiles;
    const uint32_t group_columns = min(most_columns, num_columns() - group * most_columns);
    const uint32_t row_tile = in_group / group_columns;
    const uint32_t column = group * most_columns + (in_group - row_tile * group_columns);
    const uint32_t m_tile = cluster_ctas() > 1 ? cluster_ctas() * column + cluster_rank() : column;
    OutputTile tile = tile_of(m_tile);
    tile.block = sizes_.blocks * static_cast<int>(row_tile);
    if constexpr (kNSplit > 1) {
      tile.block += sizes_.blocks / kNSplit * static_cast<int>(cluster_rank());
    }
    if (cluster_ctas() > 1) {
      join_cluster(m_tile, tile);
    } else if (sizes_.remainder_tokens > 0) {
      join_remainder(m_tile, tile);
    }
    return tile;
  }

 private:
  static constexpr uint32_t kSlots = TileQueue::kSlots;
  using Position = RingPosition<TileQueue::kSlots>;

  __device__ void send_next() const {
    const Position at = position();
    if (cluster_ctas() > 1) {
      // This thread has taken the slot's tile before, so its phase has ended.
      arrive_and_expect(ring().full(at), sizeof(uint32_t));
      if (cluster_rank() != 0) return;
    }
    const uint32_t clusters = gridDim.x / cluster_ctas();
    const uint32_t before =
        params_.next_tile == nullptr ? static_next(clusters) : atomicAdd(params_.next_tile, 1U);
    ring().wait_empty(at);
    if (cluster_ctas() > 1) {
      const uint32_t slot = shared_address(&shared_queue_.tiles[at.stage]);
      for (uint32_t rank = 0; rank < cluster_ctas(); ++rank) {
        send_to_block(slot, rank, before + clusters, ring().full(at));
      }
    } else {
      shared_queue_.tiles[at.stage] = before + clusters;
      arrive(ring().full(at));
    }
  }

  // Tiles along n of an expert, without the narrow one.
  __device__ static uint32_t row_tiles(const GemmParams& params, const TileSizes& sizes) {
    const bool is_left = kTakesNarrow && params.blocks % sizes.blocks == 1;
    return static_cast<uint32_t>((params.blocks + (is_left ? 0 : sizes.blocks - 1)) / sizes.blocks);
  }
  [[nodiscard]] __device__ bool has_narrow() const { return params_.blocks % sizes_.blocks == 1; }

  [[nodiscard]] __device__ Ring<TileQueue::kSlots> ring() const {
    return Ring<TileQueue::kSlots>(shared_queue_.barriers);
  }
  // The place of the tile after this one.
  [[nodiscard]] __device__ Position position() const { return position_of(taken_); }

  // Static schedule. Where narrow tiles come last, even waves run in reverse order, so that a CTA
  // with one tile more gets a narrow one.
  [[nodiscard]] __device__ uint32_t static_next(uint32_t clusters) const {
    const uint32_t own = blockIdx.x / cluster_ctas();
    if constexpr (kTakesNarrow) {
      if (has_narrow() && taken_ % 2 == 0) return taken_ * clusters + clusters - 1 - own;
    }
    return taken_ * clusters + own;
  }

  [[nodiscard]] __device__ OutputTile narrow_tile(uint32_t column) const {
    const uint32_t m_tile = cluster_ctas() * column + cluster_rank();
    OutputTile tile = tile_of(m_tile);
    tile.block = sizes_.blocks * static_cast<int>(row_tiles_);
    tile.is_narrow = true;
    join_cluster(m_tile, tile);
    return tile;
  }

  // Tells the CTA that chooses.
  __device__ void release(const Position& at, bool is_first_lane) const {
    if (cluster_ctas() > 1) {
      // Without a branch: the warp is whole when it comes to the cluster's barrier.
      arrive_in_block_if(is_first_lane, ring().empty(at), 0);
    } else if (is_first_lane) {
      ring().release(at);
    }
  }
  [[nodiscard]] __device__ uint32_t cluster_ctas() const {
    return static_cast<uint32_t>(sizes_.cluster_ctas);
  }

  // Groups of m tiles that a cluster takes together.
  [[nodiscard]] __device__ uint32_t num_columns() const {
    return (num_m_tiles() + cluster_ctas() - 1) / cluster_ctas();
  }
  // Read for each tile: kernels have no register for it.
  [[nodiscard]] __device__ uint32_t num_m_tiles() const {
    const int tiles = min(max(load(params_.num_tiles), 0), params_.max_tiles);
    return static_cast<uint32_t>(tiles * params_.splits);
  }

  // L1 may have older lines until previous kernels are done.
  [[nodiscard]] __device__ int32_t load(const int32_t* value) const {
    return is_early_ ? __ldcg(value) : *value;
  }

  // Whatever the device holds: no row outside the buffers, no expert outside the weights.
  [[nodiscard]] __device__ OutputTile tile_of(uint32_t m_tile) const {
    if (cluster_ctas() > 1 && m_tile >= num_m_tiles()) return {};
    const auto splits = static_cast<uint32_t>(params_.splits);
    const uint32_t list_idx = m_tile / splits;
    const int64_t tile_row = static_cast<int64_t>(list_idx) * params_.token_tile;
    OutputTile tile;
    const int expert = load(params_.tile_experts + list_idx);
    tile.first_row = tile_row + static_cast<int64_t>(m_tile % splits) * sizes_.tokens;
    int64_t end = min(tile_row + params_.token_tile, params_.row_limit);
    end = min(end, static_cast<int64_t>(load(params_.row_ends + list_idx)));
    end = min(end, tile.first_row + sizes_.tokens);
    if (has_expert(expert) && end > tile.first_row) {
      tile.expert = expert;
      tile.num_rows = static_cast<int>(end - tile.first_row);
      tile.has_copies = true;
    }
    return tile;
  }

  // Adds to the tile what the cluster's other CTA has of it.
  __device__ void join_cluster(uint32_t m_tile, OutputTile& tile) const {
    const OutputTile other = tile_of(m_tile ^ 1U);
    tile.is_shared = tile.has_copies && other.has_copies && other.expert == tile.expert;
    tile.has_copies = tile.has_copies || other.has_copies;
  }

  // A remainder comes only after a full m tile, whose rows end where those of the next one begin.
  __device__ void join_remainder(uint32_t m_tile, OutputTile& tile) const {
    if (is_full(tile) && m_tile + 1 < num_m_tiles()) {
      const OutputTile next = tile_of(m_tile + 1);
      if (next.expert == tile.expert && is_remainder(next)) tile.num_rows += next.num_rows;
    } else if (is_remainder(tile) && m_tile > 0) {
      const OutputTile before = tile_of(m_tile - 1);
      if (before.expert == tile.expert && is_full(before)) tile = {};
    }
  }
  [[nodiscard]] __device__ bool is_full(const OutputTile& tile) const {
    return tile.num_rows == sizes_.tokens;
  }
  [[nodiscard]] __device__ bool is_remainder(const OutputTile& tile) const {
    return tile.num_rows > 0 && tile.num_rows <= sizes_.remainder_tokens;
  }

  [[nodiscard]] __device__ bool has_expert(int expert) const {
    if (expert < 0 || expert >= params_.experts) return false;
    return params_.expert_encodings == nullptr ||
           params_.expert_encodings[expert] == params_.encoding;
  }

  const GemmParams& params_;
  TileQueue& shared_queue_;
  bool is_early_;
  TileSizes sizes_;
  uint32_t row_tiles_;
  uint32_t index_;
  uint32_t taken_ = 0;  // From the ring.
};

using TileScheduler = TileSchedulerOf<false>;

template <class Shape>
using TileSchedulerFor = TileSchedulerOf<false, Shape::kNSplit>;

// Tiles on their way from the warp of a CTA that reads the schedule to others, which then load
// nothing of the permutation. They lie in shared memory until all that read a tile are done with
// it.
//
//   finder, one thread   publish(i, tile) for its i-th tile, then a tile of kNoTile: the end
//   readers, all warps   while (has_tile()) { tile() ... advance() }
//
// Readers are consumers, and the warps that copy where another one of the producer's finds tiles.
inline constexpr int kNoTile = -1;

struct PublishedTiles {
  static constexpr int kSlots = TileQueue::kSlots;
  RingBarriers<kSlots> barriers;
  OutputTile tiles[kSlots];
};

class TileRing {
 public:
  // Called by one thread, before a barrier of the CTA: `warps` read the tiles.
  __device__ static void init(PublishedTiles& shared, uint32_t warps) {
    Ring<PublishedTiles::kSlots>(shared.barriers).init(1, warps);
  }

  __device__ explicit TileRing(PublishedTiles& shared) : shared_(shared) {}

  __device__ void publish(uint32_t number, const OutputTile& tile) const {
    const auto at = TileScheduler::position_of(number);
    ring().wait_empty(at);
    shared_.tiles[at.stage] = tile;
    arrive(ring().full(at));
  }

  [[nodiscard]] __device__ bool has_tile() const {
    ring().wait_full(TileScheduler::position_of(taken_));
    return tile().block != kNoTile;
  }
  [[nodiscard]] __device__ const OutputTile& tile() const {
    return shared_.tiles[TileScheduler::position_of(taken_).stage];
  }
  // Called by all lanes of a warp. The shuffle tells the compiler that values are the same in all:
  // it takes uniform registers then, none of the main loop's. Leaves out what clusters and narrow
  // tiles have, which no reader of it needs.
  [[nodiscard]] __device__ OutputTile uniform_tile() const {
    const auto uniform = [](auto value) { return __shfl_sync(kFullWarp, value, 0); };
    const OutputTile& own = tile();
    return {.expert = uniform(own.expert),
            .block = uniform(own.block),
            .first_row = uniform(own.first_row),
            .num_rows = uniform(own.num_rows),
            .has_copies = uniform(own.has_copies ? 1 : 0) != 0};
  }
  __device__ void advance(int lane) {
    ring().release_warp(TileScheduler::position_of(taken_), lane);
    ++taken_;
  }

 private:
  [[nodiscard]] __device__ Ring<PublishedTiles::kSlots> ring() const {
    return Ring<PublishedTiles::kSlots>(shared_.barriers);
  }

  PublishedTiles& shared_;
  uint32_t taken_ = 0;
};

}  // namespace narrowfloat
