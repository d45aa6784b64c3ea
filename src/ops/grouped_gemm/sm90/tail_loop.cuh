// The main loop of token_loop.cuh for items with a tail: up to 16 tokens behind blocks of 64, which
// are multiplied the other way round, as the columns of an instruction for each of the warpgroup's
// two panels. A stage's weights are copied and read once for all.
#pragma once

#include "base/float_ops.h"
#include "device/ptx/keep.cuh"
#include "device/ptx/wgmma.cuh"
#include "ops/grouped_gemm/sm90/token_loop.cuh"

namespace narrowfloat {

template <class Shape>
class TailLoop {
 public:
  using TheRing = Ring<Shape::kStages>;
  static constexpr int kTailTokens = Shape::kTokens - Shape::kPieceTokens;
  static constexpr int kTokenBlocks = Shape::kPieceTokens / 64;
  static_assert(Shape::kUnits == 1 && Shape::kBlocks == 2 && Shape::kTeam == 1 &&
                kTailTokens == 16);

  // tail: of two panels, in a thread: 4j + 2h + i is row 16w + q + 8h of the panel and token 8j +
  // 2c + i.
  struct Sums {
    TokenSums tokens[kTokenBlocks];
    float tail[2][kTailTokens / 2];
  };

  __device__ TailLoop(const GemmParams& params, GemmStorage<Shape>& shared, const TheRing& ring)
      : params_(params),
        shared_(shared),
        ring_(ring),
        // From a lane, so that the compiler knows it to be the same in all.
        warpgroup_(__shfl_sync(0xFFFFFFFFU, static_cast<int>(threadIdx.x) / kWarpgroup - 1, 0)) {}

  // Blocks of 64 tokens of an item with this many rows; the others are its tail.
  __device__ static int blocks_of(int num_rows) {
    return num_rows <= 64 + kTailTokens ? 1 : kTokenBlocks;
  }
  __device__ static bool has_tail(int num_rows) { return num_rows > 64 * blocks_of(num_rows); }

  // Sums that the item's rows do not need are 0. One loop for items of all sizes: a branch in front
  // of some instructions costs less than the code, and the registers, of a loop for each.
  __device__ void multiply(int num_rows, Sums& sums) {
    const int num_blocks = blocks_of(num_rows);
    const bool with_tail = has_tail(num_rows);
    // Anew each time: what is made of it takes no registers behind the loop.
    const uint32_t thread = keep_in_register(threadIdx.x) % kWarpgroup;
    lane_ = static_cast<int>(thread % 32);
    first_scale_ = (thread / 32 * 16 + thread % 32 / 4) * sizeof(float);
    clear(sums);
#pragma unroll 1
    for (int left = params_.units; left > 0; --left) {
      ring_.wait_full(at_);
      fence_async_proxy();
      if (with_tail) multiply_tail(64 * num_blocks, sums);
      if (num_blocks > 1) multiply_block<1>(sums);
      multiply_block<0>(sums);
    }
  }

 private:
  // Block 0 is the last of a stage.
  template <int kBlock>
  __device__ void multiply_block(Sums& sums) {
    TokenSums unit_sums;
    // In front of the instructions: a load among them would hold up the last of them.
    const float2 tokens = token_scales(kBlock);
    const float2 weights = weight_scales();
    const uint64_t rows = rows_from(64 * kBlock);
    const uint64_t panels = panel(0);
    wgmma_fence();
    multiply_unit(unit_sums, rows, panels);
    wgmma_commit();
    wgmma_wait();
    if constexpr (kBlock == 0) {
      ring_.release_warp(at_, lane_);
      at_.advance();
    }
    const TokenFactors factors = {
        {{__fmul_rn(tokens.x, weights.x), __fmul_rn(tokens.x, weights.y)},
         {__fmul_rn(tokens.y, weights.x), __fmul_rn(tokens.y, weights.y)}}};
    promote_tokens(unit_sums, factors, sums.tokens[kBlock]);
  }

  // Tokens from `first` on.
  __device__ void multiply_tail(int first, Sums& sums) const {
    constexpr int kSums = kTailTokens / 2;
    float unit_sums[2][kSums];
    const float2 weights = weight_scales();
    const uint64_t rows = rows_from(first);
    wgmma_fence();
#pragma unroll
    for (int block = 0; block < 2; ++block) multiply_unit(unit_sums[block], panel(block), rows);
    wgmma_commit();
    wgmma_wait();
    const float* tokens = shared_.group_scales[at_.stage][0] + first + lane_ % 4 * 2;
#pragma unroll
    for (int i = 0; i < 2 * kSums; ++i) {
      const int at = i % kSums;
      const float factor =
          __fmul_rn(tokens[at / 4 * 8 + at % 2], i < kSums ? weights.x : weights.y);
      float& sum = sums.tail[i / kSums][at];
      sum = __fmaf_rn(factor, unit_sums[i / kSums][at], sum);
    }
  }

  [[nodiscard]] __device__ uint64_t rows_from(int token) const {
    return swizzled_descriptor(shared_address(shared_.rows[at_.stage][0]) +
                               static_cast<uint32_t>(token * kUnitRowBytes));
  }
  // Of the warpgroup's block `block`; the other one's rows follow those of the first.
  [[nodiscard]] __device__ uint64_t panel(int block) const {
    return swizzled_descriptor(shared_address(shared_.weights[at_.stage][2 * warpgroup_ + block]));
  }

  // Of a thread's two tokens of a block.
  [[nodiscard]] __device__ float2 token_scales(int block) const {
    const uint32_t tokens = shared_address(shared_.group_scales[at_.stage][0]) + first_scale_;
    return {bits_float(load_shared(tokens + block * 256)),
            bits_float(load_shared(tokens + block * 256 + 32))};
  }
  // Of the warpgroup's two panels.
  [[nodiscard]] __device__ float2 weight_scales() const {
    const uint32_t weights = shared_address(shared_.weight_scales[at_.stage][2 * warpgroup_]);
    return {bits_float(load_shared(weights)), bits_float(load_shared(weights + 16))};
  }

  __device__ static void clear(Sums& sums) {
#pragma unroll
    for (int i = 0; i < kTokenBlocks * 64; ++i) sums.tokens[i / 64][i % 64] = 0;
#pragma unroll
    for (int i = 0; i < kTailTokens; ++i) sums.tail[i % 2][i / 2] = 0;
  }

  const GemmParams& params_;
  GemmStorage<Shape>& shared_;
  const TheRing& ring_;
  int warpgroup_;
  int lane_ = 0;
  uint32_t first_scale_ = 0;  // Bytes in front of that of the thread's first token.
  RingPosition<Shape::kStages> at_;
};

}  // namespace narrowfloat
