// The main loop of a consumer warpgroup whose weights are decoded in registers: wgmma multiplies a
// unit while the next one is decoded.
#pragma once

#include "device/ptx/keep.cuh"
#include "device/ptx/wgmma.cuh"
#include "ops/grouped_gemm/sm90/gemm_shapes.cuh"

namespace narrowfloat {

template <class Shape>
class RegisterLoop {
 public:
  using Weights = typename Shape::Weights;
  using TheRing = Ring<Shape::kStages>;
  using Position = RingPosition<Shape::kStages>;
  static constexpr int kBlocks = Shape::kBlocks;
  using Sums = float[kBlocks][Shape::kSums];
  using BlockFragments = Fragments[kBlocks];

  __device__ RegisterLoop(const GemmParams& params, GemmStorage<Shape>& shared, const TheRing& ring)
      : params_(params),
        shared_(shared),
        ring_(ring),
        warpgroup_(static_cast<int>(threadIdx.x) / kWarpgroup - 1),
        thread_(static_cast<int>(threadIdx.x) % kWarpgroup) {}

  // Two sets of fragments: one in the tensor core, one being decoded. Unrolled over the units of a
  // stage, for their addresses.
  __device__ void multiply(Sums& sums) {
    constexpr int kUnroll = Shape::kUnits < 2 ? 2 : Shape::kUnits;
    BlockFragments fragments[2];
    if constexpr (Shape::kHasGroups) {
#pragma unroll
      for (int i = 0; i < kBlocks * Shape::kSums; ++i) sums[i / Shape::kSums][i % Shape::kSums] = 0;
    }
    ring_.wait_full(at_);
    fence_async_proxy();
    decode(at_, 0, fragments[0]);
#pragma unroll 1
    for (int unit = 0; unit < params_.units; unit += kUnroll) {
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        if (i > 0 && unit + i >= params_.units) break;
        step({unit + i, i % Shape::kUnits}, fragments[i % 2], fragments[(i + 1) % 2], sums);
      }
    }
  }

 private:
  __device__ const uint8_t* weights_of(const Position& at, int slot, int block) const {
    return shared_.weights[at.stage][warpgroup_ * kBlocks + block] + slot * Shape::kUnitBytes;
  }

  __device__ void decode(const Position& at, int slot, BlockFragments& fragments) const {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      Weights::decode(weights_of(at, slot, block), thread_, fragments[block]);
#pragma unroll
      for (int i = 0; i < 16; ++i) keep_before(fragments[block][i / 4][i % 4]);
    }
  }

  // A unit and its place in the stage.
  struct Unit {
    int index;
    int slot;
  };
  [[nodiscard]] __device__ bool is_last(const Unit& unit) const {
    return unit.index + 1 == params_.units;
  }

  __device__ void step(const Unit& unit, BlockFragments& now, BlockFragments& next, Sums& sums) {
    constexpr int kGroupUnits = Shape::kGroupUnits;
    if constexpr (Shape::kHasGroups) {
      issue(unit, unit.slot % kGroupUnits > 0, now, group_sums_);
    } else {
      issue(unit, unit.index > 0, now, sums);
    }
    if (!is_last(unit)) prepare_next(unit, next);
    wgmma_wait();
    if constexpr (Shape::kHasGroups) {
      if (unit.slot % kGroupUnits == kGroupUnits - 1 || is_last(unit)) promote(unit, sums);
    }
    if (unit.slot + 1 == Shape::kUnits || is_last(unit)) release();
  }

  __device__ void issue(const Unit& unit, bool accumulate, BlockFragments& now, Sums& sums) {
    const uint64_t rows = swizzled_descriptor(shared_address(shared_.rows[at_.stage][unit.slot]));
    wgmma_fence();
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        Weights::multiply(sums[block], now[block][k], rows + 2 * k, accumulate || k > 0 ? 1 : 0);
      }
    }
    wgmma_commit();
  }

  __device__ void prepare_next(const Unit& unit, BlockFragments& next) {
    if (unit.slot + 1 < Shape::kUnits) {
      decode(at_, unit.slot + 1, next);
      return;
    }
    Position following = at_;
    following.advance();
    ring_.wait_full(following);
    fence_async_proxy();
    decode(following, 0, next);
  }

  __device__ void promote(const Unit& unit, Sums& sums) const {
    const float* scales =
        shared_.group_scales[at_.stage][unit.slot / Shape::kGroupUnits] + 2 * (thread_ % 4);
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      float2 row_scales{1.0F, 1.0F};
      if constexpr (Shape::kGroupUnits == 1) {
        row_scales = Weights::row_scales(weights_of(at_, unit.slot, block), thread_);
      }
#pragma unroll
      for (int i = 0; i < Shape::kSums; ++i) {
        const float row_scale = i / 2 % 2 == 0 ? row_scales.x : row_scales.y;
        const float scale = __fmul_rn(scales[2 * (i / 4 * 4) + i % 2], row_scale);
        sums[block][i] = __fmaf_rn(scale, group_sums_[block][i], sums[block][i]);
      }
    }
  }

  // Once all lanes of the warp have read.
  __device__ void release() {
    __syncwarp();
    if (thread_ % 32 == 0) ring_.release(at_);
    at_.advance();
  }

  const GemmParams& params_;
  GemmStorage<Shape>& shared_;
  const TheRing& ring_;
  int warpgroup_;
  int thread_;
  Position at_;
  float group_sums_[Shape::kHasGroups ? kBlocks : 1][Shape::kSums];
};

}  // namespace narrowfloat
