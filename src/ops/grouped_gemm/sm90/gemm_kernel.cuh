// The grouped GEMM of Hopper: out[token, n] = epilogue(sum over k of x[token, k] * w[n, k]), as
// D^T = W * X^T. Weight rows are wgmma's M, tokens its N, so that few tokens waste nothing, and the
// weights are decoded in registers to bf16 or E4M3, the A operand: exactly, but for NVFP4 beside
// FP8 rows where the mode rounds it to E4M3 (moe spec 11.3). Weights that are E4M3 as they are
// change places with the tokens in tiles of 64 and more.
//
//   block   producer warpgroup | consumer warpgroup 0: 64 or 128 weight rows | warpgroup 1: as many
//   stage   kUnits units of 64 or 128 columns: their weights by bulk copies, the activation rows by
//           16-byte copies that gather rows and swizzle, zeros for absent columns
//   team    two blocks of a cluster that share E4M3 weights of two long token tiles: each copies
//           half of the weights to both; or, a row team, that take half of an item's weight rows
//           each, and make halves of groups of 128 columns of the second GEMM's rows
//   work    (128 or 256 weight rows) x (token tile), persistent blocks over all of them; both sides
//           take the same ones (work_list.cuh), or the producer tells the consumers (item_ring.cuh)
//
// A consumer multiplies a unit while it decodes the next one (register_loop.cuh); E4M3 weights need
// no decoding (panel_loop.cuh for few tokens, token_loop.cuh, tail_loop.cuh for a tile and a tail).
// Where activations have a scale every 128 columns, sums start anew there and are added in fp32
// registers, times that scale and the weights' own of 128 x 128. docs/kernels/grouped_gemm_sm90.md
// has the arithmetic and figures.
#pragma once

#include <cuda_runtime.h>

#include "base/int_math.h"
#include "device/ptx/grid_dependency.cuh"
#include "ops/grouped_gemm/sm90/fragments.cuh"
#include "ops/grouped_gemm/sm90/gemm_consumer.cuh"
#include "ops/grouped_gemm/sm90/gemm_producer.cuh"
#include "ops/grouped_gemm/sm90/tail_consumer.cuh"
#include "runtime/cuda/launch.h"
#include "runtime/cuda/shared_memory_opt_in.h"

namespace narrowfloat {

// All threads of a block, or of the blocks of a team of either kind.
template <class Shape>
__device__ void sync_team() {
  if constexpr (Shape::kTeamBlocks > 1) {
    arrive_at_cluster();
    wait_for_cluster();
  } else {
    __syncthreads();
  }
}

template <class Shape>
using ConsumerOf = std::conditional_t<Shape::kHasTails, TailConsumer<Shape>, Consumer<Shape>>;

// By one thread, before a barrier of all that take part.
template <class Shape>
__device__ void init_barriers(GemmStorage<Shape>& shared, const Ring<Shape::kStages>& ring) {
  // Arrivals of the producer's threads, of the weights, and of boxes of rows.
  constexpr int kBoxArrivals = Shape::kBoxRows > 0 ? 1 : 0;
  ring.init(kWarpgroup + 1 + kBoxArrivals, Shape::kTeam * kConsumers * kWarpgroup / 32);
  if constexpr (Shape::kHasItemRing) {
    // The producer takes items from the list, and tells consumers.
    WorkList::init(shared.queue, kWarpgroup / 32);
    ItemRing::init(shared.found.items, kConsumers * kWarpgroup / 32);
  } else {
    WorkList::init(shared.queue, Shape::kTeam * kGemmThreads / 32);
  }
  if constexpr (Shape::kRowTeam > 1) shared.team_maxima.init();
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
    sync_team<Shape>();
    // By a consumer: it has nothing to do yet, and registers.
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
    // Blocks without an item have not waited yet, and none ends before it has.
    if (is_early<Shape>(params)) wait_for_previous_grids();
    // The other block may still write here, or arrive at barriers; not of a row team
    // (team_maxima.cuh).
    if constexpr (Shape::kTeam > 1) sync_team<Shape>();
  }
}

// Shared memory of blocks of small tiles of which there are no more than multiprocessors: two of
// them do not fit one, so each has its own, but one fits beside a block of another GEMM that has
// more blocks. Two would be on some multiprocessors otherwise: blocks start as places fall free,
// while others wait.
inline constexpr size_t kLoneBytes = 114 * 1024;

// An upper bound: of how many tiles there are rows, the device knows.
template <class Shape>
int64_t most_items(const GemmParams& params) {
  const int item_blocks = passes_of<Shape>(params) * Shape::kRowTeam * Shape::kTileBlocks;
  const int64_t pieces = int64_t{params.max_tiles} * params.splits;
  return ceil_div(pieces, int64_t{Shape::kTeam}) * ceil_div(params.blocks, item_blocks);
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
  constexpr int kTeam = Shape::kTeamBlocks;
  const int64_t resident = int64_t{shape.num_sms} * Shape::kBlocksPerSm / kTeam;
  const int64_t items = most_items<Shape>(params);
  const int64_t teams =
      Shape::kRowTeam > 1 ? items : std::min(items, std::max<int64_t>(1, resident));
  const int64_t blocks = teams * kTeam;
  const size_t bytes = blocks <= shape.num_sms ? kMostBytes : kBytes;
  launch(kKernel, {dim3(static_cast<unsigned>(blocks)), dim3(kGemmThreads), bytes, kTeam}, stream,
         params_of<Shape>(params));
}

// Groups of 128 columns of so few items that each has a team: twice as many multiprocessors work,
// or two blocks on each instead of one. Where weights are decoded it pays for half as many items
// more, whose teams start where others have ended (docs/kernels/grouped_gemm_sm90.md).
template <class Team>
bool takes_row_teams(const GemmParams& params, const GemmLaunch& shape) {
  const int most = Team::kIsPanel ? shape.num_sms : shape.num_sms * 3 / 2;
  return makes_groups(params) && most_items<Team>(params) <= most;
}

template <class Weights, bool kHasGroups>
void launch_gemm(const GemmParams& params, const GemmLaunch& shape, Stream stream) {
  const auto launch_tokens = [&]<int kTokens>() {
    launch_multiply_groups<GemmShapeOf<Weights, kHasGroups, kTokens>>(params, shape, stream);
  };
  if constexpr (kHasGroups) {
    using Team = GemmShapeOf<Weights, true, 8, true>;
    if (shape.tokens == 8 && takes_row_teams<Team>(params, shape)) {
      return launch_multiply_groups<Team>(params, shape, stream);
    }
  }
  if (shape.tokens == 8) return launch_tokens.template operator()<8>();
  if (shape.tokens == 16) return launch_tokens.template operator()<16>();
  if (shape.tokens == 32) return launch_tokens.template operator()<32>();
  if (shape.tokens == 64) return launch_tokens.template operator()<64>();
  launch_tokens.template operator()<most_tokens<Weights>()>();
}

}  // namespace narrowfloat
