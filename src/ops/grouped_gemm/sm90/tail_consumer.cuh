// A consumer warpgroup of the Hopper GEMM (gemm_kernel.cuh) whose items may have a tail
// (tail_loop.cuh): multiplies tile after tile, and finishes each. As gemm_consumer.cuh, but for
// registers: items come from the producer (item_ring.cuh), and numbers of threads are made anew.
#pragma once

#include "ops/grouped_gemm/sm90/encode_tile.cuh"
#include "ops/grouped_gemm/sm90/finish_tokens.cuh"
#include "ops/grouped_gemm/sm90/item_ring.cuh"
#include "ops/grouped_gemm/sm90/tail_loop.cuh"

namespace narrowfloat {

template <class Shape>
class TailConsumer {
 public:
  using Loop = TailLoop<Shape>;
  using Sums = typename Loop::Sums;

  __device__ TailConsumer(const GemmParams& params, GemmStorage<Shape>& shared,
                          const Ring<Shape::kStages>& ring)
      : params_(params), shared_(shared), loop_(params, shared, ring) {}

  __device__ void run() {
    ItemRing items(shared_.found.items);
    for (; items.has_item(); items.advance(thread() % 32)) {
      if (!items.item().has_copies) continue;
      load_factors<Shape::kTokens>(params_, items.item(), thread(), shared_.factors[warpgroup()]);
      load_column_factors(params_, items.item(), items.item().block + 2 * warpgroup(), thread(),
                          shared_.columns[warpgroup()]);
      Sums sums;
      // From a lane, so that the compiler knows it to be the same in all.
      loop_.multiply(__shfl_sync(kFullWarp, items.item().num_rows, 0), sums);
      finish(items.item(), sums);
    }
  }

 private:
  __device__ void finish(const WorkItem& item, const Sums& sums) const {
    // The factors are there, and later no longer needed.
    sync_threads(1 + warpgroup(), kWarpgroup);
    const int tail = 64 * Loop::blocks_of(item.num_rows);
    TokenOutput output{.first_row = item.first_row,
                       .num_rows = min(item.num_rows, tail),
                       .first_block = item.block + 2 * warpgroup(),
                       .shared_tokens = shared_.factors[warpgroup()],
                       .shared_columns = shared_.columns[warpgroup()]};
    finish_token_blocks(params_, output, sums.tokens);
    if (Loop::has_tail(item.num_rows)) {
      output.first_row += tail;
      output.num_rows = item.num_rows - tail;
      output.shared_tokens += tail;
      store_tail(output, sums.tail);
    }
    sync_threads(1 + warpgroup(), kWarpgroup);
  }

  // The panels' order of rows makes columns 16w + 2q and the next one of a thread's two rows.
  __device__ void store_tail(const TokenOutput& output,
                             const float (&sums)[2][Loop::kTailTokens / 2]) const {
    const int distance = params_.image_rows.are_interleaved() ? 2 : 1;
    const int col = thread() / 32 * 16 + thread() % 32 / 4 * 2;
#pragma unroll
    for (int panel = 0; panel < 2; ++panel) {
      const BlockColumns block(params_.image_rows, output.first_block + panel);
      if (col >= block.rows) continue;
      const ColumnFactor* two = output.shared_columns + panel * kUnitRows + col;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = i / 2 * 8 + thread() % 4 * 2 + i % 2;
        if (token >= output.num_rows) continue;
        const TokenFactor factor = output.shared_tokens[token];
        const float* own = sums[panel] + i / 2 * 4 + i % 2;
        const float low = finished(own[0], factor, two[0]);
        const float high = finished(own[2], factor, two[1]);
        const int64_t index =
            (output.first_row + token) * params_.rows + block.first + col * distance;
        distance == 1 ? store_neighbours(params_, index, low, high)
                      : store_apart(params_, index, distance, {low, high});
      }
    }
  }

  __device__ static int warpgroup() { return consumer_thread() / kWarpgroup; }
  __device__ static int thread() { return consumer_thread() % kWarpgroup; }

  const GemmParams& params_;
  GemmStorage<Shape>& shared_;
  Loop loop_;
};

}  // namespace narrowfloat
