// The main loop of a consumer warpgroup for long tiles (long_tile.cuh). Both operands are in shared
// memory; tokens are wgmma's 64 rows, so that a thread has sums of two tokens, whose factors are
// two registers. A warpgroup has 64 tokens and all weight rows of a stage.
//
// Sums start anew with every unit, 128 columns, and are added to fp32 registers, times the factors
// of token and weights. While a warpgroup adds its set, the other one's instructions keep the
// tensor cores busy. An instruction has all weight rows: the tokens are read once for them.
#pragma once

#include <cstddef>

#include "base/float_ops.h"
#include "device/ptx/cluster.cuh"
#include "device/ptx/wgmma.cuh"
#include "ops/grouped_gemm/sm90/long_tile.cuh"
#include "ops/grouped_gemm/sm90/panel_unit.cuh"

namespace narrowfloat {

class LongTileLoop {
 public:
  __device__ LongTileLoop(int units, LongTileStorage& shared, const LongTileRing& ring)
      : units_(units),
        shared_(shared),
        ring_(ring),
        // From a lane, so that the compiler knows it to be the same in all.
        warpgroup_(__shfl_sync(0xFFFFFFFFU, static_cast<int>(threadIdx.x) / 128 - 1, 0)),
        thread_(static_cast<int>(threadIdx.x) % 128) {}

  template <int kPanels>
  __device__ void multiply(LongTileSums<kPanels>& sums) {
#pragma unroll
    for (float& sum : sums) sum = 0;
#pragma unroll 1
    for (int unit = 0; unit < units_; ++unit) {
      ring_.wait_full(at_);
      const auto scales = load_scales<kPanels>();
      LongTileSums<kPanels> unit_sums;
      issue(unit_sums);
      wgmma_wait();
      release();
      promote<kPanels>(unit_sums, scales, sums);
    }
  }

  // Without rows of its own: for an item whose copies the others need.
  __device__ void pass() {
#pragma unroll 1
    for (int unit = 0; unit < units_; ++unit) {
      ring_.wait_full(at_);
      release();
    }
  }

 private:
  // Of a stage: of a thread's two tokens, and of the panels.
  template <int kPanels>
  struct Scales {
    float tokens[2];
    float weights[kPanels];
  };

  static constexpr uint32_t kRows = offsetof(LongTileStorage, rows);
  static constexpr uint32_t kWeights = offsetof(LongTileStorage, weights);
  static constexpr uint32_t kTokenScales = offsetof(LongTileStorage, token_scales);
  static constexpr uint32_t kWeightScales = offsetof(LongTileStorage, weight_scales);

  // Of the stage's part of a member that begins at `offset`. All from one address: the compiler
  // would make each member's anew for every unit, which takes 60 cycles.
  [[nodiscard]] __device__ uint32_t stage_of(uint32_t offset, uint32_t bytes) const {
    return shared_address(&shared_) + offset + static_cast<uint32_t>(at_.stage) * bytes;
  }

  template <int kSums>
  __device__ void issue(float (&unit_sums)[kSums]) const {
    const uint32_t first_token = stage_of(kRows, LongTile::kRowBytes) + warpgroup_ * 64 * 128;
    const uint64_t tokens = swizzled_descriptor(first_token);
    const uint64_t weights = swizzled_descriptor(stage_of(kWeights, LongTile::kWeightBytes));
    wgmma_fence();
    multiply_unit(unit_sums, tokens, weights);
    wgmma_commit();
  }

  // In front of the first instruction: a load among them would hold up the last of them.
  template <int kPanels>
  __device__ Scales<kPanels> load_scales() const {
    Scales<kPanels> scales;
    const uint32_t tokens =
        stage_of(kTokenScales, sizeof(LongTileStorage::token_scales[0])) +
        static_cast<uint32_t>(warpgroup_ * 256 + thread_ / 32 * 64 + thread_ % 32 / 4 * 4);
    const uint32_t weights = stage_of(kWeightScales, sizeof(LongTileStorage::weight_scales[0]));
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      scales.weights[panel] = bits_float(load_shared(weights + panel * 4));
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) scales.tokens[i] = bits_float(load_shared(tokens + i * 32));
    return scales;
  }

  template <int kPanels>
  __device__ static void promote(const LongTileSums<kPanels>& unit_sums,
                                 const Scales<kPanels>& scales, LongTileSums<kPanels>& sums) {
    constexpr int kChunkSums = kPanels * LongTile::kPanelSums;
    float factors[2][kPanels];
#pragma unroll
    for (int i = 0; i < 2 * kPanels; ++i) {
      factors[i % 2][i / 2] = __fmul_rn(scales.tokens[i % 2], scales.weights[i / 2]);
    }
#pragma unroll
    for (int i = 0; i < LongTile::kChunks * kChunkSums; ++i) {
      const int panel = i % kChunkSums / LongTile::kPanelSums;
      sums[i] = __fmaf_rn(factors[i / 2 % 2][panel], unit_sums[i], sums[i]);
    }
  }

  // The other block's producer writes here, too.
  __device__ void release() {
    __syncwarp();
    if (thread_ % 32 < LongTile::kTeam) arrive_in_block(ring_.empty(at_), thread_ % 32);
    at_.advance();
  }

  int units_;
  LongTileStorage& shared_;
  const LongTileRing& ring_;
  int warpgroup_;
  int thread_;
  LongTilePosition at_;
};

}  // namespace narrowfloat
