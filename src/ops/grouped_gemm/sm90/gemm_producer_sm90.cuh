// The producer warpgroup of the Hopper GEMM fills the ring of stages: packed weights by bulk
// copies, activation rows by 16-byte copies or boxes, and the rows' scales. It takes tiles from the
// scheduler, and tells consumers where these do not read the schedule (tile_scheduler.cuh).
#pragma once

#include "base/int_math.h"
#include "device/ptx/async_copy.cuh"
#include "device/ptx/cluster.cuh"
#include "device/ptx/grid_dependency.cuh"
#include "device/ptx/keep.cuh"
#include "device/ptx/tensor_copy.cuh"
#include "ops/grouped_gemm/sm90/epilogue_activation.cuh"
#include "ops/grouped_gemm/sm90/gemm_config.cuh"
#include "ops/grouped_gemm/sm90/tile_scheduler.cuh"

namespace narrowfloat {

// Thread 0, or one thread of each warp, requests weights; every thread gathers 16-byte chunks of
// activation rows.
//
// tiles_are_complete: the list of tiles is complete before any CTA of this kernel starts
// (runtime/cuda/kernel_chain.h), as for the second GEMM of a layer. The first one, which triggers
// launches after its own wait, lies between the permutation and it, whether or not a quantizer of
// rows triggers earlier. So the tiles can be read at once, and weights, which nobody writes, fill
// the ring while rows are still being made.
template <class Shape>
class Producer {
 public:
  using TheRing = Ring<Shape::kStages>;
  using TheScheduler = TileSchedulerFor<Shape>;

  __device__ Producer(const GemmParamsOf<Shape>& params, GemmStorage<Shape>& shared,
                      const TheRing& ring)
      : params_(params), shared_(shared), ring_(ring), thread_(threadIdx.x % kWarpgroup) {}

  // With tiles_are_complete, the first thread of any warpgroup requests the first tile's weights
  // before previous kernels are done, as many stages as the ring has.
  __device__ void request_weights() {
    const int passes = passes_of<Shape>(params_);
    const TheScheduler scheduler(params_, shared_.queue, TileSizes::of<Shape>(passes), true);
    if (!scheduler.has_next()) return;
    const OutputTile tile = scheduler.tile();
    if (!tile.has_copies) return;
    for (int k_tile = 0; k_tile < min(params_.k_tiles, kRingKTiles); k_tile += Shape::kKTiles) {
      copy_weights(tile, tile.block, k_tile);
      at_.advance();
    }
  }

  __device__ void run() {
    const int passes = passes_of<Shape>(params_);
    TheScheduler scheduler(params_, shared_.queue, TileSizes::of<Shape>(passes),
                           is_early<Shape>(params_));
    for (; scheduler.has_next(); scheduler.next()) {
      const OutputTile tile = scheduler.tile();
      if (is_early<Shape>(params_) && scheduler.is_first()) {
        wait_for_previous_grids();
        scheduler.end_early();
      }
      if constexpr (Shape::kHasTileRing) publish(scheduler.taken(), tile);
      // CTAs of the next kernel take the places of those that end, and request their weights. Where
      // all tiles have a place, this one's copies last as long as the kernel.
      if (Shape::kIsSmall && scheduler.is_first()) trigger_dependent_launch();
      if (tile.has_copies) copy_tile(tile, passes, scheduler.is_first());
      // Chosen after the copies, while the ring is full: earlier, it would take registers.
      if (thread_ == 0) scheduler.choose_next();
    }
    if constexpr (Shape::kHasTileRing) publish(scheduler.taken(), {.block = kNoTile});
  }

 private:
  static constexpr int kGroupKTiles = Shape::kGroupKTiles;
  static constexpr int kRingKTiles = Shape::kStages * Shape::kKTiles;
  static constexpr int kTileBlocks = Shape::kTileBlocks;
  // A thread copies 16 bytes of a row of a k tile, of every kRowsPerPass-th row.
  static constexpr int kRowsPerPass = kWarpgroup / 8;
  static constexpr int kSources = Shape::kTokens > kRowsPerPass ? Shape::kTokens / kRowsPerPass : 1;
  // Units a pass covers where one has fewer rows.
  static constexpr int kKTileStep =
      Shape::kTokens < kRowsPerPass ? kRowsPerPass / Shape::kTokens : 1;
  static constexpr int kScaleSources =
      Shape::kHasGroups ? (Shape::kTokens + kWarpgroup - 1) / kWarpgroup : 0;

  // Decoding leaves few instruction slots, and such producers keep what stages have in common.
  static constexpr bool kKeepsSources = Shape::kTokens == 64 && !Shape::kIsTokenMajor;
  // One thread of each warp copies an n sub-tile at most: consumers that share a scheduler with a
  // warp that copies all of them would be slower than the others.
  static constexpr bool kSpreadsWeights = Shape::kHasTileRing || kKeepsSources;
  static_assert(!kSpreadsWeights ||
                (kTileBlocks <= kWarpgroup / kWarpSize && Shape::kGroupPasses == 1));
  // Scales have pointers that advance with the stages.
  static constexpr bool kAdvancesScales =
      Shape::kHasTileRing || (kKeepsSources && Shape::kHasPrefillLoop);

  __device__ void publish(uint32_t number, const OutputTile& tile) const {
    if (thread_ == 0) TileRing(shared_.found.tiles).publish(number, tile);
  }

  __device__ void copy_tile(const OutputTile& tile, int passes, bool is_first) {
    if constexpr (kSpreadsWeights) {
      // Addresses made of it would take registers while the next tile is found.
      thread_ = static_cast<int>(keep_in_register(threadIdx.x));
      find_own_weights(tile);
    }
    find_rows(tile);
    if constexpr (Shape::kBoxRows > 0) {
      if (params_.has_row_boxes) return copy_stages<true>(tile, passes, is_first);
    }
    copy_stages<false>(tile, passes, is_first);
  }

  template <bool kHasRowBoxes>
  __device__ void copy_stages(const OutputTile& tile, int passes, bool is_first) {
    for (int pass = 0; pass < passes; ++pass) {
      const bool is_requested = params_.tiles_are_complete && is_first && pass == 0;
      const int first_block = tile.block + pass * kTileBlocks;
      if constexpr (Shape::kIsTokenMajor) find_weight_scale(tile, first_block);
      for (int k_tile = 0; k_tile < params_.k_tiles; k_tile += Shape::kKTiles) {
        wait_empty();
        if (!is_requested || k_tile >= kRingKTiles) {
          if constexpr (kSpreadsWeights) {
            copy_own_weights(tile, k_tile);
          } else {
            copy_weights(tile, first_block, k_tile);
          }
        }
        copy_stage<kHasRowBoxes>(tile, k_tile);
      }
    }
  }

  __device__ void wait_empty() const {
    if constexpr (kIsSmallE4m3<Shape>) {
      ring_.wait_empty_asleep(at_);
    } else {
      ring_.wait_empty(at_);
    }
  }

  // The thread's 16 bytes of a row's first k tile.
  [[nodiscard]] __device__ const uint8_t* piece_of(int64_t row) const {
    return params_.values + row * params_.row_bytes + thread_ % 8 * 16;
  }

  // Copies all but the weights.
  template <bool kHasRowBoxes>
  __device__ void copy_stage(const OutputTile& tile, int k_tile) {
    if constexpr (kHasRowBoxes) {
      copy_row_boxes(tile, k_tile);
    } else if constexpr (Shape::kHasTileRing) {
      copy_shared_rows(k_tile);
    } else if constexpr (kKeepsSources) {
      copy_kept_rows(k_tile);
    } else {
      copy_rows(k_tile);
    }
    // Stands for the arrival that boxes make.
    if (!kHasRowBoxes && Shape::kBoxRows > 0 && thread_ == 0) arrive(ring_.full(at_));
    if constexpr (Shape::kIsTokenMajor) copy_weight_scale(k_tile);
    if constexpr (kAdvancesScales && Shape::kHasGroups) {
      copy_next_scales();
    } else if constexpr (Shape::kHasGroups) {
      if (!Shape::kMayLackGroupScales || params_.group_scales != nullptr) {
        copy_group_scales(k_tile / kGroupKTiles);
      }
    }
    arrive_after_copies(ring_.full(at_));
    at_.advance();
  }

  // One thread requests boxes, where gathered rows take a thread for each 16 bytes. There are zeros
  // after the last row and column of the activations; rows of other tiles multiply to
  // sums that nobody reads.
  __device__ void copy_row_boxes(const OutputTile& tile, int k_tile) const {
    if (thread_ != 0) return;
    constexpr int kBoxBytes = Shape::kBoxRows * kKTileRowBytes;
    const int k_tiles = min(Shape::kKTiles, params_.k_tiles - k_tile);
    const int boxes = ceil_div(tile.num_rows, Shape::kBoxRows);
    arrive_and_expect(ring_.full(at_), static_cast<uint32_t>(k_tiles * boxes * kBoxBytes));
#pragma unroll 1
    for (int i = 0; i < k_tiles; ++i) {
      const uint32_t shared_rows = shared_address(shared_.rows[at_.stage][i]);
#pragma unroll 1
      for (int box = 0; box < boxes; ++box) {
        copy_box(shared_rows + static_cast<uint32_t>(box * kBoxBytes), &params_.row_boxes,
                 (k_tile + i) * kKTileRowBytes,
                 static_cast<int>(tile.first_row) + box * Shape::kBoxRows, ring_.full(at_));
      }
    }
  }

  // One of the last threads copies the scale of an n sub-tile: a bulk copy of 16 bytes takes as
  // long as one of some thousand.
  __device__ void copy_weight_scale(int k_tile) const {
    if (weight_scale_ == nullptr) return;
    copy_4(shared_address(shared_.weight_scales[at_.stage][kWarpgroup - 1 - thread_]),
           weight_scale_ + static_cast<int64_t>(k_tile) * k_tile_stride(Shape::Weights::kEncoding),
           4);
  }
  __device__ void find_weight_scale(const OutputTile& tile, int first_block) {
    const int block = first_block + kWarpgroup - 1 - thread_;
    const bool has_scale = block < min(first_block + kTileBlocks, params_.blocks);
    weight_scale_ = has_scale ? params_.image + tile.expert * params_.expert_bytes +
                                    block * params_.block_bytes + Shape::kBlockStageBytes
                              : nullptr;
  }

  // The activations' row for row `row` of the tile; -1 for absent ones.
  __device__ int source_of(const OutputTile& tile, int row) const {
    if (row >= tile.num_rows) return -1;
    const int64_t tile_row = tile.first_row + row;
    if (params_.row_to_token == nullptr) return static_cast<int>(tile_row);
    const int token = params_.row_to_token[tile_row];
    return token >= 0 && token < params_.input_rows ? token : -1;
  }

  __device__ void find_rows(const OutputTile& tile) {
    if constexpr (Shape::kHasTileRing) {
      share_sources(tile);
      count_own_rows(tile);
    } else {
      row_passes_ = ceil_div(tile.num_rows, kRowsPerPass);
      keep_sources(tile);
    }
    if constexpr (kAdvancesScales && Shape::kHasGroups) find_scale_rows(tile);
  }
  // Puts those of all rows in shared memory: the registers that are left to such producers, 40 or
  // 56 with scales of rows, do not hold nine of them beside a tile.
  __device__ void share_sources(const OutputTile& tile) const {
    constexpr int kBarrier = 2 + kConsumers;
    // One thread has told the consumers.
    __syncwarp();
    // Nobody reads the last tile's any more.
    sync_threads(kBarrier, kWarpgroup);
    for (int row = thread_; row < Shape::kTokens; row += kWarpgroup) {
      // Rows after the last one are those of the last one, so that nearly all tiles have all rows.
      shared_.found.row_sources[row % kRowsPerPass][row / kRowsPerPass] =
          source_of(tile, min(row, tile.num_rows - 1));
    }
    sync_threads(kBarrier, kWarpgroup);
  }
  // Those of the rows that the thread copies: row thread / 8 of every kRowsPerPass.
  [[nodiscard]] __device__ const int32_t* own_sources() const {
    return shared_.found.row_sources[thread_ / 8];
  }
  // Four of them; after the ninth come three without meaning.
  [[nodiscard]] __device__ int4 four_sources(int first) const {
    return *reinterpret_cast<const int4*>(own_sources() + first);
  }
  __device__ void count_own_rows(const OutputTile& tile) {
    int least = own_sources()[8];
#pragma unroll
    for (int first = 0; first < 8; first += 4) {
      const int4 four = four_sources(first);
      least = min(least, min(min(four.x, four.y), min(four.z, four.w)));
    }
    const int rows = ceil_div(tile.num_rows - thread_ / 8, kRowsPerPass);
    own_rows_ = least >= 0 ? rows : -1 - rows;
  }
  [[nodiscard]] __device__ int scale_source(const OutputTile& tile, int token) const {
    if (token >= Shape::kTokens) return -1;
    if constexpr (Shape::kHasTileRing) {
      return shared_.found.row_sources[token % kRowsPerPass][token / kRowsPerPass];
    } else {
      return source_of(tile, token);
    }
  }
  __device__ void find_scale_rows(const OutputTile& tile) {
#pragma unroll
    for (int i = 0; i < kScaleSources; ++i) {
      const int source = scale_source(tile, scale_token(i));
      scale_bytes_[i] = source >= 0 ? 4 : 0;
      scale_rows_[i] = params_.group_scales + max(source, 0) * params_.group_row_stride;
    }
  }
  // Keeps those of the rows that the thread copies in registers.
  __device__ void keep_sources(const OutputTile& tile) {
    has_row_ = 0;
    has_all_rows_ = true;
#pragma unroll
    for (int i = 0; i < kSources; ++i) {
      int own = thread_ / 8 % Shape::kTokens + i * kRowsPerPass;
      // Rows after the last one are those of the last one, so that nearly all tiles have all rows.
      if constexpr (kKeepsSources) own = min(own, tile.num_rows - 1);
      const int source = source_of(tile, own);
      has_all_rows_ = has_all_rows_ && source >= 0;
      const int row = source >= 0 ? source : 0;
      global_rows_[i] = piece_of(row);
      has_row_ |= (source >= 0 ? 1U : 0U) << i;
    }
    if constexpr (!kAdvancesScales) {
#pragma unroll
      for (int i = 0; i < kScaleSources; ++i) {
        scale_sources_[i] = source_of(tile, thread_ + i * kWarpgroup);
      }
    }
  }

  // Bytes of an n sub-tile in a stage of whole k tiles.
  static constexpr uint32_t kWeightBytes =
      Shape::kIsTokenMajor ? Shape::kBlockStageBytes : Shape::kKTiles * Shape::kKTileBytes;

  // The n sub-tile that the thread's warp copies; none for other lanes, or after the expert's last.
  __device__ void find_own_weights(const OutputTile& tile) {
    const int own = thread_ / kWarpSize;
    const int block = tile.block + own;
    constexpr bool kAllWarpsCopy = kTileBlocks == kWarpgroup / kWarpSize;
    const bool copies =
        thread_ % kWarpSize == 0 && (kAllWarpsCopy || own < kTileBlocks) && block < params_.blocks;
    own_weights_ =
        copies ? params_.image + tile.expert * params_.expert_bytes + block * params_.block_bytes
               : nullptr;
  }
  __device__ void copy_own_weights(const OutputTile& tile, int k_tile) const {
    if (own_weights_ == nullptr) return;
    const int k_tiles = min(Shape::kKTiles, params_.k_tiles - k_tile);
    const auto bytes =
        static_cast<uint32_t>(Shape::kKTiles == 1 ? kWeightBytes : k_tiles * Shape::kKTileBytes);
    if (thread_ == 0) {
      const int blocks = min(kTileBlocks, params_.blocks - tile.block);
      arrive_and_expect(ring_.full(at_), static_cast<uint32_t>(blocks) * bytes);
    }
    copy_own(shared_address(shared_.weights[at_.stage][thread_ / kWarpSize]),
             own_weights_ + static_cast<int64_t>(k_tile) * k_tile_stride(Shape::Weights::kEncoding),
             bytes);
  }
  // With few tokens weights are read once, and without the hint they would drive everything else
  // out of L2: the lists, the rows, and the code of all kernels.
  __device__ void copy_own(uint32_t shared, const uint8_t* global, uint32_t bytes) const {
    if constexpr (Shape::kIsSmall) {
      copy_bulk_once(shared, global, bytes, ring_.full(at_));
    } else {
      copy_bulk(shared, global, bytes, ring_.full(at_));
    }
  }

  // If two CTAs share them, each copies half of them for both.
  __device__ void copy_weights(const OutputTile& tile, int first_block, int k_tile) const {
    if (thread_ != 0) return;
    // Several k tiles are one copy.
    static_assert(Shape::kKTiles == 1 ||
                  k_tile_stride(Shape::Weights::kEncoding) == Shape::kKTileBytes);
    const int count = min(Shape::kKTiles, params_.k_tiles - k_tile);
    const int blocks =
        tile.num_rows > 0 ? max(0, min(kTileBlocks, params_.blocks - first_block)) : 0;
    const auto bytes = static_cast<uint32_t>(Shape::kIsTokenMajor ? Shape::kBlockStageBytes
                                                                  : count * Shape::kKTileBytes);
    arrive_and_expect(ring_.full(at_), static_cast<uint32_t>(blocks) * bytes);
    const uint8_t* global_k_tiles =
        params_.image + tile.expert * params_.expert_bytes + first_block * params_.block_bytes +
        static_cast<int64_t>(k_tile) * k_tile_stride(Shape::Weights::kEncoding);
    const int own = tile.is_shared ? kTileBlocks / Shape::kMulticast : kTileBlocks;
    const int first = tile.is_shared ? static_cast<int>(cluster_rank()) * own : 0;
    for (int block = first; block < min(blocks, first + own); ++block) {
      copy_to_cluster(tile, shared_address(shared_.weights[at_.stage][block]),
                      global_k_tiles + block * params_.block_bytes, bytes);
    }
  }

  __device__ void copy_to_cluster(const OutputTile& tile, uint32_t shared, const uint8_t* global,
                                  uint32_t bytes) const {
    if (Shape::kMulticast > 1 && tile.is_shared) {
      copy_bulk_to_blocks(shared, global, bytes, ring_.full(at_), (1U << Shape::kMulticast) - 1);
    } else {
      copy_own(shared, global, bytes);
    }
  }

  // Addresses are sums of what changes with the stage and constants of the thread.
  __device__ void copy_rows(int k_tile) const {
    const int row = thread_ / 8 % Shape::kTokens;
    const int first = thread_ / 8 / Shape::kTokens;  // Unit of the stage; 0 unless kKTileStep > 1.
    const int chunk = (thread_ ^ row) % 8;
    const uint32_t shared_rows = shared_address(shared_.rows[at_.stage][first]) +
                                 static_cast<uint32_t>(row * 128 + chunk * 16);
    const int first_byte = (k_tile + first) * kKTileRowBytes;
    if (first >= Shape::kKTiles) return;
#pragma unroll
    for (int step = 0; step < Shape::kKTiles; step += kKTileStep) {
      const bool has_cols =
          first_byte + step * kKTileRowBytes + thread_ % 8 * 16 < params_.row_bytes;
      const uint32_t mask = has_cols ? has_row_ : 0;
#pragma unroll
      for (int i = 0; i < kSources; ++i) {
        if (kSources > 2 && i >= row_passes_) break;
        copy_16(shared_rows +
                    static_cast<uint32_t>(step * Shape::kTokenTileBytes + i * kRowsPerPass * 128),
                global_rows_[i] + first_byte + step * kKTileRowBytes,
                (mask >> i & 1U) != 0 ? 16 : 0);
      }
    }
  }

  // The same where all rows are there: copies need no predicate, and so one test for all.
  __device__ void copy_kept_rows(int k_tile) const {
    const int row = thread_ / 8;
    const int first_byte = k_tile * kKTileRowBytes;
    const int last_byte = first_byte + (Shape::kKTiles - 1) * kKTileRowBytes + thread_ % 8 * 16;
    if (!has_all_rows_ || last_byte >= params_.row_bytes) return copy_rows(k_tile);
    copy_kept_passes<kSources>(shared_address(shared_.rows[at_.stage][0]) +
                                   static_cast<uint32_t>(row * 128 + (thread_ ^ row) % 8 * 16),
                               first_byte);
  }
  // Those of as many passes as the tile has, up to kPasses.
  template <int kPasses>
  __device__ void copy_kept_passes(uint32_t shared_rows, int first_byte) const {
    if constexpr (kPasses > 1) {
      if (row_passes_ < kPasses) return copy_kept_passes<kPasses - 1>(shared_rows, first_byte);
    }
#pragma unroll
    for (int step = 0; step < Shape::kKTiles; ++step) {
#pragma unroll
      for (int i = 0; i < kPasses; ++i) {
        copy_16(shared_rows +
                    static_cast<uint32_t>(step * Shape::kTokenTileBytes + i * kRowsPerPass * 128),
                global_rows_[i] + first_byte + step * kKTileRowBytes, 16);
      }
    }
  }

  // The same with sources from shared memory. Copies take instruction slots that consumers need;
  // where no row is absent, three a copy.
  __device__ void copy_shared_rows(int k_tile) const {
    static_assert(Shape::kKTiles == 1 && kSources == 9);
    const int first_byte = k_tile * kKTileRowBytes + thread_ % 8 * 16;
    const uint32_t bytes = first_byte < params_.row_bytes ? 16 : 0;
    if (own_rows_ >= 0 && bytes != 0) {
      // As one register pair it is added to a row's offset by the multiplication that makes this.
      auto* const pieces = const_cast<uint8_t*>(params_.values + first_byte);
      return copy_all_pieces(keep_global_in_register(pieces));
    }
    const int rows = own_rows_ >= 0 ? own_rows_ : -1 - own_rows_;
    copy_pieces<0, 4>(first_byte, bytes);
    if (rows > 4) copy_pieces<4, 4>(first_byte, bytes);
    if (rows > 8) copy_pieces<8, kSources - 8>(first_byte, bytes);
  }
  // The place of the thread's piece of row `pass` in its column of rows.
  [[nodiscard]] __device__ uint32_t shared_piece(int pass) const {
    const int row = thread_ / 8;
    return shared_address(shared_.rows[at_.stage][0]) +
           static_cast<uint32_t>((pass * kRowsPerPass + row) * 128 + (thread_ ^ row) % 8 * 16);
  }
  // Both factors have 31 bits.
  [[nodiscard]] __device__ static uint64_t row_offset(int source, uint32_t row_bytes) {
    return uint64_t{static_cast<uint32_t>(source)} * row_bytes;
  }
  __device__ void copy_all_pieces(const uint8_t* pieces) const {
    const uint32_t row_bytes = keep_in_register(static_cast<uint32_t>(params_.row_bytes));
    const uint32_t shared = shared_piece(0);
#pragma unroll
    for (int first = 0; first < kSources; first += 4) {
      const int4 four = four_sources(first);
      const int sources[] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int i = first; i < min(first + 4, kSources); ++i) {
        copy_16(shared + static_cast<uint32_t>(i * kRowsPerPass * 128),
                pieces + row_offset(sources[i - first], row_bytes), i < own_rows_ ? 16 : 0);
      }
    }
  }

  // Loads all sources before the copies: the compiler moves no load above a copy, so that each copy
  // would wait for its own.
  template <int kFirst, int kCount>
  __device__ void copy_pieces(int first_byte, uint32_t bytes) const {
    int sources[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) sources[i] = own_sources()[kFirst + i];
    const uint8_t* pieces = params_.values + first_byte;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      copy_16(shared_piece(kFirst + i),
              pieces + row_offset(max(sources[i], 0), static_cast<uint32_t>(params_.row_bytes)),
              bytes & ~static_cast<uint32_t>(sources[i] >> 31));
    }
  }

  // The i-th of the tokens whose scales the thread copies.
  [[nodiscard]] __device__ int scale_token(int i) const { return thread_ + i * kWarpgroup; }
  // Those of the next k tile, with pointers that advance.
  __device__ void copy_next_scales() {
    static_assert(Shape::kGroups == 1 && kWarpgroup % 16 == 0);
    // Places repeat every 16 tokens.
    float* first = &shared_.group_scales[at_.stage][0][Shape::scale_place(thread_)];
#pragma unroll
    for (int i = 0; i < kScaleSources; ++i) {
      if (scale_token(i) < Shape::kTokens) {
        copy_4(shared_address(first + i * kWarpgroup), scale_rows_[i], scale_bytes_[i]);
      }
      scale_rows_[i] += params_.group_stride;
    }
  }
  __device__ void copy_group_scales(int group) const {
#pragma unroll
    for (int i = 0; i < kScaleSources; ++i) {
      const int token = scale_token(i);
      if (token < Shape::kTokens) copy_group_scales(group, token, scale_sources_[i]);
    }
  }
  __device__ void copy_group_scales(int group, int token, int source) const {
#pragma unroll
    for (int i = 0; i < Shape::kGroups; ++i) {
      const bool is_there = source >= 0 && (group + i) * kGroupKTiles < params_.k_tiles;
      const int64_t offset =
          is_there ? source * params_.group_row_stride + (group + i) * params_.group_stride : 0;
      copy_4(shared_address(&shared_.group_scales[at_.stage][i][Shape::scale_place(token)]),
             params_.group_scales + offset, is_there ? 4 : 0);
    }
  }

  const GemmParamsOf<Shape>& params_;
  GemmStorage<Shape>& shared_;
  const TheRing& ring_;
  int thread_;
  RingPosition<Shape::kStages> at_;
  const uint8_t* global_rows_[kSources];
  uint32_t has_row_ = 0;  // A bit for each.
  bool has_all_rows_ = true;
  // Rows after the tile's last multiply to sums that nobody reads, whatever they are.
  int row_passes_ = kSources;
  // With kHasTileRing the thread copies so many rows; -1 less them, if some are absent.
  int own_rows_ = 0;
  const float* scale_rows_[some(kScaleSources)];
  uint32_t scale_bytes_[some(kScaleSources)];  // 0 for rows that are absent.
  const uint8_t* own_weights_ = nullptr;       // The thread's n sub-tile, where kSpreadsWeights.
  int scale_sources_[some(kScaleSources)];
  const uint8_t* weight_scale_ = nullptr;  // An n sub-tile's first, where kIsTokenMajor.
};

}  // namespace narrowfloat
