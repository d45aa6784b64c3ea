// The grouped GEMM of Hopper: out[token, n] = epilogue(sum over k of x[token, k] * w[n, k]), as
// D^T = W * X^T. Weight rows are wgmma's M, tokens its N, so that few tokens waste nothing, and the
// weights are decoded in registers to bf16 or E4M3, the A operand: exactly, but for NVFP4 beside
// FP8 rows where the mode rounds it to E4M3 (moe spec 11.3). FP8 weights change places with the
// tokens in tiles of 64 tokens and more.
//
//   CTA       producer warpgroup | consumer warpgroup 0: 64 or 128 weight rows | 1: as many
//   stage     kKTiles k tiles: packed weights by bulk copies, activation rows by 16-byte copies
//             that gather rows and swizzle, zeros for absent columns
//   tile      (128 or 256 weight rows) x (token tile), persistent CTAs over all of them
//             (tile_scheduler.cuh); both sides take the same ones, or the producer tells the
//             consumers
//   cluster   multicast: two CTAs with neighbouring token tiles share FP8 weights, and each copies
//             half of them to both; or split along n: each CTA has half of a tile's weight rows
//
// The file in its order: producer, consumer, kernel, launch. A kernel has one of the main loops
//
//   gemm_decode_sm90.cuh    weights decoded in registers
//   gemm_prefill_sm90.cuh   weights decoded to E4M3, many tokens
//   gemm_fp8_sm90.cuh       FP8 weights, which need no decoding
//
// and an epilogue (epilogue.cuh, epilogue_activation.cuh). Where activations have a scale every 128
// columns, sums start again there and are added in fp32 registers, times that scale and the
// weights' own of 128 x 128. docs/kernels/grouped_gemm_sm90.md has the arithmetic and figures.
#pragma once

#include <cuda_runtime.h>
#include <type_traits>

#include "base/int_math.h"
#include "device/ptx/async_copy.cuh"
#include "device/ptx/grid_dependency.cuh"
#include "device/ptx/tensor_copy.cuh"
#include "ops/grouped_gemm/sm90/epilogue_activation.cuh"
#include "ops/grouped_gemm/sm90/gemm_decode_sm90.cuh"
#include "ops/grouped_gemm/sm90/gemm_fp8_sm90.cuh"
#include "ops/grouped_gemm/sm90/gemm_prefill_sm90.cuh"
#include "ops/grouped_gemm/sm90/tile_scheduler.cuh"
#include "ops/grouped_gemm/sm90/weight_decoder.cuh"
#include "runtime/cuda/launch.h"
#include "runtime/cuda/shared_memory_opt_in.h"

namespace narrowfloat {

// The producer warpgroup fills the ring: thread 0 requests weights, every thread gathers 16-byte
// chunks of activation rows.
//
// tiles_are_complete: the list of tiles was complete before the previous kernel passed its own
// wait_for_previous_grids(), as for the second GEMM of a layer, which the first one separates from
// the permutation. No CTA of this kernel starts before all of that one's have triggered its launch
// or have ended, which they do after their wait (a rule: MoeRun::multiply_second). So the tiles can
// be read at once, and weights, which nobody writes, fill the ring while rows are still being made.
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
      if (tile.has_copies) copy_tile(tile, passes, scheduler.is_first());
      // CTAs of the next kernel take the places of those that end, and request their weights.
      if (Shape::kIsSmall && scheduler.is_first()) trigger_dependent_launch();
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

  // One thread of each warp copies an n sub-tile, where a stage has as many: consumers that share a
  // scheduler with a warp that copies all of them would be slower than the others.
  static constexpr bool kSpreadsWeights = Shape::kHasTileRing;
  static_assert(!kSpreadsWeights || (kTileBlocks == kWarpgroup / kWarpSize && Shape::kKTiles == 1));

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
        ring_.wait_empty(at_);
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
    } else {
      copy_rows(k_tile);
    }
    // Stands for the arrival that boxes make.
    if (!kHasRowBoxes && Shape::kBoxRows > 0 && thread_ == 0) arrive(ring_.full(at_));
    if constexpr (Shape::kIsTokenMajor) copy_weight_scale(k_tile);
    if constexpr (Shape::kHasTileRing && Shape::kHasGroups) {
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
      if constexpr (Shape::kHasGroups) find_scale_rows();
    } else {
      row_passes_ = ceil_div(tile.num_rows, kRowsPerPass);
      keep_sources(tile);
    }
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
  __device__ void find_scale_rows() {
#pragma unroll
    for (int i = 0; i < kScaleSources; ++i) {
      const int token = scale_token(i);
      const int source = token < Shape::kTokens
                             ? shared_.found.row_sources[token % kRowsPerPass][token / kRowsPerPass]
                             : -1;
      scale_bytes_[i] = source >= 0 ? 4 : 0;
      scale_rows_[i] = params_.group_scales + max(source, 0) * params_.group_row_stride;
    }
  }
  // Keeps those of the rows that the thread copies in registers.
  __device__ void keep_sources(const OutputTile& tile) {
    has_row_ = 0;
#pragma unroll
    for (int i = 0; i < kSources; ++i) {
      const int source = source_of(tile, thread_ / 8 % Shape::kTokens + i * kRowsPerPass);
      const int row = source >= 0 ? source : 0;
      global_rows_[i] = piece_of(row);
      has_row_ |= (source >= 0 ? 1U : 0U) << i;
    }
#pragma unroll
    for (int i = 0; i < kScaleSources; ++i) {
      scale_sources_[i] = source_of(tile, thread_ + i * kWarpgroup);
    }
  }

  // Bytes of an n sub-tile in a stage of whole k tiles.
  static constexpr uint32_t kWeightBytes =
      Shape::kIsTokenMajor ? Shape::kBlockStageBytes : Shape::kKTiles * Shape::kKTileBytes;

  // The n sub-tile that the thread's warp copies; none for other lanes, or after the expert's last.
  __device__ void find_own_weights(const OutputTile& tile) {
    const int block = tile.block + thread_ / kWarpSize;
    const bool copies = thread_ % kWarpSize == 0 && block < params_.blocks;
    own_weights_ =
        copies ? params_.image + tile.expert * params_.expert_bytes + block * params_.block_bytes
               : nullptr;
  }
  __device__ void copy_own_weights(const OutputTile& tile, int k_tile) const {
    if (own_weights_ == nullptr) return;
    if (thread_ == 0) {
      const int blocks = min(kTileBlocks, params_.blocks - tile.block);
      arrive_and_expect(ring_.full(at_), static_cast<uint32_t>(blocks) * kWeightBytes);
    }
    copy_bulk(
        shared_address(shared_.weights[at_.stage][thread_ / kWarpSize]),
        own_weights_ + static_cast<int64_t>(k_tile) * k_tile_stride(Shape::Weights::kEncoding),
        kWeightBytes, ring_.full(at_));
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
      copy_bulk(shared, global, bytes, ring_.full(at_));
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

// A consumer warpgroup multiplies tile after tile and passes each to the epilogue.
template <class Shape>
class Consumer {
 public:
  using Weights = typename Shape::Weights;
  using ManyTokens =
      std::conditional_t<Shape::kIsTokenMajor, ManyTokensLoop<Shape>, FewTokensLoop<Shape>>;
  using OfRegisters =
      std::conditional_t<Shape::kHasPrefillLoop, PrefillLoop<Shape>, RegisterLoop<Shape>>;
  using Loop = std::conditional_t<Shape::kIsSharedOperand, ManyTokens, OfRegisters>;

  __device__ Consumer(const GemmParamsOf<Shape>& params, GemmStorage<Shape>& shared,
                      const Ring<Shape::kStages>& ring)
      : params_(params),
        shared_(shared),
        loop_(params, shared, ring),
        warpgroup_(static_cast<int>(threadIdx.x) / kWarpgroup - 1),
        thread_(static_cast<int>(threadIdx.x) % kWarpgroup) {}

  __device__ void run() {
    if constexpr (Shape::kHasTileRing) {
      TileRing tiles(shared_.found.tiles);
      for (; tiles.has_tile(); tiles.advance(thread_ % 32)) {
        if (tiles.tile().has_copies) run_published(tiles);
      }
    } else {
      run_list(passes_of<Shape>(params_));
    }
  }

 private:
  __device__ void run_list(int passes) {
    TileSchedulerFor<Shape> scheduler(params_, shared_.queue, TileSizes::of<Shape>(passes),
                                      is_early<Shape>(params_));
    for (; scheduler.has_next(); scheduler.next()) {
      const OutputTile tile = scheduler.tile();
      if (is_early<Shape>(params_) && scheduler.is_first()) {
        wait_for_previous_grids();
        scheduler.end_early();
      }
      if (!tile.has_copies) continue;
      load_factors<Shape::kTokens>(params_, tile, thread_, shared_.factors[warpgroup_]);
      if constexpr (Shape::kIsTokenMajor) {
        load_column_factors(params_, tile, tile.block + 2 * warpgroup_, thread_,
                            shared_.columns[warpgroup_]);
      }
      if constexpr (Shape::kSharesColumns) request_columns(tile);
      if constexpr (!Shape::kIsTokenMajor) {
        run_tile(tile, passes);
      } else if (Shape::kMulticast > 1 && tile.num_rows <= 0) {
        loop_.pass();
      } else if (Shape::kTokens > 64 && tile.num_rows > 64) {
        run_token_blocks<2>(tile);
      } else {
        run_token_blocks<1>(tile);
      }
    }
  }

  __device__ void request_columns(const OutputTile& tile) const {
    static_assert(!Shape::kSharesColumns || (Shape::kBlocks == 2 && Shape::kGroupPasses == 1));
    const int consumer = consumer_thread();
    shared_.shared_columns[consumer / kWarpgroup].request(
        params_, tile.expert, tile.block + consumer / kWarpgroup * Shape::kBlocks,
        consumer % kWarpgroup);
  }

  // Reads the tile again after the main loop, which needs the registers that it would be kept in.
  __device__ void run_published(const TileRing& tiles) {
    static_assert(Shape::kGroupPasses == 1);
    const int consumer = consumer_thread();
    load_factors<Shape::kTokens>(params_, tiles.tile(), consumer % kWarpgroup,
                                 shared_.factors[consumer / kWarpgroup]);
    if constexpr (Shape::kSharesColumns) request_columns(tiles.tile());
    float sums[Shape::kBlocks][Shape::kSums];
    multiply(tiles.uniform_tile(), sums);
    TileEpilogue<Shape> epilogue(params_, shared_, tiles.uniform_tile());
    epilogue.finish(0, 1, sums);
    epilogue.end();
  }

  __device__ void run_tile(const OutputTile& tile, int passes) {
    TileEpilogue<Shape> epilogue(params_, shared_, tile);
#pragma unroll 1
    for (int pass = 0; pass < passes; ++pass) {
      float sums[Shape::kBlocks][Shape::kSums];
      multiply(tile, sums);
      epilogue.finish(pass, passes, sums);
    }
    epilogue.end();
  }

  template <class Sums>
  __device__ void multiply(const OutputTile& tile, Sums& sums) {
    if constexpr (Shape::kIsSharedOperand) {
      loop_.multiply(sums);
    } else {
      loop_.multiply(tile.num_rows, sums);
    }
  }

  // kTokenBlocks: blocks of 64 tokens.
  template <int kTokenBlocks>
  __device__ void run_token_blocks(const OutputTile& tile) {
    TokenSums sums[kTokenBlocks];
    loop_.multiply(sums);
    TokenMajorEpilogue<Shape, kTokenBlocks>(params_, shared_, tile).finish(sums);
  }

  const GemmParams& params_;
  GemmStorage<Shape>& shared_;
  Loop loop_;
  int warpgroup_;
  int thread_;
};

// A barrier of all threads of a CTA, or of a cluster of either kind.
template <class Shape>
__device__ void sync_cluster() {
  if constexpr (Shape::kClusterCtas > 1) {
    arrive_at_cluster();
    wait_for_cluster();
  } else {
    __syncthreads();
  }
}

template <class Shape>
using ConsumerOf =
    std::conditional_t<Shape::kHasRemainders, RemainderConsumer<Shape>, Consumer<Shape>>;

// Called by one thread, before a barrier of all that take part.
template <class Shape>
__device__ void init_barriers(GemmStorage<Shape>& shared, const Ring<Shape::kStages>& ring) {
  // Arrivals of the producer's threads, of the weights, and of boxes of rows.
  constexpr int kBoxArrivals = Shape::kBoxRows > 0 ? 1 : 0;
  ring.init(kWarpgroup + 1 + kBoxArrivals, Shape::kMulticast * kConsumers * kWarpgroup / 32);
  if constexpr (Shape::kHasTileRing) {
    // The producer takes tiles from the list, and tells consumers.
    TileScheduler::init(shared.queue, kWarpgroup / 32);
    TileRing::init(shared.found.tiles, kConsumers * kWarpgroup / 32);
  } else {
    TileScheduler::init(shared.queue, Shape::kMulticast * kGemmThreads / 32);
  }
  if constexpr (Shape::kNSplit > 1) shared.cluster_maxima.init();
}

// Activations without a scale every 128 columns have these, which nobody overwrites.
template <class Shape>
__device__ void set_group_scales_to_one(GemmStorage<Shape>& shared) {
  constexpr int kScales = static_cast<int>(sizeof(shared.group_scales) / sizeof(float));
  float* scales = shared.group_scales[0][0];
  for (int i = static_cast<int>(threadIdx.x); i < kScales; i += kGemmThreads) scales[i] = 1.0F;
}

template <class Shape>
__global__ void __launch_bounds__(kGemmThreads, Shape::kBlocksPerSm)
    multiply_groups_kernel(const __grid_constant__ GemmParamsOf<Shape> params) {
  // Compiles to nothing elsewhere, where supports() refuses to run.
  if constexpr (kHasWgmma) {
    NF_DYNAMIC_SHARED(uint8_t, shared_bytes, 1024);
    auto& shared = *reinterpret_cast<GemmStorage<Shape>*>(shared_bytes);
    const Ring<Shape::kStages> ring(shared.barriers);
    if (threadIdx.x == 0) init_barriers(shared, ring);
    if constexpr (Shape::kMayLackGroupScales) {
      if (params.group_scales == nullptr) set_group_scales_to_one(shared);
    }
    sync_cluster<Shape>();
    // Issued by a consumer thread: consumers are idle here and have registers to spare.
    if (params.tiles_are_complete && threadIdx.x == kWarpgroup) {
      Producer<Shape>(params, shared, ring).request_weights();
    }
    if (!is_early<Shape>(params)) wait_for_previous_grids();
    if (threadIdx.x < kWarpgroup) {
      give_registers<Shape::kProducerRegisters>();
      Producer<Shape>(params, shared, ring).run();
      if constexpr (!Shape::kIsSmall) trigger_dependent_launch();
    } else {
      take_registers<Shape::kConsumerRegisters>();
      ConsumerOf<Shape>(params, shared, ring).run();
    }
    // CTAs without a tile have not waited yet, and none ends before it has.
    if (is_early<Shape>(params)) wait_for_previous_grids();
    // The other CTA may still write here, or arrive at barriers; not in a cluster split along n
    // (ClusterMaxima).
    if constexpr (Shape::kMulticast > 1) sync_cluster<Shape>();
  }
}

// Shared memory of CTAs of small tiles of which there are no more than SMs: two of them do not fit
// one SM, so each has its own, but one fits beside a CTA of another GEMM that has more CTAs. Two
// would share an SM otherwise: CTAs start as places fall free, while others wait.
inline constexpr size_t kLoneBytes = 114 * 1024;

// An upper bound: of how many tiles there are rows, the device knows.
template <class Shape>
int64_t most_tiles(const GemmParams& params) {
  const int tile_blocks = passes_of<Shape>(params) * Shape::kNSplit * Shape::kTileBlocks;
  const int64_t pieces = int64_t{params.max_tiles} * params.splits;
  return ceil_div(pieces, int64_t{Shape::kMulticast}) * ceil_div(params.blocks, tile_blocks);
}

template <class Shape>
GemmParamsOf<Shape> params_of(const GemmParams& params) {
  constexpr int64_t kMostRows = int64_t{1} << 31;
  GemmParamsOf<Shape> own{params};
  if constexpr (Shape::kBoxRows > 0) {
    own.has_row_boxes =
        params.row_to_token == nullptr && params.input_rows > 0 && params.input_rows < kMostRows;
    if (own.has_row_boxes) own.row_boxes = make_row_boxes(params, Shape::kBoxRows);
  }
  return own;
}

template <class Shape>
void launch_multiply_groups(const GemmParams& params, const GemmLaunch& shape, Stream stream) {
  constexpr auto kKernel = multiply_groups_kernel<Shape>;
  constexpr size_t kBytes = sizeof(GemmStorage<Shape>);
  static_assert(kBytes <= Shape::kSharedBytes);
  constexpr size_t kMostBytes = Shape::kIsSmall ? kLoneBytes : kBytes;
  static SharedMemoryOptIn opt_in;
  opt_in.allow(reinterpret_cast<const void*>(kKernel), kMostBytes, shape.device);
  constexpr int kCtas = Shape::kClusterCtas;
  const int64_t resident = int64_t{shape.num_sms} * Shape::kBlocksPerSm / kCtas;
  const int64_t tiles = most_tiles<Shape>(params);
  const int64_t clusters =
      Shape::kNSplit > 1 ? tiles : std::min(tiles, std::max<int64_t>(1, resident));
  const int64_t ctas = clusters * kCtas;
  const size_t bytes = ctas <= shape.num_sms ? kMostBytes : kBytes;
  launch(kKernel, {dim3(static_cast<unsigned>(ctas)), dim3(kGemmThreads), bytes, kCtas}, stream,
         params_of<Shape>(params));
}

// Groups of 128 columns of so few tiles that each has a cluster: twice as many SMs work,
// or two CTAs on each instead of one. Where weights are decoded it pays for half as many tiles
// more, whose clusters start where others have ended (docs/kernels/grouped_gemm_sm90.md).
template <class Split>
bool splits_along_n(const GemmParams& params, const GemmLaunch& shape) {
  const int most = Split::kIsSharedOperand ? shape.num_sms : shape.num_sms * 3 / 2;
  return makes_groups(params) && most_tiles<Split>(params) <= most;
}

template <class Weights, bool kHasGroups>
void launch_gemm(const GemmParams& params, const GemmLaunch& shape, Stream stream) {
  const auto launch_tokens = [&]<int kTokens>() {
    launch_multiply_groups<GemmShapeOf<Weights, kHasGroups, kTokens>>(params, shape, stream);
  };
  if constexpr (kHasGroups) {
    using Split = GemmShapeOf<Weights, true, 8, true>;
    if (shape.tokens == 8 && splits_along_n<Split>(params, shape)) {
      return launch_multiply_groups<Split>(params, shape, stream);
    }
  }
  if (shape.tokens == 8) return launch_tokens.template operator()<8>();
  if (shape.tokens == 16) return launch_tokens.template operator()<16>();
  if (shape.tokens == 32) return launch_tokens.template operator()<32>();
  if (shape.tokens == 64) return launch_tokens.template operator()<64>();
  launch_tokens.template operator()<most_tokens<Weights>()>();
}

}  // namespace narrowfloat
