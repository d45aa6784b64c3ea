// The main loop of a consumer warpgroup with two blocks of weight rows, whose weights become E4M3
// in registers and whose sums start anew with each unit, a group of 128 columns.
//
// A block's tokens are multiplied in parts, and a part is promoted while the next one is in the
// tensor cores; the fragments of the next block are decoded a few steps behind each part:
//
//   tensor cores   | block 0, part 1 | block 0, part 2 | block 1, part 0 | block 1, part 1 | ...
//   promoted       | block 0, part 0 | block 0, part 1 | block 0, part 2 | block 1, part 0 | ...
//   decoded        | block 1, steps  | block 1, steps  | next unit's block 0, steps        | ...
//
// So there are two sets of a part's temporary sums, and two of fragments.
#pragma once

#include <type_traits>

#include "device/ptx/keep.cuh"
#include "device/ptx/wgmma.cuh"
#include "device/reduce.cuh"
#include "ops/grouped_gemm/sm90/fragments.cuh"
#include "ops/grouped_gemm/sm90/gemm_shapes.cuh"

namespace narrowfloat {

template <class Shape>
class GroupLoop {
 public:
  using Weights = typename Shape::Weights;
  using TheRing = Ring<Shape::kStages>;
  using Position = RingPosition<Shape::kStages>;
  using Sums = float[Shape::kBlocks][Shape::kSums];
  static_assert(Shape::kUnits == 1 && Shape::kGroupUnits == 1 && Shape::kBlocks == 2);

  __device__ GroupLoop(const GemmParams& params, GemmStorage<Shape>& shared, const TheRing& ring)
      : params_(params),
        shared_(shared),
        ring_(ring),
        warpgroup_(uniform_warpgroup()),
        thread_(static_cast<int>(threadIdx.x) % kWarpgroup) {}

  // Of the columns that the item's rows need; the others' sums are 0.
  template <int kWidth = 0>
  __device__ void multiply(int num_rows, Sums& sums) {
    constexpr int kColumns = Shape::columns(kWidth);
    if constexpr (kColumns < Shape::kTokens) {
      if (num_rows > kColumns) return multiply<kWidth + 1>(num_rows, sums);
    }
    multiply_columns<kColumns>(sums);
  }

 private:
  static constexpr int kBlocks = 2;

  // Of `columns` columns in all: as many at a time as two sets of temporary sums have registers
  // for.
  NF_HOST_DEVICE static constexpr int part_columns(int columns) {
    if (Shape::kTokens <= 64) return columns;
    return columns == 144 ? 24 : 32;
  }
  NF_HOST_DEVICE static constexpr int parts(int columns) {
    return (columns + part_columns(columns) - 1) / part_columns(columns);
  }

  template <int kColumns>
  struct State {
    Fragments fragments[2];
    typename Weights::Scales decoded_scales;  // Of the block that is decoded.
    float sums[2][part_columns(kColumns) / 2];
    Position following;  // The next unit's stage.
  };

  // A part of a block: the kIndex-th of a unit.
  template <int kColumns, int kIndex>
  struct Part {
    static constexpr int kCount = parts(kColumns);
    static constexpr int kBlock = kIndex / kCount;
    static constexpr int kPart = kIndex % kCount;
    static constexpr int kFirst = kPart * part_columns(kColumns);
    static constexpr int kWidth =
        kColumns - kFirst < part_columns(kColumns) ? kColumns - kFirst : part_columns(kColumns);
    // Behind it, of the block after its own; behind a block's last part, of the one after that.
    static constexpr int kWindow = (kPart + 1) % kCount;
    static constexpr int kGrains = 4 / Weights::kDecodedSteps;
    static constexpr int kFirstStep = kWindow * kGrains / kCount * Weights::kDecodedSteps;
    static constexpr int kEndStep = (kWindow + 1) * kGrains / kCount * Weights::kDecodedSteps;
    static constexpr int kDecodedBlock = kPart + 1 < kCount ? 1 - kBlock : kBlock;
    static constexpr bool kDecodesFollowing = kBlock == 1 || kPart + 1 == kCount;
    static constexpr bool kIsFirstOfFollowing = kBlock == 0 && kPart + 1 == kCount;
  };

  template <int kColumns>
  __device__ void multiply_columns(Sums& sums) {
    State<kColumns> state;
    clear<0, kColumns>(sums);
    ring_.wait_full(at_);
    fence_async_proxy();
    decode<0, 4>(at_, 0, state.decoded_scales, state.fragments[0]);
    // No instruction is in flight from one turn to the next: the compiler would wait for each.
#pragma unroll 1
    for (int unit = 1; unit <= params_.units; ++unit) {
      state.following = at_;
      if (unit < params_.units) state.following.advance();
      issue<Part<kColumns, 0>>(at_, state.fragments[0], state.sums[0]);
      multiply_part<kColumns, 0>(state, sums);
      ring_.release_warp(at_, thread_ % 32);
      at_.advance();
    }
    clear<kColumns, Shape::kTokens>(sums);
  }

  // Parts from the kIndex-th on, which is in the tensor cores.
  template <int kColumns, int kIndex>
  __device__ void multiply_part(State<kColumns>& state, Sums& sums) {
    using This = Part<kColumns, kIndex>;
    constexpr bool kIsLast = kIndex + 1 == kBlocks * This::kCount;
    if constexpr (kIndex == 0)
      decode_behind<Part<kColumns, kBlocks * This::kCount - 1>>(at_, state);
    const Scales<This> scales = load_scales<This>();
    if constexpr (!kIsLast) {
      using Next = Part<kColumns, kIndex + 1>;
      issue<Next>(at_, state.fragments[Next::kBlock], state.sums[(kIndex + 1) % 2]);
      wgmma_wait_but_one();
    } else {
      wgmma_wait();
    }
    promote<This>(state.sums[kIndex % 2], scales, sums);
    if constexpr (!kIsLast) {
      decode_behind<This>(This::kDecodesFollowing ? state.following : at_, state);
      multiply_part<kColumns, kIndex + 1>(state, sums);
    }
  }

  template <class This, class TheState>
  __device__ void decode_behind(const Position& at, TheState& state) const {
    auto& fragments = state.fragments[This::kDecodedBlock];
    if constexpr (This::kIsFirstOfFollowing) {
      ring_.wait_full(at);
      fence_async_proxy();
    }
    decode<This::kFirstStep, This::kEndStep>(at, This::kDecodedBlock, state.decoded_scales,
                                             fragments);
  }

  // Of the consumers. From a shuffle: the compiler makes addresses of it once a warp.
  __device__ static int uniform_warpgroup() {
    return __shfl_sync(kFullWarp, static_cast<int>(threadIdx.x) / kWarpgroup - 1, 0);
  }

  __device__ const uint8_t* weights_of(const Position& at, int block) const {
    return shared_.weights[at.stage][warpgroup_ * kBlocks + block];
  }

  template <int kFirst, int kEnd>
  __device__ void decode(const Position& at, int block, typename Weights::Scales& scales,
                         Fragments& fragments) const {
    if constexpr (kFirst < kEnd) {
      const uint8_t* unit = weights_of(at, block);
      if constexpr (kFirst == 0) scales = Weights::load_scales(unit, thread_);
      Weights::decode(scales, Weights::template load_words<kFirst, kEnd>(unit, thread_), fragments);
#pragma unroll
      for (int i = 4 * kFirst; i < 4 * kEnd; ++i) keep_before(fragments[i / 4][i % 4]);
    }
  }

  template <class This, int kCount>
  __device__ void issue(const Position& at, Fragments& fragments, float (&sums)[kCount]) const {
    const uint64_t rows =
        swizzled_descriptor(shared_address(shared_.rows[at.stage][0]) + This::kFirst * 128);
    auto& narrow = reinterpret_cast<float(&)[This::kWidth / 2]>(sums);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      Weights::multiply(narrow, fragments[k], rows + 2 * k, k > 0 ? 1 : 0);
    }
    wgmma_commit();
  }

  // Of a part's tokens, two neighbours of every eight. Loaded in front of the wait for its sums.
  template <class This>
  struct Scales {
    float2 pairs[This::kWidth / 8];
  };
  template <class This>
  __device__ Scales<This> load_scales() const {
    Scales<This> scales;
    load_scales<This, 0>(shared_.group_scales[at_.stage][0] + 4 * (thread_ % 4), scales);
#pragma unroll
    for (float2& pair : scales.pairs) {
      keep_apart(pair.x);
      keep_apart(pair.y);
    }
    return scales;
  }

  // From the i-th pair on. Of 16 tokens a thread's are side by side (scale_place()).
  template <class This, int kPair>
  __device__ static void load_scales(const float* own, Scales<This>& scales) {
    constexpr int kEight = This::kFirst / 8 + kPair;
    constexpr bool kHasTwo = kEight % 2 == 0 && kPair + 1 < This::kWidth / 8;
    using Vector = std::conditional_t<kHasTwo, float4, float2>;
    const auto loaded = *reinterpret_cast<const Vector*>(own + kEight / 2 * 16 + kEight % 2 * 2);
    scales.pairs[kPair] = {loaded.x, loaded.y};
    if constexpr (kHasTwo) scales.pairs[kPair + 1] = {loaded.z, loaded.w};
    constexpr int kNext = kPair + (kHasTwo ? 2 : 1);
    if constexpr (kNext < This::kWidth / 8) load_scales<This, kNext>(own, scales);
  }

  template <class This, int kCount>
  __device__ void promote(const float (&part_sums)[kCount], const Scales<This>& scales,
                          Sums& sums) const {
    float* promoted = sums[This::kBlock] + This::kFirst / 2;
#pragma unroll
    for (int j = 0; j < This::kWidth / 2; ++j) {
      const float2 pair = scales.pairs[j / 4];
      promoted[j] = __fmaf_rn(j % 2 == 0 ? pair.x : pair.y, part_sums[j], promoted[j]);
    }
  }

  // Of columns from kFirst to kEnd - 1.
  template <int kFirst, int kEnd>
  __device__ static void clear(Sums& sums) {
#pragma unroll
    for (int i = kFirst / 2; i < kEnd / 2; ++i) {
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) sums[block][i] = 0;
    }
  }

  const GemmParams& params_;
  GemmStorage<Shape>& shared_;
  const TheRing& ring_;
  int warpgroup_;
  int thread_;
  Position at_;
};

}  // namespace narrowfloat
