// The TMA kernel: the GEMM of FP8 weights for tiles of 128 tokens whose rows lie one after the
// other, as those of a layer's second GEMM do and those of a caller who has permuted them. Its
// results are those of gemm_kernel_sm90.cuh to the bit. Rows, weights and results are boxes of
// tensor maps, which one thread requests and which need no fence.
//
//   CTA       producer warpgroup | consumer warpgroup 0: tokens 0 to 63 | warpgroup 1: 64 to 127
//   stage     128 k of 128 tokens (16 KB) and of 192 weight rows (24 KB)
//   scales    of both, for four stages at a time: a token's are 16 bytes then
//   cluster   two CTAs with neighbouring token tiles; each copies half of the weights to both
//   tile      (192 weight rows) x (128 tokens), persistent CTAs over all of them
//             (tile_scheduler.cuh); the last 64 weight rows of an expert, where they are alone, are
//             a narrow tile of their own
//
// The file in its order: producer, main loop, kernel, launch. tma_tile.cuh has sizes and shared
// memory, tma_epilogue.cuh the epilogue.
#include <algorithm>
#include <cstdint>
#include <cuda_runtime.h>

#include "base/float_ops.h"
#include "base/int_math.h"
#include "device/ptx/async_copy.cuh"
#include "device/ptx/cluster.cuh"
#include "device/ptx/grid_dependency.cuh"
#include "device/ptx/tensor_copy.cuh"
#include "device/ptx/wgmma.cuh"
#include "device/ring.cuh"
#include "ops/grouped_gemm/sm90/tma_epilogue.cuh"
#include "ops/grouped_gemm/sm90/tma_tile.cuh"
#include "ops/grouped_gemm/sm90/weight_decoder.cuh"
#include "runtime/cuda/launch.h"
#include "runtime/cuda/shared_memory_opt_in.h"
#include "runtime/cuda/tensor_map.h"

namespace narrowfloat {

// The producer warpgroup, by warps:
//
//   0   requests weights and rows as boxes, by its first lane
//   1   copies scales
//   2   finds tiles and tells all others, which takes 2500 cycles: while those copy, or the ring
//       would run empty between two tiles
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
    const TmaScheduler scheduler(gemm_, shared_.queue, sizes(), true);
    if (!scheduler.has_next()) return;
    const OutputTile tile = scheduler.tile();
    if (!tile.has_copies) return;
    for (int k_tile = 0; k_tile < min(gemm_.k_tiles, TmaTile::kStages); ++k_tile) {
      copy_weights(tile, k_tile);
      at_.advance();
    }
  }

  __device__ void run() {
    switch (thread_ / 32) {
      case 0:
        return request_boxes();
      case 1:
        return copy_scales();
      case 2:
        return find_tiles();
      default:
        return;
    }
  }

 private:
  // A tile is chosen when the one before has so many k tiles left to copy: late, as CTAs that are
  // ahead of others shall take more of them.
  static constexpr int kKTilesAhead = 5;

  __device__ void find_tiles() const {
    const bool is_first_lane = lane() == 0;
    const TileRing tiles(shared_.tiles);
    TmaScheduler scheduler(gemm_, shared_.queue, sizes());
    for (; scheduler.has_next(); scheduler.next()) {
      const OutputTile tile = scheduler.tile();
      if (is_first_lane) {
        tiles.publish(scheduler.taken(), tile);
        wait_asleep_for_phase(shared_address(&shared_.next_tile_wanted), scheduler.taken() % 2);
        scheduler.choose_next();
      }
      // The others would ask for the next tile all the time.
      __syncwarp();
    }
    if (is_first_lane) tiles.publish(scheduler.taken(), {.block = kNoTile});
  }

  __device__ void request_boxes() {
    TileRing list(shared_.tiles);
    for (bool is_first = true; list.has_tile(); is_first = false) {
      const OutputTile tile = list.tile();
      list.advance(lane());
      if (is_elected_lane()) {
        if (tile.has_copies) {
          request_boxes(tile, gemm_.tiles_are_complete && is_first);
        } else {
          want_next_tile();
        }
      }
      __syncwarp();
    }
  }
  __device__ void want_next_tile() const { arrive(shared_address(&shared_.next_tile_wanted)); }
  [[nodiscard]] __device__ int lane() const { return thread_ % 32; }
  [[nodiscard]] __device__ TileSizes sizes() const {
    TileSizes sizes = TileSizes::of<TmaTile>(1);
    sizes.group = params_.tile_group;
    return sizes;
  }

  // is_requested: the weights of the ring's first stages are on their way.
  __device__ void request_boxes(const OutputTile& tile, bool is_requested) {
    const int last_k_tiles = max(gemm_.k_tiles - kKTilesAhead, 0);
    for (int k_tile = 0; k_tile < num_rounds(gemm_.k_tiles) * TmaTile::kStages; ++k_tile) {
      ring_.wait_empty_asleep(at_);
      if (k_tile == last_k_tiles) want_next_tile();
      if (k_tile < gemm_.k_tiles) {
        if (!is_requested || k_tile >= TmaTile::kStages) copy_weights(tile, k_tile);
        copy_rows(tile, k_tile);
      } else {
        arrive(ring_.full(at_));
      }
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

  __device__ void copy_scales() {
    const ScaleRing ring(shared_.scale_barriers);
    for (TileRing list(shared_.tiles); list.has_tile();) {
      const OutputTile tile = list.tile();
      list.advance(lane());
      if (!tile.has_copies) continue;
      for (int k_tile = 0; k_tile < gemm_.k_tiles; k_tile += TmaTile::kStages) {
        ring.wait_empty_asleep(scales_at_);
        copy_token_scales(tile, k_tile);
        copy_weight_scales(tile, k_tile);
        arrive_after_copies(ring.full(scales_at_));
        scales_at_.advance();
      }
    }
  }

  // Those of the k tiles from `k_tile` on, for each stage one; a lane those of four tokens.
  __device__ void copy_token_scales(const OutputTile& tile, int k_tile) const {
    const float* scales = gemm_.group_scales + (tile.first_row + lane()) * gemm_.group_row_stride +
                          k_tile * gemm_.group_stride;
    const int64_t distance = 32 * gemm_.group_row_stride;
    const uint32_t targets = shared_address(&shared_.scales[scales_at_.stage].tokens[lane()]);
    constexpr uint32_t kTokenBytes = sizeof(TmaScales::tokens[0]);
#pragma unroll
    for (int i = 0; i < TmaTile::kTokens / 32; ++i) {
      if (lane() + 32 * i >= tile.num_rows) continue;
      const uint32_t target = targets + 32 * i * kTokenBytes;
      if (params_.has_whole_scales) {
        copy_16(target, scales + i * distance);
      } else {
#pragma unroll 1
        for (int j = 0; j < min(gemm_.k_tiles - k_tile, TmaTile::kStages); ++j) {
          copy_4(target + 4 * j, scales + i * distance + j * gemm_.group_stride, 4);
        }
      }
    }
  }

  // A lane that of one subtile and k tile.
  __device__ void copy_weight_scales(const OutputTile& tile, int k_tile) const {
    const int subtile = lane() / TmaTile::kStages;
    const int stage = lane() % TmaTile::kStages;
    const int block = tile.block + subtile;
    if (subtile >= TmaTile::kTileBlocks || block >= gemm_.blocks) return;
    if (k_tile + stage >= gemm_.k_tiles) return;
    const uint8_t* k_tiles = gemm_.image + tile.expert * gemm_.expert_bytes +
                             block * gemm_.block_bytes + k_tile_code_bytes(WeightEncoding::kFp8);
    copy_4(shared_address(&shared_.scales[scales_at_.stage].weights[stage][subtile]),
           k_tiles + int64_t{k_tile + stage} * k_tile_stride(WeightEncoding::kFp8), 4);
  }

  const TmaGemmParams& params_;
  const GemmParams& gemm_;
  TmaStorage& shared_;
  const TmaRing& ring_;
  int thread_;
  TmaPosition at_;
  ScalePosition scales_at_;
};

// The main loop of a consumer warpgroup, which has 64 tokens and all weight rows of a stage. Tokens
// are wgmma's 64 rows, so that a thread has sums of two tokens, whose factors are two registers.
//
// Sums start again with every k tile, 128 k, and are added to fp32 registers, times the factors of
// token and weights. They come in two parts, each a group of instructions: while a warpgroup adds
// the first, the tensor cores compute the second; while it adds that, they have the other
// warpgroup's instructions.
//
// The tensor cores may have to wait for what lies between a k tile's last addition and the next
// one's first instruction. So stages are constants, descriptors lie in uniform registers, and
// scales are loaded and the next stage is asked for before the additions.
class TmaLoop {
 public:
  __device__ TmaLoop(const GemmParams& gemm, TmaStorage& shared, const TmaRing& ring)
      : gemm_(gemm),
        shared_(shared),
        ring_(ring),
        scale_ring_(shared.scale_barriers),
        warpgroup_(uniform(static_cast<int>(threadIdx.x) / 128 - 1)),
        thread_(static_cast<int>(threadIdx.x) % 128) {}

  template <int kSubtiles>
  __device__ void multiply(TmaSums<kSubtiles>& sums) {
#pragma unroll
    for (float& sum : sums) sum = 0;
    const Operands first_operands = operands();
    Scales<kSubtiles> scales;
    bool is_full = is_stage_full(0);
#pragma unroll 1
    for (int first = 0; first < gemm_.k_tiles; first += TmaTile::kStages) {
#pragma unroll
      for (int stage = 0; stage < TmaTile::kStages; ++stage) {
        if (!is_full) wait_for_stage(stage);
        if (stage == 0) load_scales(stage, scales);
        Parts<kSubtiles> parts;
        issue<kSubtiles>(parts, first_operands, stage);
        const Factors<kSubtiles> factors(scales);
        const bool is_last = first + stage + 1 >= gemm_.k_tiles;
#pragma unroll
        for (int part = 0; part < kParts<kSubtiles>; ++part) {
          if (part + 1 < kParts<kSubtiles>) {
            wgmma_wait_but_one();
          } else {
            wgmma_wait();
            release(stage);
            // Before they are needed, as a wait for them would hold up the next instructions.
            if (stage + 1 < TmaTile::kStages) load_scales(stage + 1, scales);
            is_full = !is_last && is_stage_full((stage + 1) % TmaTile::kStages);
          }
          promote<kSubtiles>(parts[part], part, factors, sums);
        }
        if (is_last) break;
      }
    }
    if (gemm_.k_tiles % TmaTile::kStages != 0) pass_stages(gemm_.k_tiles % TmaTile::kStages);
  }

  // Passes over the stages of a tile whose copies the others need.
  __device__ void pass() {
    for (int round = 0; round < num_rounds(gemm_.k_tiles); ++round) pass_stages(0);
  }

 private:
  // The same in all lanes, which a shuffle tells the compiler.
  template <class Value>
  __device__ static Value uniform(Value value) {
    return __shfl_sync(kFullWarp, value, 0);
  }

  // The scales of a k tile: those of a thread's two tokens, and of the subtiles.
  template <int kSubtiles>
  struct Scales {
    float tokens[2];
    float weights[kSubtiles];
  };
  // The factors of a k tile's sums.
  template <int kSubtiles>
  struct Factors {
    float of[2][kSubtiles];

    __device__ explicit Factors(const Scales<kSubtiles>& scales) {
#pragma unroll
      for (int i = 0; i < 2 * kSubtiles; ++i) {
        of[i % 2][i / 2] = __fmul_rn(scales.tokens[i % 2], scales.weights[i / 2]);
      }
    }
  };

  template <int kSubtiles>
  __device__ void load_scales(int stage, Scales<kSubtiles>& scales) const {
    const TmaScales& shared = shared_.scales[scales_at_.stage];
    const int token = warpgroup_ * 64 + thread_ / 32 * TmaTile::kWarpTokens + thread_ % 32 / 4;
#pragma unroll
    for (int subtile = 0; subtile < kSubtiles; ++subtile) {
      const uint32_t weights = shared_address(&shared.weights[stage][subtile]);
      scales.weights[subtile] = bits_float(load_shared(weights));
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t tokens = shared_address(&shared.tokens[token + 8 * i][stage]);
      scales.tokens[i] = bits_float(load_shared(tokens));
    }
  }

  // Those of a round from `first` on.
  __device__ void pass_stages(int first) {
#pragma unroll 1
    for (int stage = first; stage < TmaTile::kStages; ++stage) {
      wait_for_stage(stage);
      release(stage);
    }
  }

  [[nodiscard]] __device__ TmaPosition at(int stage) const {
    return {.stage = stage, .parity = parity_};
  }
  // A test, whose answer comes while others run. Scales come with the first stage.
  [[nodiscard]] __device__ bool is_stage_full(int stage) const {
    const bool is_full = try_wait(ring_.full(at(stage)), parity_);
    return stage > 0 ? is_full
                     : is_full && try_wait(scale_ring_.full(scales_at_), scales_at_.parity);
  }
  __device__ void wait_for_stage(int stage) const {
    ring_.wait_full(at(stage));
    if (stage == 0) scale_ring_.wait_full(scales_at_);
  }

  // Sums of a k tile in parts, chunks of the weight rows; one subtile is too few to be divided.
  template <int kSubtiles>
  static constexpr int kParts = kSubtiles > 1 ? TmaTile::kChunks : 1;
  template <int kSubtiles>
  using PartSums = float[sizeof(TmaSums<kSubtiles>) / sizeof(float) / kParts<kSubtiles>];
  template <int kSubtiles>
  using Parts = PartSums<kSubtiles>[kParts<kSubtiles>];

  // The descriptors of stage 0.
  struct Operands {
    uint64_t tokens;
    uint64_t weights;
  };
  [[nodiscard]] __device__ Operands operands() const {
    const uint32_t tokens = shared_address(shared_.rows) + warpgroup_ * 64 * 128;
    return {swizzled_descriptor(uniform(tokens)),
            swizzled_descriptor(uniform(shared_address(shared_.weights)))};
  }

  // Each part is a group of instructions.
  template <int kSubtiles>
  __device__ static void issue(Parts<kSubtiles>& parts, const Operands& first, int stage) {
    constexpr int kPartRows = kSubtiles * kSubtileRows / kParts<kSubtiles>;
    const uint64_t tokens = first.tokens + stage * (TmaTile::kRowBytes / 16);
    const uint64_t weights = first.weights + stage * (TmaTile::kWeightBytes / 16);
    wgmma_fence();
#pragma unroll
    for (int part = 0; part < kParts<kSubtiles>; ++part) {
      multiply_k_tile(parts[part], tokens, weights + part * (kPartRows * kKTileRowBytes / 16));
      wgmma_commit();
    }
  }

  template <int kSubtiles>
  __device__ static void promote(const PartSums<kSubtiles>& part_sums, int part,
                                 const Factors<kSubtiles>& factors, TmaSums<kSubtiles>& sums) {
    constexpr int kChunkSums = kSubtiles * TmaTile::kSubtileSums;
    constexpr int kCount = sizeof(part_sums) / sizeof(float);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int subtile = i % kChunkSums / TmaTile::kSubtileSums;
      float& sum = sums[part * kCount + i];
      sum = __fmaf_rn(factors.of[i / 2 % 2][subtile], part_sums[i], sum);
    }
  }

  // The other CTA's producer writes here, too. With a round's last stage its scales go.
  __device__ void release(int stage) {
    __syncwarp();
    const int lane = thread_ % 32;
    if (lane < TmaTile::kMulticast) arrive_in_block(ring_.empty(at(stage)), lane);
    if (stage + 1 < TmaTile::kStages) return;
    parity_ ^= 1U;
    if (lane == 0) scale_ring_.release(scales_at_);
    scales_at_.advance();
  }

  const GemmParams& gemm_;
  TmaStorage& shared_;
  const TmaRing& ring_;
  ScaleRing scale_ring_;
  int warpgroup_;
  int thread_;
  uint32_t parity_ = 0;
  ScalePosition scales_at_;
};

namespace {

__device__ void sync_cluster() {
  arrive_at_cluster();
  wait_for_cluster();
}

__device__ void init_barriers(TmaStorage& shared, const TmaRing& ring) {
  init_barrier(shared_address(&shared.next_tile_wanted), 1);
  ring.init(1, TmaTile::kMulticast * TmaTile::kWarps);
  ScaleRing(shared.scale_barriers).init(32, TmaTile::kWarps);
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
  TmaLoop loop(params.gemm, shared, ring);
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

// An expert of 16 token tiles or more has several groups of 8, between which its weights leave L2:
// larger groups read them less often. Of smaller experts, a larger group would mix the weights.
int tile_group(const GemmParams& gemm) {
  return int64_t{gemm.max_tiles} * gemm.splits >= int64_t{16} * gemm.experts ? 16 : 8;
}

bool has_whole_scales(const GemmParams& gemm) {
  static_assert(TmaTile::kStages == 4);
  return gemm.group_stride == 1 && gemm.group_row_stride % 4 == 0 &&
         gemm.group_row_stride >= round_up(gemm.k_tiles, TmaTile::kStages) &&
         reinterpret_cast<uintptr_t>(gemm.group_scales) % 16 == 0;
}

TmaGemmParams params_of(const GemmParams& gemm) {
  return {.gemm = gemm,
          .weights = weight_map(gemm, TmaTile::kTileBlocks),
          .narrow_weights = weight_map(gemm, 1),
          .rows = make_row_boxes(gemm, TmaTile::kTokens),
          .output = output_map(gemm, gemm.output_is_bf16 ? 2 : 4),
          .store = store_of(gemm),
          .tile_group = tile_group(gemm),
          .has_plain_factors = has_plain_factors(gemm),
          .has_whole_scales = has_whole_scales(gemm)};
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
