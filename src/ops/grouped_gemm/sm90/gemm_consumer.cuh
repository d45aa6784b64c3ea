// A consumer warpgroup of the Hopper GEMM (gemm_kernel.cuh): multiplies tile after tile, and
// finishes each.
#pragma once

#include <type_traits>

#include "ops/grouped_gemm/sm90/finish_tokens.cuh"
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
  using Loop = std::conditional_t<Shape::kIsPanel, ManyTokens, RegisterLoop<Shape>>;
  static constexpr int kBlocks = Shape::kBlocks;

  __device__ Consumer(const GemmParams& params, GemmStorage<Shape>& shared,
                      const Ring<Shape::kStages>& ring)
      : params_(params),
        shared_(shared),
        loop_(params, shared, ring),
        warpgroup_(static_cast<int>(threadIdx.x) / kWarpgroup - 1),
        thread_(static_cast<int>(threadIdx.x) % kWarpgroup) {}

  __device__ void run() {
    for (WorkList work(params_, Shape::kTokens, Shape::kTileBlocks); work.has_next(); work.next()) {
      const WorkItem item = work.item();
      if (item.num_rows <= 0) continue;
      load_factors(params_, item, thread_, shared_.factors[warpgroup_]);
      if constexpr (!Shape::kIsTokenMajor) {
        run_item(item);
      } else if (Shape::kTokens > 64 && item.num_rows > 64) {
        run_token_blocks<2>(item);
      } else {
        run_token_blocks<1>(item);
      }
      sync_threads(1 + warpgroup_, kWarpgroup);
    }
  }

 private:
  __device__ void run_item(const WorkItem& item) {
    float sums[kBlocks][Shape::kSums];
    loop_.multiply(sums);
    if constexpr (has_ue8m0_scales(Weights::kCoding)) {
      if (params_.row_powers != nullptr) scale_rows(item, sums);
    }
    sync_threads(1 + warpgroup_, kWarpgroup);
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      finish_tile<Shape::kTokens>(params_, item, item.block + warpgroup_ * kBlocks + i, sums[i],
                                  shared_.factors[warpgroup_], Weights::kRepair);
    }
  }

  // By the powers of two that prepare() took from rows outside bf16's range.
  __device__ void scale_rows(const WorkItem& item, float (&sums)[kBlocks][Shape::kSums]) const {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const int row = (item.block + warpgroup_ * kBlocks + block) * kUnitRows + thread_ / 32 * 16 +
                      thread_ % 32 / 4 * 2;
      if (row >= params_.rows) continue;
      const float* powers =
          params_.row_powers + static_cast<int64_t>(item.expert) * params_.rows + row;
      const float2 factors{powers[0], powers[1]};
#pragma unroll
      for (int i = 0; i < Shape::kSums; ++i) {
        sums[block][i] = __fmul_rn(sums[block][i], i / 2 % 2 == 0 ? factors.x : factors.y);
      }
    }
  }

  // kTokenBlocks: of 64 tokens.
  template <int kTokenBlocks>
  __device__ void run_token_blocks(const WorkItem& item) {
    TokenSums sums[kTokenBlocks];
    loop_.multiply(sums);
    sync_threads(1 + warpgroup_, kWarpgroup);
    finish_token_blocks(params_, item, item.block + warpgroup_ * kBlocks, sums,
                        shared_.factors[warpgroup_]);
  }

  const GemmParams& params_;
  GemmStorage<Shape>& shared_;
  Loop loop_;
  int warpgroup_;
  int thread_;
};

}  // namespace narrowfloat
