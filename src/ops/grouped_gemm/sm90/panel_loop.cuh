// The main loop of a consumer warpgroup for few tokens, whose weights are E4M3 panels in shared
// memory, wgmma's A as they are (weight_units.h). Sums start anew with every unit, 128 columns, and
// are added to fp32 registers, times the factors of token and weights.
#pragma once

#include "device/ptx/wgmma.cuh"
#include "ops/grouped_gemm/sm90/gemm_shapes.cuh"
#include "ops/grouped_gemm/sm90/panel_unit.cuh"

namespace narrowfloat {

template <class Shape>
class PanelLoop {
 public:
  using TheRing = Ring<Shape::kStages>;
  static_assert(Shape::kBlocks == 1 && Shape::kUnits == 1 && Shape::kGroupUnits == 1);

  __device__ PanelLoop(const GemmParams& params, GemmStorage<Shape>& shared, const TheRing& ring)
      : params_(params),
        shared_(shared),
        ring_(ring),
        warpgroup_(static_cast<int>(threadIdx.x) / kWarpgroup - 1),
        thread_(static_cast<int>(threadIdx.x) % kWarpgroup) {}

  template <int kSums>
  __device__ void multiply(float (&sums)[1][kSums]) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[0][i] = 0;
#pragma unroll 1
    for (int unit = 0; unit < params_.units; ++unit) {
      ring_.wait_full(at_);
      fence_async_proxy();
      float group_sums[kSums];
      float scales[kSums / 2];
      issue(group_sums);
      wgmma_wait();
      load_scales(scales);
      promote(group_sums, scales, sums[0]);
      ring_.release_warp(at_, thread_ % 32);
      at_.advance();
    }
  }

 private:
  __device__ const uint8_t* weights() const { return shared_.weights[at_.stage][warpgroup_]; }

  template <int kSums>
  __device__ void issue(float (&group_sums)[kSums]) const {
    const uint64_t panel = swizzled_descriptor(shared_address(weights()));
    const uint64_t rows = swizzled_descriptor(shared_address(shared_.rows[at_.stage][0]));
    wgmma_fence();
    multiply_unit(group_sums, panel, rows);
    wgmma_commit();
  }

  // Of the thread's tokens, 8j + 2c and 8j + 2c + 1.
  template <int kTokens>
  __device__ void load_scales(float (&scales)[kTokens]) const {
    const float* shared_scales = shared_.group_scales[at_.stage][0] + 2 * (thread_ % 4);
    const float weight_scale = Shape::Weights::scale(weights());
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      scales[i] = __fmul_rn(shared_scales[i / 2 * 8 + i % 2], weight_scale);
    }
  }

  template <int kSums>
  __device__ static void promote(const float (&group_sums)[kSums], const float (&scales)[kSums / 2],
                                 float (&sums)[kSums]) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      sums[i] = __fmaf_rn(scales[i / 4 * 2 + i % 2], group_sums[i], sums[i]);
    }
  }

  const GemmParams& params_;
  GemmStorage<Shape>& shared_;
  const TheRing& ring_;
  int warpgroup_;
  int thread_;
  RingPosition<Shape::kStages> at_;
};

}  // namespace narrowfloat
