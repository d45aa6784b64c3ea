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
// The file in its order: consumer, kernel, launch. A kernel has the producer of
// gemm_producer_sm90.cuh, one of the main loops
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
#include "device/ptx/grid_dependency.cuh"
#include "ops/grouped_gemm/sm90/epilogue_activation.cuh"
#include "ops/grouped_gemm/sm90/gemm_decode_sm90.cuh"
#include "ops/grouped_gemm/sm90/gemm_fp8_sm90.cuh"
#include "ops/grouped_gemm/sm90/gemm_prefill_sm90.cuh"
#include "ops/grouped_gemm/sm90/gemm_producer_sm90.cuh"
#include "ops/grouped_gemm/sm90/tile_scheduler.cuh"
#include "ops/grouped_gemm/sm90/weight_decoder.cuh"
#include "runtime/cuda/launch.h"
#include "runtime/cuda/shared_memory_opt_in.h"

namespace narrowfloat {

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

  __device__ void request_columns(const OutputTile& tile, int pass) const {
    const int consumer = consumer_thread();
    const int thread = consumer % kWarpgroup;
    if (thread >= Shape::kBlocks * kSubtileRows) return;
    const int block = pass * Shape::kTileBlocks + consumer / kWarpgroup * Shape::kBlocks;
    shared_.shared_columns[consumer / kWarpgroup].request(params_, tile.expert, tile.block + block,
                                                          thread);
  }

  // Reads the tile again after the main loop, which needs the registers that it would be kept in.
  __device__ void run_published(const TileRing& tiles) {
    static_assert(Shape::kGroupPasses == 1);
    const int consumer = consumer_thread();
    load_factors<Shape::kTokens>(params_, tiles.tile(), consumer % kWarpgroup,
                                 shared_.factors[consumer / kWarpgroup]);
    if constexpr (Shape::kSharesColumns) request_columns(tiles.tile(), 0);
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
      if constexpr (Shape::kSharesColumns) request_columns(tile, pass);
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
__global__ void __launch_bounds__(kGemmThreads, Shape::kConfig.ctas_per_sm)
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
      give_registers<Shape::kConfig.producer_registers>();
      Producer<Shape>(params, shared, ring).run();
      if constexpr (!Shape::kIsSmall) trigger_dependent_launch();
    } else {
      take_registers<Shape::kConfig.consumer_registers>();
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
  const int64_t resident = int64_t{shape.num_sms} * Shape::kConfig.ctas_per_sm / kCtas;
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
  launch_tokens.template operator()<config_of(kind_of<Weights>(kHasGroups), 128).tokens>();
}

}  // namespace narrowfloat
