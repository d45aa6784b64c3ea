// The main loop of a consumer warpgroup that decodes weights in registers: wgmma multiplies a k
// tile while the next one is decoded. For all tiles of few tokens but those of FP8 weights, and for
// bf16 operands at any number of tokens.
#pragma once

#include "device/ptx/keep.cuh"
#include "device/ptx/shared_memory.cuh"
#include "device/ptx/wgmma.cuh"
#include "ops/grouped_gemm/sm90/gemm_config.cuh"
#include "ops/grouped_gemm/sm90/weight_decoder.cuh"

namespace narrowfloat {

template <class Shape>
class RegisterLoop {
 public:
  using Weights = typename Shape::Weights;
  using TheRing = Ring<Shape::kStages>;
  using Position = RingPosition<Shape::kStages>;
  static constexpr int kBlocks = Shape::kBlocks;
  using Sums = float[kBlocks][Shape::kSums];
  // Blocks that are multiplied at a time: where sums take the registers, one after the other.
  static constexpr bool kTakesTurns = Shape::kTokens > 64;
  static constexpr int kStepBlocks = kTakesTurns ? 1 : kBlocks;
  static constexpr int kSteps = kBlocks / kStepBlocks;  // A k tile's.
  using StepFragments = Fragments[kStepBlocks];
  struct Loaded {
    typename Weights::Loaded blocks[kStepBlocks];
  };
  static constexpr int kBlockSums = Shape::kSums;
  template <int kCount>
  using StepSums = float[kStepBlocks][kCount];

  __device__ RegisterLoop(const GemmParams& params, GemmStorage<Shape>& shared, const TheRing& ring)
      : params_(params),
        shared_(shared),
        ring_(ring),
        warpgroup_(static_cast<int>(threadIdx.x) / kWarpgroup - 1),
        thread_(static_cast<int>(threadIdx.x) % kWarpgroup) {
    if constexpr (kIsSmallE4m3<Shape>) {
      const auto places =
          Weights::places_of(shared_address(shared.weights[0][warpgroup_ * kBlocks]), thread_);
      places_ = {keep_in_register(places.codes), keep_in_register(places.scales)};
      if constexpr (Shape::kHasGroups) {
        group_scales_ = keep_in_register(shared_address(shared.group_scales[0][0]) +
                                         static_cast<uint32_t>(thread_) % 4 * 8);
      }
    }
  }

  // Multiplies the columns that the tile's rows need; the others' sums are 0.
  template <int kWidth = 0>
  __device__ void multiply(int num_rows, Sums& sums) {
    constexpr int kColumns = Shape::columns(kWidth);
    if constexpr (kColumns < Shape::kTokens) {
      if (num_rows > kColumns) return multiply<kWidth + 1>(num_rows, sums);
    }
    multiply_columns<kColumns>(sums);
  }

 private:
  // Partial sums of one group of 128 k.
  template <int kColumns>
  using GroupSums = float[kStepBlocks][kColumns / 2];

  __device__ const uint8_t* weights_of(const Position& at, int slot, int block) const {
    return shared_.weights[at.stage][warpgroup_ * kBlocks + block] + slot * Shape::kKTileBytes;
  }

  __device__ Loaded load(const Position& at, int slot, int step) const {
    Loaded loaded;
    if constexpr (kIsSmallE4m3<Shape>) {
      static_assert(kStepBlocks == 1 && kSteps == 1);
      constexpr auto kStageBytes = static_cast<uint32_t>(sizeof(shared_.weights[0]));
      const uint32_t stage = static_cast<uint32_t>(at.stage) * kStageBytes;
      loaded.blocks[0] =
          Weights::load_at(places_, stage + static_cast<uint32_t>(slot * Shape::kKTileBytes));
    } else {
#pragma unroll
      for (int i = 0; i < kStepBlocks; ++i) {
        loaded.blocks[i] = Weights::load(weights_of(at, slot, step * kStepBlocks + i), thread_);
      }
    }
    return loaded;
  }
  __device__ static void decode(const Loaded& loaded, StepFragments& fragments) {
#pragma unroll
    for (int i = 0; i < kStepBlocks; ++i) {
      Weights::decode(loaded.blocks[i], fragments[i]);
#pragma unroll
      for (int j = 0; j < 16; ++j) keep_before(fragments[i][j / 4][j % 4]);
    }
  }

  // Some n sub-tiles of a k tile, and the k tile's place in the stage.
  struct Step {
    int k_tile;
    int slot;
    int index;  // Counted in the k tile.
  };
  [[nodiscard]] __device__ bool ends_tile(const Step& step) const {
    return step.k_tile + 1 == params_.k_tiles && step.index + 1 == kSteps;
  }
  [[nodiscard]] __device__ bool ends_stage(const Step& step) const {
    return step.slot + 1 == Shape::kKTiles && step.index + 1 == kSteps;
  }

  // Two sets of fragments: one in the tensor core, one being decoded. Unrolled over the k tiles of
  // a stage, for their addresses.
  template <int kColumns>
  __device__ void multiply_columns(Sums& sums) {
    constexpr int kUnroll = Shape::kKTiles * kSteps < 2 ? 2 : Shape::kKTiles;
    StepFragments fragments[2];
    GroupSums<kColumns> group_sums;
    if constexpr (Shape::kHasGroups) clear<0, kColumns>(sums);
    ring_.wait_full(at_);
    fence_async_proxy();
    decode(load(at_, 0, 0), fragments[0]);
#pragma unroll 1
    for (int k_tile = 0; k_tile < params_.k_tiles; k_tile += kUnroll) {
#pragma unroll
      for (int i = 0; i < kUnroll * kSteps; ++i) {
        if (i > 0 && k_tile + i / kSteps >= params_.k_tiles) break;
        const Step step{k_tile + i / kSteps, i / kSteps % Shape::kKTiles, i % kSteps};
        multiply_step<kColumns>(step, fragments[i % 2], fragments[(i + 1) % 2], sums, group_sums);
      }
    }
    clear<kColumns, Shape::kTokens>(sums);
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

  template <int kColumns>
  __device__ void multiply_step(const Step& step, StepFragments& now, StepFragments& next,
                                Sums& sums, GroupSums<kColumns>& group_sums) {
    Position following = at_;
    following.advance();
    if constexpr (Shape::kHasGroups) {
      multiply_group_step<kColumns>(step, following, now, next, sums, group_sums);
    } else {
      auto& own = reinterpret_cast<StepSums<kBlockSums>&>(sums[step.index * kStepBlocks]);
      const Loaded early = load_early(step);
      issue<kColumns>(step, step.k_tile > 0, now, own);
      if (!ends_tile(step)) prepare_next(step, following, early, next);
      wgmma_wait();
    }
    if (!ends_stage(step) && !ends_tile(step)) return;
    ring_.release_warp(at_, thread_ % 32);
    at_ = following;
  }

  // Multiplies into temporary sums, which start again with each group.
  template <int kColumns>
  __device__ void multiply_group_step(const Step& step, const Position& following,
                                      StepFragments& now, StepFragments& next, Sums& sums,
                                      GroupSums<kColumns>& group_sums) {
    constexpr int kGroupKTiles = Shape::kGroupKTiles;
    const bool ends_group =
        step.slot % kGroupKTiles == kGroupKTiles - 1 || step.k_tile + 1 == params_.k_tiles;
    const Loaded early = load_early(step);
    issue<kColumns>(step, step.slot % kGroupKTiles > 0, now, group_sums);
    if (!ends_tile(step)) prepare_next(step, following, early, next);
    if constexpr (kIsSmallE4m3<Shape>) {
      constexpr auto kStageBytes = static_cast<uint32_t>(sizeof(shared_.group_scales[0]));
      const uint32_t scales = group_scales_ + static_cast<uint32_t>(at_.stage) * kStageBytes +
                              static_cast<uint32_t>(step.slot * Shape::kTokens * 4);
      uint2 own[kColumns / 8];
#pragma unroll
      for (int i = 0; i < kColumns / 8; ++i) own[i] = load_shared_8(scales + i * 32);
      wgmma_wait();
      promote<kColumns>(step, group_sums, sums, [&](int j) {
        return bits_float(j % 2 == 0 ? own[j / 4].x : own[j / 4].y);
      });
    } else {
      const float* scales = scales_of(step);
      wgmma_wait();
      if (!ends_group) return;
      promote<kColumns>(step, group_sums, sums,
                        [&](int j) { return scales[2 * (j / 4 * 4) + j % 2]; });
    }
  }

  // From one k tile's rows to the next only the address in the descriptor changes, in its lower
  // word, which an addition of 64 bits would take more instructions for.
  [[nodiscard]] __device__ uint64_t rows_descriptor(int slot) const {
    if constexpr (kIsSmallE4m3<Shape>) {
      const auto k_tile = static_cast<uint32_t>(at_.stage * Shape::kKTiles + slot);
      return first_rows_ & ~uint64_t{UINT32_MAX} |
             static_cast<uint32_t>(first_rows_) + k_tile * (Shape::kTokenTileBytes / 16);
    } else {
      return swizzled_descriptor(shared_address(shared_.rows[at_.stage][slot]));
    }
  }

  template <int kColumns, int kCount>
  __device__ void issue(const Step& step, bool accumulate, StepFragments& now,
                        StepSums<kCount>& sums) {
    const uint64_t rows = rows_descriptor(step.slot);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kStepBlocks; ++i) {
      auto& narrow = reinterpret_cast<float(&)[kColumns / 2]>(sums[i]);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        Weights::multiply(narrow, now[i][k], rows + 2 * k, accumulate || k > 0 ? 1 : 0);
      }
    }
    wgmma_commit();
  }

  // Whether the next step's weights, where they are in the same stage, are loaded before this one's
  // instructions, so that the decode after these need not wait. Tiles of 64 are slower then.
  static constexpr bool kLoadsEarly = Shape::kTokens != 64;

  // After a tile's last k tile this reads what the stage had.
  [[nodiscard]] __device__ Loaded load_early(const Step& step) const {
    return kLoadsEarly && !ends_stage(step) ? load_next(step) : Loaded{};
  }
  __device__ void prepare_next(const Step& step, const Position& following, const Loaded& early,
                               StepFragments& next) {
    if (!ends_stage(step)) return decode(kLoadsEarly ? early : load_next(step), next);
    if constexpr (kIsSmallE4m3<Shape>) {
      ring_.wait_full_asleep(following);
      // The fence is for the rows that the next instructions read; words are on their way
      // meanwhile.
      const Loaded loaded = load(following, 0, 0);
      fence_async_proxy();
      return decode(loaded, next);
    }
    ring_.wait_full(following);
    fence_async_proxy();
    decode(load(following, 0, 0), next);
  }
  [[nodiscard]] __device__ Loaded load_next(const Step& step) const {
    if (step.index + 1 < kSteps) return load(at_, step.slot, step.index + 1);
    return load(at_, step.slot + 1, 0);
  }

  // Those of the thread's first two tokens in the step's group.
  [[nodiscard]] __device__ const float* scales_of(const Step& step) const {
    return shared_.group_scales[at_.stage][step.slot / Shape::kGroupKTiles] + 2 * (thread_ % 4);
  }
  template <int kColumns, class ScaleOf>
  __device__ void promote(const Step& step, const StepSums<kColumns / 2>& group_sums, Sums& sums,
                          ScaleOf&& scale_of) const {
#pragma unroll
    for (int i = 0; i < kStepBlocks; ++i) {
      float* promoted = sums[step.index * kStepBlocks + i];
#pragma unroll
      for (int j = 0; j < kColumns / 2; ++j) {
        promoted[j] = __fmaf_rn(scale_of(j), group_sums[i][j], promoted[j]);
      }
    }
  }

  const GemmParams& params_;
  GemmStorage<Shape>& shared_;
  const TheRing& ring_;
  int warpgroup_;
  int thread_;
  Position at_;
  // With kIsSmallE4m3 these are addresses in the first k tile of the first stage: of the
  // warpgroup's weights, and of the scales of the thread's first two tokens.
  E4m3Places places_;
  uint32_t group_scales_ = 0;
  uint64_t first_rows_ = swizzled_descriptor(shared_address(shared_.rows[0][0]));
};

}  // namespace narrowfloat
