// The grouped GEMM of Hopper: out[token, n] = epilogue(sum over k of x[token, k] * w[n, k]), as
// D^T = W * X^T. Weight rows are wgmma's M, tokens its N, so that few tokens waste nothing, and the
// weights are decoded in registers to 16-bit floats, the A operand, exactly.
//
//   block   producer warpgroup | consumer warpgroup 0: 64 weight rows | consumer warpgroup 1: 64
//   stage   kUnits units of 64 columns: their weights by bulk copies, the activation rows by
//           16-byte copies that gather rows and swizzle, zeros for absent rows and columns
//   work    (two blocks of 64 weight rows) x (token tile), persistent blocks over all of them in
//           the same order for both sides (work_list.cuh)
//
// A consumer multiplies a unit while it decodes the next one. Where activations have a scale every
// 128 columns, sums start anew there and are added in fp32 registers, times that scale and the
// weights' own of 128 x 128. docs/kernels/grouped_gemm_sm90.md has the arithmetic and figures.
#pragma once

#include <cuda_runtime.h>

#include "device/ptx/async_copy.cuh"
#include "device/ptx/grid_dependency.cuh"
#include "device/ptx/wgmma.cuh"
#include "device/ring.cuh"
#include "ops/grouped_gemm/sm90/finish.cuh"
#include "ops/grouped_gemm/sm90/fragments.cuh"
#include "ops/grouped_gemm/sm90/work_list.cuh"
#include "runtime/cuda/launch.h"

namespace narrowfloat {

inline constexpr int kGroupUnits = 2;  // Units a promotion group has.

// kWeights decodes units; kHasGroups: sums are promoted every 128 columns.
template <class WeightsPolicy, bool kHasGroupSums, int kTileTokens>
struct GemmShapeOf {
  using Weights = WeightsPolicy;
  static constexpr bool kHasGroups = kHasGroupSums;
  static constexpr int kTokens = kTileTokens;
  static constexpr int kSums = kTokens / 2;  // Of a thread.
  static constexpr bool kIsSmall = kTokens <= 32;

  // Registers: 2 blocks of 384 threads on a multiprocessor for small tiles.
  static constexpr int kBlocksPerSm = kIsSmall ? 2 : 1;
  static constexpr int kProducerRegisters = kIsSmall ? 32 : 56;
  static constexpr int kConsumerRegisters = kIsSmall ? 104 : 224;

  // Around 16 KB of weights a stage; whole promotion groups.
  static constexpr int kBits = code_bits_of(Weights::kCoding);
  static constexpr int kUnits = !kIsSmall || kBits == 8 ? 2 : (kBits == 4 ? 4 : 1);
  static constexpr int kGroups = kHasGroups ? kUnits / kGroupUnits : 0;
  static constexpr int kUnitBytes = unit_bytes(Weights::kCoding);
  static constexpr int kBlockStageBytes = kUnits * kUnitBytes;
  static constexpr int kPanelBytes = kTokens * kUnitCols * 2;  // A unit of activations.
  static constexpr int kStageBytes =
      2 * kBlockStageBytes + kUnits * kPanelBytes + kGroups * kTokens * 4;
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
  uint8_t weights[Shape::kStages][kConsumers][Shape::kBlockStageBytes];
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
    for (WorkList work(params_, Shape::kTokens); work.has_next(); work.next()) {
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
  static constexpr int kRowsPerPass = kWarpgroup / 8;  // Of a unit, 16 bytes a thread.
  static constexpr int kPasses = (Shape::kUnits * Shape::kTokens + kRowsPerPass - 1) / kRowsPerPass;
  static constexpr int kSources = Shape::kTokens > kRowsPerPass ? Shape::kTokens / kRowsPerPass : 1;

  // Row of the activations behind row `row` of the tile; -1 for absent ones.
  __device__ int source_of(const WorkItem& item, int row) const {
    if (row >= item.num_rows) return -1;
    const int64_t tile_row = item.first_row + row;
    if (params_.row_to_token == nullptr) return static_cast<int>(tile_row);
    const int token = params_.row_to_token[tile_row];
    return token >= 0 && token < params_.input_rows ? token : -1;
  }

  __device__ void find_rows(const WorkItem& item) {
#pragma unroll
    for (int i = 0; i < kSources; ++i) {
      sources_[i] = source_of(item, (thread_ / 8 + i * kRowsPerPass) % Shape::kTokens);
    }
    if constexpr (Shape::kHasGroups) {
      scale_source_ = thread_ < Shape::kTokens ? source_of(item, thread_) : -1;
    }
  }

  __device__ void copy_weights(const WorkItem& item, int unit) const {
    if (thread_ != 0) return;
    const int count = min(Shape::kUnits, params_.units - unit);
    const int blocks = min(kConsumers, params_.blocks - item.block);
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

  // Rows of all units of the stage one after another, 16 a pass.
  __device__ void copy_rows(int unit) const {
    // Not unrolled: the addresses of all passes would not fit the producer's registers.
#pragma unroll 1
    for (int pass = 0; pass < kPasses; pass += kSources) {
#pragma unroll
      for (int i = 0; i < kSources; ++i) {
        const int index = thread_ / 8 + (pass + i) * kRowsPerPass;
        if (index < Shape::kUnits * Shape::kTokens) copy_chunk(unit, index, sources_[i]);
      }
    }
  }

  // Row `index` of the stage is a row of a unit; this thread's 16 bytes of it.
  __device__ void copy_chunk(int unit, int index, int source) const {
    const int panel = index / Shape::kTokens;
    const int row = index % Shape::kTokens;
    const int chunk = thread_ % 8;
    const int col = (unit + panel) * kUnitCols + chunk * 8;
    const bool is_there = source >= 0 && col < params_.cols;
    const int64_t offset = is_there ? static_cast<int64_t>(source) * params_.cols + col : 0;
    copy_16(shared_address(shared_.rows[at_.stage][panel]) +
                static_cast<uint32_t>(row * 128 + ((chunk ^ (row % 8)) << 4)),
            params_.values + offset, is_there ? 16 : 0);
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
  int sources_[kSources];
  int scale_source_ = -1;
};

template <class Shape>
class Consumer {
 public:
  using Weights = typename Shape::Weights;
  using TheRing = Ring<Shape::kStages>;
  using Position = RingPosition<Shape::kStages>;
  using Sums = float[Shape::kSums];

  __device__ Consumer(const GemmParams& params, GemmStorage<Shape>& shared, const TheRing& ring)
      : params_(params),
        shared_(shared),
        ring_(ring),
        warpgroup_(static_cast<int>(threadIdx.x) / kWarpgroup - 1),
        thread_(static_cast<int>(threadIdx.x) % kWarpgroup) {}

  __device__ void run() {
    for (WorkList work(params_, Shape::kTokens); work.has_next(); work.next()) {
      const WorkItem item = work.item();
      if (item.num_rows <= 0) continue;
      load_factors(params_, item, thread_, shared_.factors[warpgroup_]);
      Sums sums;
      multiply(sums);
      sync_threads(1 + warpgroup_, kWarpgroup);
      finish_tile<Shape::kTokens>(params_, item, item.block + warpgroup_, sums,
                                  shared_.factors[warpgroup_], Weights::kRepair);
      sync_threads(1 + warpgroup_, kWarpgroup);
    }
  }

 private:
  // Two sets of fragments: one in the tensor core, one being decoded.
  __device__ void multiply(Sums& sums) {
    Fragments even;
    Fragments odd;
    if constexpr (Shape::kHasGroups) {
#pragma unroll
      for (float& sum : sums) sum = 0.0F;
    }
    slot_ = 0;
    ring_.wait_full(at_);
    fence_async_proxy();
    decode(at_, 0, even);
    for (int unit = 0; unit < params_.units; unit += 2) {
      step(unit, even, odd, sums);
      if (unit + 1 < params_.units) step(unit + 1, odd, even, sums);
    }
  }

  __device__ const uint8_t* weights_of(const Position& at, int slot) const {
    return shared_.weights[at.stage][warpgroup_] + slot * Shape::kUnitBytes;
  }

  __device__ void decode(const Position& at, int slot, Fragments& fragments) const {
    Weights::decode(weights_of(at, slot), thread_, fragments);
#pragma unroll
    for (int i = 0; i < 16; ++i) keep_before(fragments[i / 4][i % 4]);
  }

  __device__ void step(int unit, Fragments& now, Fragments& next, Sums& sums) {
    if constexpr (Shape::kHasGroups) {
      step_of_group(unit, now, next, sums);
    } else {
      issue(unit > 0, now, sums);
      prepare_next(unit, next);
      wgmma_wait();
      advance(unit);
    }
  }

  __device__ void step_of_group(int unit, Fragments& now, Fragments& next, Sums& sums) {
    issue(unit % kGroupUnits > 0, now, group_sums_);
    prepare_next(unit, next);
    wgmma_wait();
    if (unit % kGroupUnits == kGroupUnits - 1 || unit + 1 == params_.units) promote(sums);
    advance(unit);
  }

  __device__ void issue(bool accumulate, Fragments& now, Sums& sums) {
    const uint64_t rows = swizzled_descriptor(shared_address(shared_.rows[at_.stage][slot_]));
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      Weights::multiply(sums, now[k], rows + 2 * k, accumulate || k > 0 ? 1 : 0);
    }
    wgmma_commit();
  }

  __device__ void prepare_next(int unit, Fragments& next) {
    if (unit + 1 == params_.units) return;
    if (slot_ + 1 < Shape::kUnits) {
      decode(at_, slot_ + 1, next);
      return;
    }
    Position following = at_;
    following.advance();
    ring_.wait_full(following);
    fence_async_proxy();
    decode(following, 0, next);
  }

  __device__ void promote(Sums& sums) const {
    float weight_scale = 1.0F;
    if constexpr (Weights::kCoding == WeightCoding::kFp8) {
      weight_scale = Weights::unit_scale(weights_of(at_, slot_));
    }
    const float* scales = shared_.group_scales[at_.stage][slot_ / kGroupUnits] + 2 * (thread_ % 4);
#pragma unroll
    for (int i = 0; i < Shape::kSums; i += 4) {
      const float2 pair = *reinterpret_cast<const float2*>(scales + 2 * i);
      const float first = __fmul_rn(pair.x, weight_scale);
      const float second = __fmul_rn(pair.y, weight_scale);
      sums[i] = __fmaf_rn(first, group_sums_[i], sums[i]);
      sums[i + 1] = __fmaf_rn(second, group_sums_[i + 1], sums[i + 1]);
      sums[i + 2] = __fmaf_rn(first, group_sums_[i + 2], sums[i + 2]);
      sums[i + 3] = __fmaf_rn(second, group_sums_[i + 3], sums[i + 3]);
    }
  }

  // To the next unit; the stage goes back with its last one.
  __device__ void advance(int unit) {
    if (++slot_ < Shape::kUnits && unit + 1 < params_.units) return;
    if (thread_ % 32 == 0) ring_.release(at_);
    at_.advance();
    slot_ = 0;
  }

  const GemmParams& params_;
  GemmStorage<Shape>& shared_;
  const TheRing& ring_;
  int warpgroup_;
  int thread_;
  Position at_;
  int slot_ = 0;
  float group_sums_[Shape::kHasGroups ? Shape::kSums : 1];
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
  const int64_t most = int64_t{params.max_tiles} * params.splits * params.row_tiles;
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
