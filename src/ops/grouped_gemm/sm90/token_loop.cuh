// The main loop of a consumer warpgroup for many tokens and E4M3 weights. Both operands are panels
// in shared memory, so that either may be wgmma's A: here tokens are its 64 rows and the
// warpgroup's 128 weight rows its columns. A thread then has sums of two tokens, whose factors are
// two registers; with weights as A it would multiply by 32 of them.
//
// Sums start anew with every unit, 128 columns, and are added to fp32 registers, times the factors
// of token and weights. 64 tokens are multiplied at a time, into one temporary set of sums: while a
// warpgroup promotes its set, the other one's instructions keep the tensor cores busy.
#pragma once

#include "base/float_ops.h"
#include "device/ptx/cluster.cuh"
#include "device/ptx/wgmma.cuh"
#include "ops/grouped_gemm/sm90/gemm_shapes.cuh"
#include "ops/grouped_gemm/sm90/panel_unit.cuh"

namespace narrowfloat {

// Of 64 tokens and 128 weight rows, in a thread: 4j + 2h + i is token 16w + q + 8h and row 8j + 2c
// + i of the panels (weight_units.h).
using TokenSums = float[64];

// Of a thread's two tokens and the panels of two blocks.
struct TokenFactors {
  float of[2][2];  // [token][panel]
};

__device__ inline void promote_tokens(const TokenSums& unit_sums, const TokenFactors& factors,
                                      TokenSums& sums) {
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    sums[i] = __fmaf_rn(factors.of[i / 2 % 2][i / 32], unit_sums[i], sums[i]);
  }
}

template <class Shape>
class TokenLoop {
 public:
  using TheRing = Ring<Shape::kStages>;
  static_assert(Shape::kUnits == 1 && Shape::kGroupUnits == 1 && Shape::kBlocks == 2);

  __device__ TokenLoop(const GemmParams& params, GemmStorage<Shape>& shared, const TheRing& ring)
      : params_(params),
        shared_(shared),
        ring_(ring),
        // From a lane, so that the compiler knows it to be the same in all.
        warpgroup_(__shfl_sync(0xFFFFFFFFU, static_cast<int>(threadIdx.x) / kWarpgroup - 1, 0)),
        thread_(static_cast<int>(threadIdx.x) % kWarpgroup) {}

  // Of the first 64 * kTokenBlocks tokens.
  template <int kTokenBlocks>
  __device__ void multiply(TokenSums (&sums)[kTokenBlocks]) {
#pragma unroll
    for (int i = 0; i < kTokenBlocks * 64; ++i) sums[i / 64][i % 64] = 0;
#pragma unroll 1
    for (int unit = 0; unit < params_.units; ++unit) {
      ring_.wait_full(at_);
      fence_async_proxy();
      const Scales<kTokenBlocks> scales = load_scales<kTokenBlocks>();
#pragma unroll
      for (int block = 0; block < kTokenBlocks; ++block) {
        TokenSums group_sums;
        issue(block, group_sums);
        wgmma_wait();
        if (block + 1 == kTokenBlocks) release();
        promote_tokens(group_sums, factors_of(scales, block), sums[block]);
      }
    }
  }

  // For an item whose copies the other block of the team needs.
  __device__ void pass() {
#pragma unroll 1
    for (int unit = 0; unit < params_.units; ++unit) {
      ring_.wait_full(at_);
      release();
    }
  }

 private:
  // Of a stage: of a thread's two tokens of each 64, and of two panels.
  template <int kTokenBlocks>
  struct Scales {
    float tokens[2 * kTokenBlocks];
    float weights[2];
  };

  __device__ void issue(int block, TokenSums& group_sums) const {
    const uint32_t first_token = shared_address(shared_.rows[at_.stage][0]) + block * 64 * 128;
    const uint32_t panels = shared_address(shared_.weights[at_.stage][2 * warpgroup_]);
    const uint64_t tokens = swizzled_descriptor(first_token);
    const uint64_t weights = swizzled_descriptor(panels);
    wgmma_fence();
    multiply_unit(group_sums, tokens, weights);
    wgmma_commit();
  }

  // In front of the first instructions: a load among them would hold up the last of them.
  template <int kTokenBlocks>
  __device__ Scales<kTokenBlocks> load_scales() const {
    Scales<kTokenBlocks> scales;
    const uint32_t tokens = shared_address(shared_.group_scales[at_.stage][0]) +
                            static_cast<uint32_t>(thread_ / 32 * 64 + thread_ % 32 / 4 * 4);
    const uint32_t weights = shared_address(shared_.weight_scales[at_.stage][2 * warpgroup_]);
#pragma unroll
    for (int panel = 0; panel < 2; ++panel) {
      scales.weights[panel] = bits_float(load_shared(weights + panel * 16));
    }
#pragma unroll
    for (int i = 0; i < 2 * kTokenBlocks; ++i) {
      scales.tokens[i] = bits_float(load_shared(tokens + i / 2 * 256 + i % 2 * 32));
    }
    return scales;
  }

  template <int kTokenBlocks>
  __device__ static TokenFactors factors_of(const Scales<kTokenBlocks>& scales, int block) {
    TokenFactors factors;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      factors.of[i / 2][i % 2] = __fmul_rn(scales.tokens[2 * block + i / 2], scales.weights[i % 2]);
    }
    return factors;
  }

  __device__ void release() {
    if constexpr (Shape::kTeam == 1) {
      ring_.release_warp(at_, thread_ % 32);
    } else {
      // The other block's producer writes here, too.
      __syncwarp();
      if (thread_ % 32 < Shape::kTeam) arrive_in_block(ring_.empty(at_), thread_ % 32);
    }
    at_.advance();
  }

  const GemmParams& params_;
  GemmStorage<Shape>& shared_;
  const TheRing& ring_;
  int warpgroup_;
  int thread_;
  RingPosition<Shape::kStages> at_;
};

}  // namespace narrowfloat
