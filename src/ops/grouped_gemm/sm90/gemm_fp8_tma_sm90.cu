// The TMA kernel: the GEMM of FP8 weights for tiles of 128 tokens whose rows lie one after the
// other, as those of a layer's second GEMM do and those of a caller who has permuted them. Its
// results are those of gemm_kernel_sm90.cuh to the bit. Rows, weights and results are boxes of
// tensor maps, which one thread requests and which need no fence.
//
//   CTA       producer warpgroup | consumer warpgroup 0: tokens 0 to 63 | warpgroup 1: 64 to 127
//   stage     128 k of 128 tokens (16 KB) and of 192 weight rows (24 KB), scales of both
//   cluster   two CTAs with neighbouring token tiles; each copies half of the weights to both
//   tile      (192 weight rows) x (128 tokens), persistent CTAs over all of them
//             (tile_scheduler.cuh); the last 64 weight rows of an expert, where they are alone, are
//             a narrow tile of their own
//
// The file in its order: sizes and shared memory, producer, main loop, epilogue, kernel, launch.
#include <algorithm>
#include <cstddef>
#include <cuda_runtime.h>

#include "base/float_ops.h"
#include "base/int_math.h"
#include "device/ptx/async_copy.cuh"
#include "device/ptx/cluster.cuh"
#include "device/ptx/grid_dependency.cuh"
#include "device/ptx/keep.cuh"
#include "device/ptx/tensor_copy.cuh"
#include "device/ptx/wgmma.cuh"
#include "device/register_budget.h"
#include "device/ring.cuh"
#include "ops/grouped_gemm/sm90/epilogue.cuh"
#include "ops/grouped_gemm/sm90/tile_scheduler.cuh"
#include "ops/grouped_gemm/sm90/weight_decoder.cuh"
#include "runtime/cuda/launch.h"
#include "runtime/cuda/shared_memory_opt_in.h"
#include "runtime/cuda/tensor_map.h"

namespace narrowfloat {

// The sizes of a tile, and the registers and shared memory of a CTA.
struct TmaTile {
  static constexpr int kTokens = 128;
  static constexpr int kMTile = kTokens;
  static constexpr int kTileBlocks = 3;  // Subtiles of 64 weight rows.
  // CTAs of a cluster multiply neighbouring token tiles with the same weights: what one copies of
  // these from L2 serves both.
  static constexpr int kMulticast = 2;
  static constexpr int kNSplit = 1;
  static constexpr int kStages = 4;
  static constexpr int kConsumers = 2;  // Warpgroups; each has half of the tokens.
  static constexpr int kWarps = kConsumers * 4;
  static constexpr int kCopyWarps = 3;  // The producer has four; the last one finds tiles.
  static constexpr int kThreads = (1 + kConsumers) * 128;
  static constexpr int kProducerRegisters = 40;
  static constexpr int kConsumerRegisters = 232;
  static_assert(fits_registers(kThreads, 1, kProducerRegisters, kConsumerRegisters));

  // The weight rows in two chunks, of which each has half of every subtile: rows 32c to 32c + 31 of
  // the three. A CTA of a cluster copies one chunk for both.
  static constexpr int kChunks = 2;
  static constexpr int kSubtilePart = kSubtileRows / kChunks;
  static constexpr int kSubtileSums =
      kSubtilePart / 2;  // Each thread's, for a subtile and a chunk.
  static constexpr int kWeightBytes = kTileBlocks * kSubtileRows * kKTileRowBytes;
  static constexpr int kRowBytes = kTokens * kKTileRowBytes;
  static constexpr int kSubtilePartBytes = kSubtilePart * kKTileRowBytes;

  // Results of a warp on their way to memory: a box of 16 tokens x 128 bytes for each subtile.
  static constexpr int kWarpTokens = 16;
  static constexpr int kBoxBytes = kWarpTokens * 128;
};

// How results of whole groups of 16 tokens leave shared memory.
enum class TmaStore : uint8_t {
  kRows,      // The warp copies them, as it does those of fewer tokens.
  kBoxes,     // Each subtile as a box.
  kSubtiles,  // All subtiles as one box.
};

struct TmaGemmParams {
  GemmParams gemm;
  TensorMap weights;         // [subtile of any expert][row of 128 bytes in its k tiles][128 bytes]
  TensorMap narrow_weights;  // The same, with boxes of one subtile.
  TensorMap rows;            // [row][bytes], in the 128-byte swizzle.
  TensorMap output;          // Likewise: [row][column], for kSubtiles [subtile][row][column].
  TmaStore store;
  bool has_plain_factors;  // PlainFactors are all there are.
};

struct TmaStorage {
  uint8_t rows[TmaTile::kStages][TmaTile::kRowBytes];
  uint8_t weights[TmaTile::kStages][TmaTile::kWeightBytes];
  uint8_t results[TmaTile::kWarps][TmaTile::kTileBlocks][TmaTile::kBoxBytes];
  float token_scales[TmaTile::kStages][TmaTile::kTokens];
  float weight_scales[TmaTile::kStages][4];
  TokenFactor tokens[TmaTile::kTokens];
  alignas(16) ColumnFactor columns[TmaTile::kConsumers][TmaTile::kTileBlocks * kSubtileRows];
  RingBarriers<TmaTile::kStages> barriers;
  TileQueue queue;
  uint64_t next_tile_wanted;  // A phase for each tile; the producer's warps among themselves.
  PublishedTiles tiles;
};

// With narrow tiles where one subtile is left.
using TmaScheduler = TileSchedulerOf<true>;
using TmaRing = Ring<TmaTile::kStages>;
using TmaPosition = RingPosition<TmaTile::kStages>;

// A thread's sums of 64 tokens and the weight rows of `kSubtiles` subtiles: 4j + 2h + i is token
// 16w + q + 8h and row 8j + 2c + i of the chunks (packed_weights.h).
template <int kSubtiles>
using TmaSums = float[TmaTile::kChunks * kSubtiles * TmaTile::kSubtileSums];

// The producer warpgroup, by warps:
//
//   0      requests weights and rows as boxes, by its first lane; three copy the subtiles' scales
//   1, 2   copy the tokens' scales, a lane those of two
//   3      finds tiles and tells all others, which takes 2500 cycles: while those copy, or the ring
//          would run empty between two tiles
class TmaProducer {
 public:
  __device__ TmaProducer(const TmaGemmParams& params, TmaStorage& shared, const TmaRing& ring)
      : params_(params),
        gemm_(params.gemm),
        shared_(shared),
        ring_(ring),
        thread_(static_cast<int>(threadIdx.x) % 128) {}

  // With tiles_are_complete (gemm_kernel_sm90.cuh), by the first thread of any warpgroup, before
  // previous kernels are done: the first tile's weights, as many stages as the ring has.
  __device__ void request_weights() {
    const TmaScheduler scheduler(gemm_, shared_.queue, TileSizes::of<TmaTile>(1), true);
    if (!scheduler.has_next()) return;
    const OutputTile tile = scheduler.tile();
    if (!tile.has_copies) return;
    for (int k_tile = 0; k_tile < min(gemm_.k_tiles, TmaTile::kStages); ++k_tile) {
      copy_weights(tile, k_tile);
      at_.advance();
    }
  }

  __device__ void run() {
    if (thread_ / 32 == TmaTile::kCopyWarps) {
      find_tiles();
    } else {
      copy_tiles();
    }
  }

 private:
  // A tile is chosen when the one before has so many k tiles left to copy: late, as CTAs that are
  // ahead of others shall take more of them.
  static constexpr int kKTilesAhead = 5;

  __device__ void find_tiles() const {
    const bool is_first_lane = thread_ % 32 == 0;
    TmaScheduler scheduler(gemm_, shared_.queue, TileSizes::of<TmaTile>(1));
    for (; scheduler.has_next(); scheduler.next()) {
      const OutputTile tile = scheduler.tile();
      if (is_first_lane) {
        tiles().publish(scheduler.taken(), tile);
        wait_for_phase(shared_address(&shared_.next_tile_wanted), scheduler.taken() % 2);
        scheduler.choose_next();
      }
    }
    if (is_first_lane) tiles().publish(scheduler.taken(), {.block = kNoTile});
  }

  __device__ void copy_tiles() {
    TileRing list = tiles();
    for (bool is_first = true; list.has_tile(); is_first = false) {
      const OutputTile tile = list.tile();
      list.advance(thread_ % 32);
      if (tile.has_copies) {
        copy_tile(tile, gemm_.tiles_are_complete && is_first);
      } else {
        want_next_tile();
      }
    }
  }
  __device__ void want_next_tile() const {
    if (thread_ == 0) arrive(shared_address(&shared_.next_tile_wanted));
  }
  [[nodiscard]] __device__ TileRing tiles() const { return TileRing(shared_.tiles); }

  // is_requested: the weights of the ring's first stages are on their way.
  __device__ void copy_tile(const OutputTile& tile, bool is_requested) {
    find_scales(tile);
    const int last_k_tiles = max(gemm_.k_tiles - kKTilesAhead, 0);
    for (int k_tile = 0; k_tile < gemm_.k_tiles; ++k_tile) {
      ring_.wait_empty(at_);
      if (k_tile == last_k_tiles) want_next_tile();
      if (thread_ == 0) {
        if (!is_requested || k_tile >= TmaTile::kStages) copy_weights(tile, k_tile);
        copy_rows(tile, k_tile);
      }
      copy_scales();
      arrive_after_copies(ring_.full(at_));
      at_.advance();
    }
  }

  // Called by one thread. Where two CTAs share weights, each copies a chunk for both. Subtiles
  // after an expert's last are those of the next, or zeros; nothing is stored of them.
  __device__ void copy_weights(const OutputTile& tile, int k_tile) const {
    constexpr int kKTileLines = k_tile_stride(WeightEncoding::kFp8) / kKTileRowBytes;
    const uint32_t full = ring_.full(at_);
    const uint32_t chunk_bytes =
        (tile.is_narrow ? 1 : TmaTile::kTileBlocks) * TmaTile::kSubtilePartBytes;
    const uint32_t bytes = TmaTile::kRowBytes + TmaTile::kChunks * chunk_bytes;
    arrive_and_expect(full, tile.num_rows > 0 ? bytes : 0);
    if (tile.num_rows <= 0) return;
    const TensorMap* map = tile.is_narrow ? &params_.narrow_weights : &params_.weights;
    const uint32_t chunks = shared_address(shared_.weights[at_.stage]);
    const int block = tile.expert * gemm_.blocks + tile.block;
    if (tile.is_shared) {
      const int chunk = static_cast<int>(cluster_rank());
      copy_box_to_blocks(chunks + chunk * chunk_bytes, map, 0,
                         k_tile * kKTileLines + chunk * TmaTile::kSubtilePart, block, full,
                         (1U << TmaTile::kMulticast) - 1);
      return;
    }
    for (int chunk = 0; chunk < TmaTile::kChunks; ++chunk) {
      copy_box(chunks + chunk * chunk_bytes, map, 0,
               k_tile * kKTileLines + chunk * TmaTile::kSubtilePart, block, full);
    }
  }

  // Called after copy_weights(), which expects their bytes. Rows after the tile's last are others'.
  __device__ void copy_rows(const OutputTile& tile, int k_tile) const {
    if (tile.num_rows <= 0) return;
    copy_box(shared_address(shared_.rows[at_.stage]), &params_.rows, k_tile * kKTileRowBytes,
             static_cast<int>(tile.first_row), ring_.full(at_));
  }

  [[nodiscard]] __device__ bool copies_token_scales() const { return thread_ >= 32; }
  [[nodiscard]] __device__ int first_token() const { return thread_ - 32; }
  static constexpr int kTokenDistance = 64;  // To the lane's other one.

  __device__ void find_scales(const OutputTile& tile) {
    if (copies_token_scales()) {
      first_scale_ = token_scale(tile, first_token());
      second_scale_ = token_scale(tile, first_token() + kTokenDistance);
      scale_step_ = gemm_.group_stride * static_cast<int64_t>(sizeof(float));
    } else {
      first_scale_ = subtile_scale(tile, thread_);
      scale_step_ = k_tile_stride(WeightEncoding::kFp8);
    }
  }
  // The scale of the first k tile; null where there is none.
  [[nodiscard]] __device__ const uint8_t* token_scale(const OutputTile& tile, int token) const {
    if (token >= tile.num_rows) return nullptr;
    const int64_t row = tile.first_row + token;
    return reinterpret_cast<const uint8_t*>(gemm_.group_scales + row * gemm_.group_row_stride);
  }
  [[nodiscard]] __device__ const uint8_t* subtile_scale(const OutputTile& tile, int subtile) const {
    const int block = tile.block + subtile;
    if (subtile >= TmaTile::kTileBlocks || block >= gemm_.blocks) return nullptr;
    return gemm_.image + tile.expert * gemm_.expert_bytes + block * gemm_.block_bytes +
           k_tile_code_bytes(WeightEncoding::kFp8);
  }

  // Copies scales of the stage's k tile; k tiles come one after the other.
  __device__ void copy_scales() {
    const uint32_t target = copies_token_scales()
                                ? shared_address(&shared_.token_scales[at_.stage][first_token()])
                                : shared_address(&shared_.weight_scales[at_.stage][thread_]);
    copy_scale(target, first_scale_);
    copy_scale(target + kTokenDistance * sizeof(float), second_scale_);
  }
  __device__ void copy_scale(uint32_t target, const uint8_t*& scale) const {
    if (scale == nullptr) return;
    copy_4(target, scale, 4);
    scale += scale_step_;
  }

  const TmaGemmParams& params_;
  const GemmParams& gemm_;
  TmaStorage& shared_;
  const TmaRing& ring_;
  int thread_;
  TmaPosition at_;
  // The scales that the thread copies next.
  const uint8_t* first_scale_ = nullptr;
  const uint8_t* second_scale_ = nullptr;
  int64_t scale_step_ = 0;
};

// The main loop of a consumer warpgroup, which has 64 tokens and all weight rows of a stage. Tokens
// are wgmma's 64 rows, so that a thread has sums of two tokens, whose factors are two registers. An
// instruction has all weight rows: the tokens are read once for them.
//
// Sums start again with every k tile, 128 k, and are added to fp32 registers, times the factors of
// token and weights. While a warpgroup adds its set, the other one's instructions keep the tensor
// cores busy.
class TmaLoop {
 public:
  __device__ TmaLoop(int k_tiles, TmaStorage& shared, const TmaRing& ring)
      : k_tiles_(k_tiles),
        shared_(shared),
        ring_(ring),
        // A shuffle tells the compiler that it is the same in all lanes.
        warpgroup_(__shfl_sync(0xFFFFFFFFU, static_cast<int>(threadIdx.x) / 128 - 1, 0)),
        thread_(static_cast<int>(threadIdx.x) % 128) {}

  template <int kSubtiles>
  __device__ void multiply(TmaSums<kSubtiles>& sums) {
#pragma unroll
    for (float& sum : sums) sum = 0;
#pragma unroll 1
    for (int k_tile = 0; k_tile < k_tiles_; ++k_tile) {
      ring_.wait_full(at_);
      const auto scales = load_scales<kSubtiles>();
      TmaSums<kSubtiles> k_tile_sums;
      issue(k_tile_sums);
      wgmma_wait();
      release();
      promote<kSubtiles>(k_tile_sums, scales, sums);
    }
  }

  // Passes over the stages of a tile whose copies the others need.
  __device__ void pass() {
#pragma unroll 1
    for (int k_tile = 0; k_tile < k_tiles_; ++k_tile) {
      ring_.wait_full(at_);
      release();
    }
  }

 private:
  // The scales of a stage: those of a thread's two tokens, and of the subtiles.
  template <int kSubtiles>
  struct Scales {
    float tokens[2];
    float weights[kSubtiles];
  };

  static constexpr uint32_t kRows = offsetof(TmaStorage, rows);
  static constexpr uint32_t kWeights = offsetof(TmaStorage, weights);
  static constexpr uint32_t kTokenScales = offsetof(TmaStorage, token_scales);
  static constexpr uint32_t kWeightScales = offsetof(TmaStorage, weight_scales);

  // The address of the stage's part of a member that begins at `offset`. All are made from one
  // address: the compiler would compute each member's again for every k tile, which takes 60
  // cycles.
  [[nodiscard]] __device__ uint32_t stage_of(uint32_t offset, uint32_t bytes) const {
    return shared_address(&shared_) + offset + static_cast<uint32_t>(at_.stage) * bytes;
  }

  template <int kSums>
  __device__ void issue(float (&k_tile_sums)[kSums]) const {
    const uint32_t first_token = stage_of(kRows, TmaTile::kRowBytes) + warpgroup_ * 64 * 128;
    const uint64_t tokens = swizzled_descriptor(first_token);
    const uint64_t weights = swizzled_descriptor(stage_of(kWeights, TmaTile::kWeightBytes));
    wgmma_fence();
    multiply_k_tile(k_tile_sums, tokens, weights);
    wgmma_commit();
  }

  // Called before the first wgmma: a load among them would hold up the last of them.
  template <int kSubtiles>
  __device__ Scales<kSubtiles> load_scales() const {
    Scales<kSubtiles> scales;
    const uint32_t tokens =
        stage_of(kTokenScales, sizeof(TmaStorage::token_scales[0])) +
        static_cast<uint32_t>(warpgroup_ * 256 + thread_ / 32 * 64 + thread_ % 32 / 4 * 4);
    const uint32_t weights = stage_of(kWeightScales, sizeof(TmaStorage::weight_scales[0]));
#pragma unroll
    for (int subtile = 0; subtile < kSubtiles; ++subtile) {
      scales.weights[subtile] = bits_float(load_shared(weights + subtile * 4));
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) scales.tokens[i] = bits_float(load_shared(tokens + i * 32));
    return scales;
  }

  template <int kSubtiles>
  __device__ static void promote(const TmaSums<kSubtiles>& k_tile_sums,
                                 const Scales<kSubtiles>& scales, TmaSums<kSubtiles>& sums) {
    constexpr int kChunkSums = kSubtiles * TmaTile::kSubtileSums;
    float factors[2][kSubtiles];
#pragma unroll
    for (int i = 0; i < 2 * kSubtiles; ++i) {
      factors[i % 2][i / 2] = __fmul_rn(scales.tokens[i % 2], scales.weights[i / 2]);
    }
#pragma unroll
    for (int i = 0; i < TmaTile::kChunks * kChunkSums; ++i) {
      const int subtile = i % kChunkSums / TmaTile::kSubtileSums;
      sums[i] = __fmaf_rn(factors[i / 2 % 2][subtile], k_tile_sums[i], sums[i]);
    }
  }

  // The other CTA's producer writes here, too.
  __device__ void release() {
    __syncwarp();
    if (thread_ % 32 < TmaTile::kMulticast) arrive_in_block(ring_.empty(at_), thread_ % 32);
    at_.advance();
  }

  int k_tiles_;
  TmaStorage& shared_;
  const TmaRing& ring_;
  int warpgroup_;
  int thread_;
  TmaPosition at_;
};

// The epilogue. A warp has all columns of 16 tokens. They go to shared memory as a box of 16 rows
// of 128 bytes for each subtile, in the 128-byte swizzle, and from there to the output as boxes,
// while the next tile is multiplied.
//
//   bf16   boxes of 64 columns, once
//   fp32   boxes of a chunk's 32 columns, then of the other's
//
// All subtiles' boxes are one where they lie side by side. Where a warp has fewer tokens, u or g is
// padded, or both are interleaved in the output, the warp itself copies what there is, 16 bytes or
// a column at a time (TmaStore).

// Whether a call has no bias, slot weights, scales of rows, or scales that differ within a subtile.
inline bool has_plain_factors(const GemmParams& params) {
  const bool has_tokens = params.epilogue.slot_weights != nullptr || params.row_scale != nullptr;
  const bool has_columns =
      params.epilogue.bias != nullptr || (params.has_gate && !params.image_rows.is_paired);
  return !has_tokens && !has_columns;
}

// Factors that all tokens of a tile share, and all columns of a subtile: has_plain_factors().
template <int kSubtiles>
struct PlainFactors {
  float scales[kSubtiles];

  __device__ PlainFactors(const GemmParams& params, const OutputTile& tile) {
    const ColumnFactors columns(params, tile.expert);
#pragma unroll
    for (int subtile = 0; subtile < kSubtiles; ++subtile) {
      scales[subtile] = columns.scale(params.has_gate && (tile.block + subtile) % 2 == 1);
    }
  }
  // of[i]: the sum of the i-th of four neighbouring columns of a subtile.
  __device__ float4 finish(int /*half*/, int subtile, int /*row*/, const float (&of)[4]) const {
    const float scale = scales[subtile];
    return {mul_rn(scale, of[0]), mul_rn(scale, of[1]), mul_rn(scale, of[2]), mul_rn(scale, of[3])};
  }
};

// Factors of two tokens of a thread, and of columns in shared memory, from the thread's first one.
struct LoadedFactors {
  TokenFactor tokens[2];
  const ColumnFactor* columns;

  __device__ float4 finish(int half, int subtile, int row, const float (&of)[4]) const {
    const ColumnFactor* four = columns + subtile * kSubtileRows + row;
    return {finished(of[0], tokens[half], four[0]), finished(of[1], tokens[half], four[1]),
            finished(of[2], tokens[half], four[2]), finished(of[3], tokens[half], four[3])};
  }
};

// Stores one output tile of `kSubtiles` subtiles; a consumer warpgroup has 64 of its tokens.
template <int kSubtiles>
class TmaEpilogue {
 public:
  using Sums = TmaSums<kSubtiles>;

  __device__ TmaEpilogue(const TmaGemmParams& params, TmaStorage& shared, const OutputTile& tile)
      : params_(params), gemm_(params.gemm), shared_(shared), tile_(tile) {}

  // Before the main loop, for those that are not plain.
  __device__ void load_factors() const {
    if (params_.has_plain_factors) return;
    const int thread = static_cast<int>(threadIdx.x) % 128;
    const int consumer = static_cast<int>(threadIdx.x) / 128 - 1;
    const int token = consumer * 64 + thread;
    if (thread < 64 && token < tile_.num_rows) {
      shared_.tokens[token] = load_factor(gemm_, tile_.first_row + token);
    }
    for (int block = 0; block < kSubtiles; block += 2) {
      if (thread >= (kSubtiles - block) * kSubtileRows) break;
      load_column_factors(gemm_, tile_, tile_.block + block, thread,
                          shared_.columns[consumer] + block * kSubtileRows);
    }
  }

  __device__ void finish(const Sums& sums) const {
    const Place place(shared_, tile_);
    if (params_.has_plain_factors) return stage(place, Plain(gemm_, tile_), sums);
    const int consumer = place.warp / 4;
    sync_threads(1 + consumer, 128);
    const TokenFactor* tokens = shared_.tokens + place.token(place.lane / 4);
    const LoadedFactors factors{{tokens[0], tokens[8]},
                                shared_.columns[consumer] + place.lane % 4 * 4};
    stage(place, factors, sums);
    // The next tile's factors come to the same place.
    sync_threads(1 + consumer, 128);
  }

 private:
  using Plain = PlainFactors<kSubtiles>;
  static constexpr int kBoxChunks = TmaTile::kWarpTokens * 8;  // A chunk has 16 bytes.

  // It says where a warp's results go, which is computed after the main loop. The tile lies in
  // shared memory: all of it that is needed is loaded at once, before the results are made.
  struct Place {
    int warp;  // Counted among the consumers' warps.
    int lane;
    uint32_t results;
    int block;
    int first_row;  // The first of the warp's 16 in the output.
    int num_rows;   // The tile has so many from there on; may be negative.

    __device__ Place(const TmaStorage& shared, const OutputTile& tile)
        : warp(static_cast<int>(keep_in_register(threadIdx.x)) / 32 - 4),
          lane(static_cast<int>(keep_in_register(threadIdx.x)) % 32),
          results(shared_address(shared.results[warp])),
          block(tile.block),
          first_row(static_cast<int>(tile.first_row) + token(0)),
          num_rows(tile.num_rows - token(0)) {}
    // The tile's token for one of the warp's 16 rows.
    [[nodiscard]] __device__ int token(int row) const { return warp * TmaTile::kWarpTokens + row; }
  };

  template <class Factors>
  __device__ void stage(const Place& place, const Factors& factors, const Sums& sums) const {
    begin_stage();
    if (gemm_.output_is_bf16) {
      stage_chunk<uint16_t, 0>(place, factors, sums);
      stage_chunk<uint16_t, 1>(place, factors, sums);
      store_boxes<uint16_t>(place, 0);
    } else {
      stage_chunk<float, 0>(place, factors, sums);
      store_boxes<float>(place, 0);
      begin_stage();
      stage_chunk<float, 1>(place, factors, sums);
      store_boxes<float>(place, TmaTile::kSubtilePart);
    }
  }
  __device__ static void begin_stage() {
    wait_for_boxes_read();
    __syncwarp();
  }

  // The subtiles' order of rows makes 16g + 4c to 16g + 4c + 3 of sums 8g + 2h + {0, 4, 1, 5}.
  template <class Element, int kChunk, class Factors>
  __device__ static void stage_chunk(const Place& place, const Factors& factors, const Sums& sums) {
    constexpr bool kIsBf16 = sizeof(Element) == 2;
    const int row = place.lane / 4;
    const int own = kIsBf16 ? place.lane % 4 / 2 : place.lane % 4;  // Its 16 bytes of a group.
    const uint32_t first =
        place.results + static_cast<uint32_t>(row * 128 + (kIsBf16 ? place.lane % 2 * 8 : 0));
    const auto swizzled = static_cast<uint32_t>(own ^ row);
#pragma unroll
    for (int i = 0; i < 4 * kSubtiles; ++i) {
      const int group = i / 2;  // A group has 16 columns; two are of a subtile.
      const int half = i % 2;
      const int subtile_row = kChunk * TmaTile::kSubtilePart + group % 2 * 16;
      const float* four =
          sums + (kChunk * kSubtiles * TmaTile::kSubtileSums + 8 * group + 2 * half);
      const float4 values =
          factors.finish(half, group / 2, subtile_row, {four[0], four[4], four[1], four[5]});
      constexpr uint32_t kGroupChunks = kIsBf16 ? 2 : 4;
      const uint32_t chunk = (kIsBf16 ? kChunk * 4U : 0U) + group % 2 * kGroupChunks;
      const uint32_t target =
          first + group / 2 * TmaTile::kBoxBytes + half * 8 * 128 + (chunk ^ swizzled) * 16;
      if constexpr (kIsBf16) {
        store_shared_8(target, to_bf16x2(values.x, values.y), to_bf16x2(values.z, values.w));
      } else {
        store_shared_16(target, {canonical_bits(values.x), canonical_bits(values.y),
                                 canonical_bits(values.z), canonical_bits(values.w)});
      }
    }
  }
  __device__ static uint32_t canonical_bits(float value) {
    return float_bits(canonical_nan(value));
  }

  // Boxes that begin with column `first` of their subtiles.
  template <class Element>
  __device__ void store_boxes(const Place& place, int first) const {
    fence_async_proxy();
    __syncwarp();
    // Boxes leave out columns after the output's last, but not tokens after the tile's last.
    const bool is_whole = place.num_rows >= TmaTile::kWarpTokens;
    if (!is_whole || params_.store == TmaStore::kRows) {
      return store_rows<Element>(place, first);
    }
    if (params_.store == TmaStore::kSubtiles) {
      if (place.lane == 0) {
        store_box(&params_.output, first, place.first_row, place.block, place.results);
      }
    } else if (const int block = place.block + place.lane;
               place.lane < kSubtiles && block < gemm_.blocks) {
      store_box(&params_.output, static_cast<int>(gemm_.image_rows.source(block, first)),
                place.first_row, place.results + place.lane * TmaTile::kBoxBytes);
    }
    commit_boxes();
  }

  [[nodiscard]] __device__ bool is_interleaved() const {
    return gemm_.image_rows.are_interleaved();
  }

  template <class Element>
  __device__ void store_rows(const Place& place, int first) const {
    constexpr int kCols = 16 / sizeof(Element);
#pragma unroll 1
    for (int i = place.lane; i < kSubtiles * kBoxChunks; i += 32) {
      const int subtile = i / kBoxChunks;
      const int row = i % kBoxChunks / 8;
      if (row >= place.num_rows) continue;
      const uint4 values =
          load_shared_16(place.results + static_cast<uint32_t>(subtile * TmaTile::kBoxBytes +
                                                               row * 128 + (i ^ row) % 8 * 16));
      Element* output =
          static_cast<Element*>(gemm_.output) + (int64_t{place.first_row} + row) * gemm_.rows;
      store_columns<Element>(place.block + subtile, first + i % 8 * kCols, values, output);
    }
  }

  // Stores 16 bytes of a token's columns, from row `row` of a subtile on. Rows come in multiples
  // of 16.
  template <class Element>
  __device__ void store_columns(int block, int row, const uint4& values, Element* output) const {
    const int64_t column = gemm_.image_rows.source(block, row);
    if (column >= gemm_.rows) return;
    if (!is_interleaved()) return store(output + column, values);
    const uint32_t words[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
    for (int i = 0; i < static_cast<int>(16 / sizeof(Element)); ++i) {
      if constexpr (sizeof(Element) == 2) {
        output[column + 2 * i] = static_cast<uint16_t>(words[i / 2] >> i % 2 * 16);
      } else {
        output[column + 2 * i] = bits_float(words[i]);
      }
    }
  }

  const TmaGemmParams& params_;
  const GemmParams& gemm_;
  TmaStorage& shared_;
  const OutputTile& tile_;
};

namespace {

__device__ void sync_cluster() {
  arrive_at_cluster();
  wait_for_cluster();
}

__device__ void init_barriers(TmaStorage& shared, const TmaRing& ring) {
  init_barrier(shared_address(&shared.next_tile_wanted), 1);
  ring.init(TmaTile::kCopyWarps * 32 + 1, TmaTile::kMulticast * TmaTile::kWarps);
  // A warp takes tiles from the list, and tells the others.
  TileScheduler::init(shared.queue, TmaTile::kMulticast);
  TileRing::init(shared.tiles, TmaTile::kCopyWarps + TmaTile::kWarps);
}

template <int kSubtiles>
__device__ void multiply_tile(const TmaGemmParams& params, TmaStorage& shared,
                              const OutputTile& tile, TmaLoop& loop) {
  const TmaEpilogue<kSubtiles> epilogue(params, shared, tile);
  epilogue.load_factors();
  TmaSums<kSubtiles> sums;
  loop.multiply<kSubtiles>(sums);
  epilogue.finish(sums);
}

__device__ void consume_tile(const TmaGemmParams& params, TmaStorage& shared,
                             const OutputTile& tile, TmaLoop& loop) {
  const int first_token = static_cast<int>(threadIdx.x) / 128 * 64 - 64;
  if (tile.num_rows <= first_token) {
    if (tile.has_copies) loop.pass();
  } else if (tile.is_narrow) {
    multiply_tile<1>(params, shared, tile, loop);
  } else {
    multiply_tile<TmaTile::kTileBlocks>(params, shared, tile, loop);
  }
}

__device__ void consume(const TmaGemmParams& params, TmaStorage& shared, const TmaRing& ring) {
  TmaLoop loop(params.gemm.k_tiles, shared, ring);
  TileRing tiles(shared.tiles);
  for (; tiles.has_tile(); tiles.advance(static_cast<int>(threadIdx.x) % 32)) {
    consume_tile(params, shared, tiles.tile(), loop);
  }
  wait_for_boxes_read();
}

__global__ void __launch_bounds__(TmaTile::kThreads, 1)
    multiply_groups_tma_kernel(const __grid_constant__ TmaGemmParams params) {
  // Compiles to nothing elsewhere, where supports() refuses to run.
  if constexpr (kHasWgmma) {
    NF_DYNAMIC_SHARED(uint8_t, shared_bytes, 1024);
    auto& shared = *reinterpret_cast<TmaStorage*>(shared_bytes);
    const TmaRing ring(shared.barriers);
    if (threadIdx.x == 0) init_barriers(shared, ring);
    sync_cluster();
    // Requested by a consumer thread, which is idle here.
    if (params.gemm.tiles_are_complete && threadIdx.x == 128) {
      TmaProducer(params, shared, ring).request_weights();
    }
    wait_for_previous_grids();
    if (threadIdx.x < 128) {
      give_registers<TmaTile::kProducerRegisters>();
      TmaProducer(params, shared, ring).run();
      trigger_dependent_launch();
    } else {
      take_registers<TmaTile::kConsumerRegisters>();
      consume(params, shared, ring);
    }
    // The other CTA may still write here, or arrive at barriers.
    sync_cluster();
  }
}

// All experts' k tiles as lines of 128 bytes.
TensorMap weight_map(const GemmParams& gemm, int subtiles) {
  constexpr int kLines = k_tile_stride(WeightEncoding::kFp8) / kKTileRowBytes;
  return make_tensor_map({.data = gemm.image,
                          .dimensions = 3,
                          .extents = {kKTileRowBytes, int64_t{gemm.k_tiles} * kLines,
                                      int64_t{gemm.experts} * gemm.blocks},
                          .strides = {kKTileRowBytes, gemm.block_bytes},
                          .box = {kKTileRowBytes, TmaTile::kSubtilePart, subtiles}});
}

// Subtiles of u and of g lie apart; interleaved or padded ones are no boxes. One box of
// several subtiles does not end where the last one has fewer columns.
TmaStore store_of(const GemmParams& gemm) {
  const ImageRows& image = gemm.image_rows;
  if (!image.is_paired) {
    return gemm.rows % kSubtileRows == 0 ? TmaStore::kSubtiles : TmaStore::kBoxes;
  }
  const bool has_boxes = !image.are_interleaved() && image.rows % (2 * kSubtileRows) == 0;
  return has_boxes ? TmaStore::kBoxes : TmaStore::kRows;
}

TensorMap output_map(const GemmParams& gemm, int element_bytes) {
  const int box_cols = 128 / element_bytes;
  const int64_t row_bytes = int64_t{gemm.rows} * element_bytes;
  if (store_of(gemm) != TmaStore::kSubtiles) {
    return make_tensor_map({.data = gemm.output,
                            .element_bytes = element_bytes,
                            .extents = {gemm.rows, gemm.row_limit, 1},
                            .strides = {row_bytes, 0},
                            .box = {box_cols, TmaTile::kWarpTokens, 1},
                            .is_swizzled = true});
  }
  // Subtiles lie side by side, so that a step of the last dimension is shorter than one of the
  // rows.
  return make_tensor_map({.data = gemm.output,
                          .element_bytes = element_bytes,
                          .dimensions = 3,
                          .extents = {kSubtileRows, gemm.row_limit, gemm.blocks},
                          .strides = {row_bytes, int64_t{kSubtileRows} * element_bytes},
                          .box = {box_cols, TmaTile::kWarpTokens, TmaTile::kTileBlocks},
                          .is_swizzled = true});
}

TmaGemmParams params_of(const GemmParams& gemm) {
  return {.gemm = gemm,
          .weights = weight_map(gemm, TmaTile::kTileBlocks),
          .narrow_weights = weight_map(gemm, 1),
          .rows = make_row_boxes(gemm, TmaTile::kTokens),
          .output = output_map(gemm, gemm.output_is_bf16 ? 2 : 4),
          .store = store_of(gemm),
          .has_plain_factors = has_plain_factors(gemm)};
}

}  // namespace

bool takes_tma_kernel(const GemmParams& gemm) {
  constexpr int64_t kMost = int64_t{1} << 31;
  const int64_t blocks = int64_t{gemm.experts} * gemm.blocks;
  return gemm.row_to_token == nullptr && !gemm.activation.is_there && gemm.row_limit > 0 &&
         gemm.input_rows < kMost && blocks > 0 && blocks < kMost;
}

void launch_gemm_fp8_tma(const GemmParams& gemm, const GemmLaunch& shape, Stream stream) {
  constexpr auto* kKernel = multiply_groups_tma_kernel;
  static SharedMemoryOptIn opt_in;
  opt_in.allow(reinterpret_cast<const void*>(kKernel), sizeof(TmaStorage), shape.device);
  const int64_t pieces = int64_t{gemm.max_tiles} * gemm.splits;
  const int64_t most =
      ceil_div(pieces, int64_t{TmaTile::kMulticast}) * ceil_div(gemm.blocks, TmaTile::kTileBlocks);
  const int64_t resident = std::max(1, shape.num_sms / TmaTile::kMulticast);
  const auto blocks = static_cast<unsigned>(std::min(most, resident) * TmaTile::kMulticast);
  launch(kKernel, {dim3(blocks), dim3(TmaTile::kThreads), sizeof(TmaStorage), TmaTile::kMulticast},
         stream, params_of(gemm));
}

}  // namespace narrowfloat
