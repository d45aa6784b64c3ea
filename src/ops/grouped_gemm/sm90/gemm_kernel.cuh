// The grouped GEMM of Hopper: out[token, n] = epilogue(sum over k of x[token, k] * w[n, k]), as
// D^T = W * X^T. Weight rows are wgmma's M, tokens its N, so that few tokens waste nothing, and the
// weights are decoded in registers to bf16 or E4M3, the A operand, exactly.
//
//   block   producer warpgroup | consumer warpgroup 0: 64 or 128 weight rows | warpgroup 1: as many
//   stage   kUnits units of 64 or 128 columns: their weights by bulk copies, the activation rows by
//           16-byte copies that gather rows and swizzle, zeros for absent rows and columns
//   work    (128 or 256 weight rows) x (token tile), persistent blocks over all of them in the same
//           order for both sides (work_list.cuh)
//
// A consumer multiplies a unit while it decodes the next one. Where activations have a scale every
// 128 columns, sums start anew there and are added in fp32 registers, times that scale and the
// weights' own of 128 x 128. docs/kernels/grouped_gemm_sm90.md has the arithmetic and figures.
#pragma once

#include <cuda_runtime.h>

#include "base/int_math.h"
#include "device/ptx/async_copy.cuh"
#include "device/ptx/grid_dependency.cuh"
#include "device/ptx/wgmma.cuh"
#include "device/ring.cuh"
#include "ops/grouped_gemm/sm90/finish.cuh"
#include "ops/grouped_gemm/sm90/fragments.cuh"
#include "ops/grouped_gemm/sm90/work_list.cuh"
#include "runtime/cuda/launch.h"

namespace narrowfloat {

// kWeights decodes units; kHasGroups: sums are promoted every 128 columns.
template <class WeightsPolicy, bool kHasGroupSums, int kTileTokens>
struct GemmShapeOf {
  using Weights = WeightsPolicy;
  static constexpr bool kHasGroups = kHasGroupSums;
  static constexpr int kTokens = kTileTokens;
  static constexpr int kSums = kTokens / 2;  // Of a thread and a block of 64 weight rows.
  static constexpr bool kIsSmall = kTokens <= 32;
  // Blocks of 64 weight rows of a warpgroup: two halve the reads of activations, where the
  // registers take them.
  static constexpr int kBlocks = kIsSmall || (kHasGroups && kTokens == 128) ? 1 : 2;
  static constexpr int kTileBlocks = 2 * kBlocks;

  // Registers: 2 blocks of 384 threads on a multiprocessor for small tiles.
  static constexpr int kBlocksPerSm = kIsSmall ? 2 : 1;
  static constexpr int kProducerRegisters = kIsSmall ? 32 : 56;
  static constexpr int kConsumerRegisters = kIsSmall ? 104 : 224;

  // Around 16 KB of weights a stage; whole promotion groups.
  static constexpr int kMostUnits = 8192 / unit_code_bytes(Weights::kCoding);
  static constexpr int kUnits = kIsSmall || kMostUnits < 2 ? kMostUnits : 2;
  static constexpr int kGroupUnits = 128 / unit_cols(Weights::kCoding);
  static constexpr int kGroups = kHasGroups ? kUnits / kGroupUnits : 0;
  static constexpr int kUnitBytes = unit_bytes(Weights::kCoding);
  static constexpr int kBlockStageBytes = kUnits * kUnitBytes;
  static constexpr int kPanelBytes = kTokens * kUnitRowBytes;  // A unit of activations.
  static constexpr int kStageBytes =
      kTileBlocks * kBlockStageBytes + kUnits * kPanelBytes + kGroups * kTokens * 4;
  static constexpr int kSharedBytes = (kIsSmall ? 112 : 226) * 1024;
  static constexpr int kFittingStages = (kSharedBytes - 4096) / kStageBytes;
  static constexpr int kStages = kFittingStages > 8 ? 8 : kFittingStages;
  static_assert(kStages >= 3 && kUnits % (kHasGroups ? kGroupUnits : 1) == 0);
};

inline constexpr int kWarpgroup = 128;
inline constexpr int kConsumers = 2;  // Warpgroups.
inline constexpr int kGemmThreads = (1 + kConsumers) * kWarpgroup;

template <class Shape>
struct GemmStorage {
  uint8_t rows[Shape::kStages][Shape::kUnits][Shape::kPanelBytes];
  uint8_t weights[Shape::kStages][Shape::kTileBlocks][Shape::kBlockStageBytes];
  float group_scales[Shape::kStages][Shape::kGroups > 0 ? Shape::kGroups : 1][Shape::kTokens];
  TokenFactor factors[kConsumers][Shape::kTokens];
  RingBarriers<Shape::kStages> barriers;
};

template <class Shape>
class Producer {
 public:
  using TheRing = Ring<Shape::kStages>;

  __device__ Producer(const GemmParams& params, GemmStorage<Shape>& shared, const TheRing& ring)
      : params_(params), shared_(shared), ring_(ring), thread_(threadIdx.x % kWarpgroup) {}

  __device__ void run() {
    for (WorkList work(params_, Shape::kTokens, Shape::kTileBlocks); work.has_next(); work.next()) {
      const WorkItem item = work.item();
      if (item.num_rows <= 0) continue;
      find_rows(item);
      for (int unit = 0; unit < params_.units; unit += Shape::kUnits) {
        ring_.wait_empty(at_);
        copy_weights(item, unit);
        copy_rows(unit);
        if constexpr (Shape::kHasGroups) copy_group_scales(unit / kGroupUnits);
        arrive_after_copies(ring_.full(at_));
        at_.advance();
      }
    }
  }

 private:
  static constexpr int kGroupUnits = Shape::kGroupUnits;
  // A thread copies 16 bytes of a row of a unit, of every kRowsPerPass-th row.
  static constexpr int kRowsPerPass = kWarpgroup / 8;
  static constexpr int kSources = Shape::kTokens > kRowsPerPass ? Shape::kTokens / kRowsPerPass : 1;
  // Units a pass covers where one has fewer rows.
  static constexpr int kUnitStep =
      Shape::kTokens < kRowsPerPass ? kRowsPerPass / Shape::kTokens : 1;

  // Row of the activations behind row `row` of the tile; -1 for absent ones.
  __device__ int source_of(const WorkItem& item, int row) const {
    if (row >= item.num_rows) return -1;
    const int64_t tile_row = item.first_row + row;
    if (params_.row_to_token == nullptr) return static_cast<int>(tile_row);
    const int token = params_.row_to_token[tile_row];
    return token >= 0 && token < params_.input_rows ? token : -1;
  }

  __device__ void find_rows(const WorkItem& item) {
    has_row_ = 0;
#pragma unroll
    for (int i = 0; i < kSources; ++i) {
      const int source = source_of(item, thread_ / 8 % Shape::kTokens + i * kRowsPerPass);
      const int64_t row = source >= 0 ? source : 0;
      global_rows_[i] = params_.values + row * params_.row_bytes + thread_ % 8 * 16;
      has_row_ |= (source >= 0 ? 1U : 0U) << i;
    }
    if constexpr (Shape::kHasGroups) {
      scale_source_ = thread_ < Shape::kTokens ? source_of(item, thread_) : -1;
    }
  }

  __device__ void copy_weights(const WorkItem& item, int unit) const {
    if (thread_ != 0) return;
    const int count = min(Shape::kUnits, params_.units - unit);
    const int blocks = min(Shape::kTileBlocks, params_.blocks - item.block);
    const auto bytes = static_cast<uint32_t>(count * Shape::kUnitBytes);
    arrive_and_expect(ring_.full(at_), static_cast<uint32_t>(blocks) * bytes);
    const uint8_t* global_units =
        params_.image +
        (static_cast<int64_t>(item.expert) * params_.blocks + item.block) * params_.block_bytes +
        static_cast<int64_t>(unit) * Shape::kUnitBytes;
    for (int block = 0; block < blocks; ++block) {
      copy_bulk(shared_address(shared_.weights[at_.stage][block]),
                global_units + block * params_.block_bytes, bytes, ring_.full(at_));
    }
  }

  // Addresses are sums of what changes with the stage and constants of the thread.
  __device__ void copy_rows(int unit) const {
    const int row = thread_ / 8 % Shape::kTokens;
    const int first = thread_ / 8 / Shape::kTokens;  // Unit of the stage; 0 unless kUnitStep > 1.
    const int chunk = (thread_ ^ row) % 8;
    const uint32_t shared_rows = shared_address(shared_.rows[at_.stage][first]) +
                                 static_cast<uint32_t>(row * 128 + chunk * 16);
    const int first_byte = (unit + first) * kUnitRowBytes;
    if (first >= Shape::kUnits) return;
#pragma unroll
    for (int step = 0; step < Shape::kUnits; step += kUnitStep) {
      const bool has_cols =
          first_byte + step * kUnitRowBytes + thread_ % 8 * 16 < params_.row_bytes;
      const uint32_t mask = has_cols ? has_row_ : 0;
#pragma unroll
      for (int i = 0; i < kSources; ++i) {
        copy_16(
            shared_rows + static_cast<uint32_t>(step * Shape::kPanelBytes + i * kRowsPerPass * 128),
            global_rows_[i] + first_byte + step * kUnitRowBytes, (mask >> i & 1U) != 0 ? 16 : 0);
      }
    }
  }

  __device__ void copy_group_scales(int group) const {
    if (thread_ >= Shape::kTokens) return;
#pragma unroll
    for (int i = 0; i < Shape::kGroups; ++i) {
      const bool is_there = scale_source_ >= 0 && (group + i) * kGroupUnits < params_.units;
      const int64_t offset =
          is_there ? scale_source_ * params_.group_row_stride + (group + i) * params_.group_stride
                   : 0;
      copy_4(shared_address(&shared_.group_scales[at_.stage][i][thread_]),
             params_.group_scales + offset, is_there ? 4 : 0);
    }
  }

  const GemmParams& params_;
  GemmStorage<Shape>& shared_;
  const TheRing& ring_;
  int thread_;
  RingPosition<Shape::kStages> at_;
  const uint8_t* global_rows_[kSources];
  uint32_t has_row_ = 0;  // A bit for each.
  int scale_source_ = -1;
};

template <class Shape>
class Consumer {
 public:
  using Weights = typename Shape::Weights;
  using TheRing = Ring<Shape::kStages>;
  using Position = RingPosition<Shape::kStages>;
  static constexpr int kBlocks = Shape::kBlocks;
  using Sums = float[kBlocks][Shape::kSums];
  using BlockFragments = Fragments[kBlocks];

  __device__ Consumer(const GemmParams& params, GemmStorage<Shape>& shared, const TheRing& ring)
      : params_(params),
        shared_(shared),
        ring_(ring),
        warpgroup_(static_cast<int>(threadIdx.x) / kWarpgroup - 1),
        thread_(static_cast<int>(threadIdx.x) % kWarpgroup) {}

  __device__ void run() {
    for (WorkList work(params_, Shape::kTokens, Shape::kTileBlocks); work.has_next(); work.next()) {
      const WorkItem item = work.item();
      if (item.num_rows <= 0) continue;
      load_factors(params_, item, thread_, shared_.factors[warpgroup_]);
      Sums sums;
      multiply(sums);
      sync_threads(1 + warpgroup_, kWarpgroup);
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
        finish_tile<Shape::kTokens>(params_, item, item.block + warpgroup_ * kBlocks + i, sums[i],
                                    shared_.factors[warpgroup_], Weights::kRepair);
      }
      sync_threads(1 + warpgroup_, kWarpgroup);
    }
  }

 private:
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

template <class Shape>
__global__ void __launch_bounds__(kGemmThreads, Shape::kBlocksPerSm)
    multiply_groups_kernel(const __grid_constant__ GemmParams params) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<GemmStorage<Shape>*>(shared_bytes);
  const Ring<Shape::kStages> ring(shared.barriers);
  if (threadIdx.x == 0) ring.init(kWarpgroup + 1, kConsumers * kWarpgroup / 32);
  __syncthreads();
  wait_for_previous_grids();
  if (threadIdx.x < kWarpgroup) {
    give_registers<Shape::kProducerRegisters>();
    Producer<Shape>(params, shared, ring).run();
    allow_next_grid();
  } else {
    take_registers<Shape::kConsumerRegisters>();
    Consumer<Shape>(params, shared, ring).run();
  }
}

template <class Shape>
void launch_multiply_groups(const GemmParams& params, int num_sms, Stream stream) {
  constexpr auto kKernel = multiply_groups_kernel<Shape>;
  constexpr size_t kBytes = sizeof(GemmStorage<Shape>);
  static_assert(kBytes <= Shape::kSharedBytes);
  check_cuda(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(kBytes)),
             "cudaFuncSetAttribute");
  const int row_tiles = ceil_div(params.blocks, Shape::kTileBlocks);
  const int64_t most = int64_t{params.max_tiles} * params.splits * row_tiles;
  const int64_t blocks = std::min<int64_t>(most, int64_t{num_sms} * Shape::kBlocksPerSm);
  launch(kKernel, {dim3(static_cast<unsigned>(blocks)), dim3(kGemmThreads), kBytes}, stream,
         params);
}

template <class Weights, bool kHasGroups>
void launch_gemm(const GemmParams& params, const GemmLaunch& shape, Stream stream) {
  const auto launch_tokens = [&]<int kTokens>() {
    launch_multiply_groups<GemmShapeOf<Weights, kHasGroups, kTokens>>(params, shape.num_sms,
                                                                      stream);
  };
  if (shape.tokens == 8) return launch_tokens.template operator()<8>();
  if (shape.tokens == 16) return launch_tokens.template operator()<16>();
  if (shape.tokens == 32) return launch_tokens.template operator()<32>();
  if (shape.tokens == 64) return launch_tokens.template operator()<64>();
  launch_tokens.template operator()<128>();
}

}  // namespace narrowfloat
