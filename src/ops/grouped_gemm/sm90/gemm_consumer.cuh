// A consumer warpgroup of the Hopper GEMM (gemm_kernel.cuh): multiplies tile after tile, and
// finishes each.
#pragma once

#include <type_traits>

#include "ops/grouped_gemm/sm90/finish_activated_tokens.cuh"
#include "ops/grouped_gemm/sm90/group_loop.cuh"
#include "ops/grouped_gemm/sm90/item_ring.cuh"
#include "ops/grouped_gemm/sm90/panel_loop.cuh"
#include "ops/grouped_gemm/sm90/register_loop.cuh"
#include "ops/grouped_gemm/sm90/token_loop.cuh"
#include "ops/grouped_gemm/sm90/work_list.cuh"

namespace narrowfloat {

template <class Shape>
class Consumer {
 public:
  using Weights = typename Shape::Weights;
  using ManyTokens = std::conditional_t<Shape::kIsTokenMajor, TokenLoop<Shape>, PanelLoop<Shape>>;
  using OfRegisters =
      std::conditional_t<Shape::kHasGroupLoop, GroupLoop<Shape>, RegisterLoop<Shape>>;
  using Loop = std::conditional_t<Shape::kIsPanel, ManyTokens, OfRegisters>;

  __device__ Consumer(const GemmParamsOf<Shape>& params, GemmStorage<Shape>& shared,
                      const Ring<Shape::kStages>& ring)
      : params_(params),
        shared_(shared),
        loop_(params, shared, ring),
        warpgroup_(static_cast<int>(threadIdx.x) / kWarpgroup - 1),
        thread_(static_cast<int>(threadIdx.x) % kWarpgroup) {}

  __device__ void run() {
    if constexpr (Shape::kHasItemRing) {
      ItemRing items(shared_.found.items);
      for (; items.has_item(); items.advance(thread_ % 32)) {
        if (items.item().has_copies) run_published(items);
      }
    } else {
      run_list(passes_of<Shape>(params_));
    }
  }

 private:
  __device__ void run_list(int passes) {
    WorkListFor<Shape> work(params_, shared_.queue, WorkTiling::of<Shape>(passes),
                            is_early<Shape>(params_));
    for (; work.has_next(); work.next()) {
      const WorkItem item = work.item();
      if (is_early<Shape>(params_) && work.is_first()) {
        wait_for_previous_grids();
        work.end_early();
      }
      if (!item.has_copies) continue;
      load_factors<Shape::kTokens>(params_, item, thread_, shared_.factors[warpgroup_]);
      if constexpr (Shape::kIsTokenMajor) {
        load_column_factors(params_, item, item.block + 2 * warpgroup_, thread_,
                            shared_.columns[warpgroup_]);
      }
      if constexpr (!Shape::kIsTokenMajor) {
        run_item(item, passes);
      } else if (Shape::kTeam > 1 && item.num_rows <= 0) {
        loop_.pass();
      } else if (Shape::kTokens > 64 && item.num_rows > 64) {
        run_token_blocks<2>(item);
      } else {
        run_token_blocks<1>(item);
      }
    }
  }

  // Reads the item again after the main loop, which needs the registers that it would be kept in.
  __device__ void run_published(const ItemRing& items) {
    static_assert(Shape::kGroupPasses == 1);
    load_factors<Shape::kTokens>(params_, items.item(), thread_, shared_.factors[warpgroup_]);
    float sums[Shape::kBlocks][Shape::kSums];
    multiply(items.uniform_item(), sums);
    ItemFinisher<Shape> finisher(params_, shared_, items.uniform_item());
    finisher.finish(0, 1, sums);
    finisher.end();
  }

  __device__ void run_item(const WorkItem& item, int passes) {
    ItemFinisher<Shape> finisher(params_, shared_, item);
#pragma unroll 1
    for (int pass = 0; pass < passes; ++pass) {
      float sums[Shape::kBlocks][Shape::kSums];
      multiply(item, sums);
      finisher.finish(pass, passes, sums);
    }
    finisher.end();
  }

  template <class Sums>
  __device__ void multiply(const WorkItem& item, Sums& sums) {
    if constexpr (Shape::kIsPanel) {
      loop_.multiply(sums);
    } else {
      loop_.multiply(item.num_rows, sums);
    }
  }

  // kTokenBlocks: of 64 tokens.
  template <int kTokenBlocks>
  __device__ void run_token_blocks(const WorkItem& item) {
    TokenSums sums[kTokenBlocks];
    loop_.multiply(sums);
    TokenFinisher<Shape, kTokenBlocks>(params_, shared_, item).finish(sums);
  }

  const GemmParams& params_;
  GemmStorage<Shape>& shared_;
  Loop loop_;
  int warpgroup_;
  int thread_;
};

}  // namespace narrowfloat
