// The main loops of a consumer warpgroup for weights that become E4M3 in registers and many tokens.
// A warpgroup has two n sub-tiles of 64 weight rows.
//
// Tokens with one scale each need nothing in the loop: the tensor cores sum all columns (moe spec
// 11.4). For each n sub-tile of a k tile:
//
//   decode | issue wgmma, of all tokens | wait
//
// Tokens with a scale every 128 columns: sums start again with every k tile of 128 columns and are
// promoted to fp32, times the scales. Each sub-tile is multiplied by one or two parts of at most 72
// tokens, with one set of temporary sums:
//
//   issue wgmma | load the scales of the part's tokens | wait | promote | decode the next sub-tile
//
// In tiles of 64 tokens, where registers hold the fragments of two sub-tiles beside all sums, the
// next one is decoded before the wait:
//
//   issue wgmma | load scales, decode the next sub-tile | wait | promote
//
// The order of parts, as (n sub-tile, part), with up to 112 tokens and with more:
//
//   0,0   1,0   0,1   1,1      a part's scales serve both sub-tiles
//   0,0   0,1   1,0   1,1      one sub-tile's fragments at a time: no registers for both and scales
//
// Elsewhere decoding follows the wait because ptxas moves it there. While a warpgroup decodes and
// promotes, the other one's instructions keep the tensor cores busy.
#pragma once

#include <type_traits>

#include "device/ptx/keep.cuh"
#include "device/ptx/wgmma.cuh"
#include "device/reduce.cuh"
#include "ops/grouped_gemm/sm90/gemm_config.cuh"
#include "ops/grouped_gemm/sm90/weight_decoder.cuh"

namespace narrowfloat {

template <class Shape>
class PrefillLoop {
 public:
  using Weights = typename Shape::Weights;
  using TheRing = Ring<Shape::kStages>;
  using Position = RingPosition<Shape::kStages>;
  using Sums = float[Shape::kBlocks][Shape::kSums];
  static_assert(Shape::kKTiles == 1 && Shape::kGroupKTiles == 1 && Shape::kBlocks == 2);

  __device__ PrefillLoop(const GemmParamsOf<Shape>& params, GemmStorage<Shape>& shared,
                         const TheRing& ring)
      : params_(params),
        shared_(shared),
        ring_(ring),
        warpgroup_(uniform_warpgroup()),
        thread_(static_cast<int>(threadIdx.x) % kWarpgroup) {}

  // Multiplies the columns that the tile's rows need; the others' sums are 0.
  template <int kWidth = 0>
  __device__ void multiply(int num_rows, Sums& sums) {
    constexpr int kColumns = Shape::columns(kWidth);
    if constexpr (kColumns < Shape::kTokens) {
      if (num_rows > kColumns) return multiply<kWidth + 1>(num_rows, sums);
    }
    if constexpr (Shape::kHasGroups) {
      multiply_groups<kColumns>(sums);
    } else {
      multiply_columns<kColumns>(sums);
    }
  }

 private:
  static constexpr int kBlocks = 2;

  template <int kColumns>
  __device__ void multiply_columns(Sums& sums) {
    Fragments fragments;
#pragma unroll 1
    for (int k_tile = 0; k_tile < params_.k_tiles; ++k_tile) {
      wait_full(at_);
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        decode(at_, block, fragments);
        auto& narrow = reinterpret_cast<float(&)[kColumns / 2]>(sums[block]);
        issue(0, fragments, narrow, k_tile > 0);
        wgmma_wait();
      }
      ring_.release_warp(at_, thread_ % 32);
      at_.advance();
    }
    clear<kColumns, Shape::kTokens>(sums);
  }

  // The next n sub-tile is decoded while the tensor cores multiply one.
  static constexpr bool kDecodesAhead = Shape::kTokens == 64;

  // Parts as wide as the registers beside the sums of 144 tokens allow.
  static constexpr int kMostPartTokens = 72;
  NF_HOST_DEVICE static constexpr int parts(int columns) {
    return columns > kMostPartTokens ? 2 : 1;
  }
  static_assert(Shape::kTokens <= 2 * kMostPartTokens);

  // The kIndex-th multiplication of a k tile: a part of the tokens by an n sub-tile.
  template <int kColumns, int kIndex>
  struct Part {
    static constexpr int kCount = parts(kColumns);
    // Both sub-tiles of a part follow each other and share the scales of its tokens where registers
    // hold these beside the fragments of both.
    static constexpr bool kSharesScales = kColumns <= 112;
    static constexpr int kBlock = kSharesScales ? kIndex % kBlocks : kIndex / kCount;
    static constexpr int kPart = kSharesScales ? kIndex / kBlocks : kIndex % kCount;
    static constexpr bool kLoadsScales = kBlock == 0 || !kSharesScales;
    // Sub-tile 1 comes next.
    static constexpr bool kDecodes = kIndex + 1 == (kSharesScales ? 1 : kCount);
    static constexpr int kWidth = kColumns / kCount;
    static_assert(kWidth % 8 == 0);
    static constexpr int kFirst = kPart * kWidth;
    static constexpr bool kIsLast = kIndex + 1 == kBlocks * kCount;
    using PartSums = float[kWidth / 2];
    using Scales = float2[kWidth / 8];  // Those of its tokens: two neighbours of every eight.
  };

  template <int kColumns>
  struct State {
    Fragments fragments[kBlocks];
    typename Part<kColumns, 0>::PartSums part_sums;
    typename Part<kColumns, 0>::Scales scales;
  };

  template <int kColumns>
  __device__ void multiply_groups(Sums& sums) {
    State<kColumns> state;
    clear<0, kColumns>(sums);
    wait_full(at_);
    decode(at_, 0, state.fragments[0]);
#pragma unroll 1
    for (int k_tile = 1;; ++k_tile) {
      const bool has_next = k_tile < params_.k_tiles;
      multiply_part<kColumns, 0>(has_next, state, sums);
      ring_.release_warp(at_, thread_ % 32);
      at_.advance();
      if (!has_next) break;
      if constexpr (!kDecodesAhead) decode(at_, 0, state.fragments[0]);
    }
    clear<kColumns, Shape::kTokens>(sums);
  }

  // Parts from the kIndex-th on.
  template <int kColumns, int kIndex>
  __device__ void multiply_part(bool has_next, State<kColumns>& state, Sums& sums) {
    using This = Part<kColumns, kIndex>;
    issue(This::kFirst, state.fragments[This::kBlock], state.part_sums, false);
    if constexpr (This::kLoadsScales) load_scales<This>(own_scales(), state.scales);
    if constexpr (This::kIsLast) {
      Position next = at_;
      next.advance();
      if (has_next) {
        wait_full(next);
        if constexpr (kDecodesAhead) decode(next, 0, state.fragments[0]);
      }
    }
    if constexpr (This::kDecodes && kDecodesAhead) decode(at_, 1, state.fragments[1]);
    wgmma_wait();
    promote<This>(state.part_sums, state.scales, sums);
    if constexpr (This::kDecodes && !kDecodesAhead) decode(at_, 1, state.fragments[1]);
    if constexpr (!This::kIsLast) multiply_part<kColumns, kIndex + 1>(has_next, state, sums);
  }

  // The number among the consumers. From a shuffle the compiler makes addresses of it once a warp.
  __device__ static int uniform_warpgroup() {
    return __shfl_sync(kFullWarp, static_cast<int>(threadIdx.x) / kWarpgroup - 1, 0);
  }

  __device__ void wait_full(const Position& at) const {
    ring_.wait_full(at);
    if constexpr (Shape::kBoxRows > 0) {
      // wgmma reads by the proxy that has written the boxes.
      if (params_.has_row_boxes) return;
    }
    fence_async_proxy();
  }

  __device__ const uint8_t* weights_of(const Position& at, int block) const {
    return shared_.weights[at.stage][warpgroup_ * kBlocks + block];
  }

  __device__ void decode(const Position& at, int block, Fragments& fragments) const {
    const uint8_t* k_tile = weights_of(at, block);
    Weights::decode(Weights::load(k_tile, thread_), fragments);
#pragma unroll
    for (int i = 0; i < 16; ++i) keep_before(fragments[i / 4][i % 4]);
  }

  // Starts the multiplication of tokens from `first` on; accumulates: onto sums of earlier k tiles.
  template <int kCount>
  __device__ void issue(int first, Fragments& fragments, float (&sums)[kCount],
                        bool accumulates) const {
    const uint64_t rows =
        swizzled_descriptor(shared_address(shared_.rows[at_.stage][0]) + first * 128);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      Weights::multiply(sums, fragments[k], rows + 2 * k, accumulates || k > 0 ? 1 : 0);
    }
    wgmma_commit();
  }

  // The scales of the thread's tokens.
  [[nodiscard]] __device__ const float* own_scales() const {
    return shared_.group_scales[at_.stage][0] + 4 * (thread_ % 4);
  }
  // From the kPair-th pair on. Those of 16 tokens lie side by side (scale_place()).
  template <class This, int kPair = 0>
  __device__ static void load_scales(const float* own, typename This::Scales& scales) {
    constexpr int kEight = This::kFirst / 8 + kPair;
    constexpr bool kHasTwo = kEight % 2 == 0 && kPair + 1 < This::kWidth / 8;
    using Vector = std::conditional_t<kHasTwo, float4, float2>;
    const auto loaded = *reinterpret_cast<const Vector*>(own + kEight / 2 * 16 + kEight % 2 * 2);
    scales[kPair] = {loaded.x, loaded.y};
    if constexpr (kHasTwo) scales[kPair + 1] = {loaded.z, loaded.w};
    constexpr int kNext = kPair + (kHasTwo ? 2 : 1);
    if constexpr (kNext < This::kWidth / 8) load_scales<This, kNext>(own, scales);
  }

  template <class This>
  __device__ static void promote(const typename This::PartSums& part_sums,
                                 const typename This::Scales& scales, Sums& sums) {
    float* promoted = sums[This::kBlock] + This::kFirst / 2;
#pragma unroll
    for (int j = 0; j < This::kWidth / 2; ++j) {
      const float2 pair = scales[j / 4];
      promoted[j] = __fmaf_rn(j % 2 == 0 ? pair.x : pair.y, part_sums[j], promoted[j]);
    }
  }

  // Clears the sums of columns from kFirst to kEnd - 1.
  template <int kFirst, int kEnd>
  __device__ static void clear(Sums& sums) {
#pragma unroll
    for (int i = kFirst / 2; i < kEnd / 2; ++i) {
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) sums[block][i] = 0;
    }
  }

  const GemmParamsOf<Shape>& params_;
  GemmStorage<Shape>& shared_;
  const TheRing& ring_;
  int warpgroup_;
  int thread_;
  Position at_;
};

}  // namespace narrowfloat
