// sm90_block: the permutation of a small batch in one launch (permute_sm90.cuh).
//
//   all threads   clear counters                       | barrier
//   warp w        counts run w; all: clear the maps    | barrier
//   thread e      adds up the runs of expert e         | sum over experts in the CTA
//   thread e      turns counts into rows               | barrier
//   warp w        places run w
//
// In decode the kernel is a chain of latencies: the ids, the barriers, the sum, the stores. Above
// 256 slots the scattered stores of one SM would take longest. Then up to 16 CTAs each count and
// lay out everything, which is faster than to share it, and each writes only a share of the tiles
// with their rows, and of the slots: no CTA reads results of another.
#include <algorithm>
#include <cuda_runtime.h>
#include <string>

#include "base/int_math.h"
#include "ops/permute/permute_sm90.cuh"

namespace narrowfloat {
namespace {

constexpr int64_t kMaxSlots = 4096;
constexpr int64_t kSlotsPerBlock = 256;
constexpr int kManyParts = 8;

struct BlockParams {
  PermuteParams permute;
  uint32_t num_runs = 0;
  uint32_t slots_per_run = 0;
  uint32_t slots_per_block = 0;  // Slots that the CTA writes.
};

struct SharedStorage {
  uint32_t scratch[kPermuteMaxThreads / kWarpSize];
  // Dynamic shared memory: row_ends[experts], then counters[num_runs][experts].
};

__device__ uint32_t count_of_expert(const BlockParams& params, const uint32_t* shared_counters,
                                    uint32_t expert) {
  uint32_t count = 0;
#pragma unroll 8
  for (uint32_t run = 0; run < params.num_runs; ++run) {
    count += shared_counters[run * params.permute.experts + expert];
  }
  return count;
}

// Turns counts of this thread's experts into rows; every thread gets the number of rows in use.
__device__ uint32_t lay_out_experts(const BlockParams& params, uint32_t* shared_counters,
                                    uint32_t* shared_row_ends, uint32_t* shared_scratch) {
  const ExpertRange own = own_experts(params.permute);
  uint32_t rows = 0;
  for (uint32_t e = own.begin; e < own.end; ++e) {
    rows += round_up_to_tile(params.permute, count_of_expert(params, shared_counters, e));
  }
  const BlockSum sum = block_sum(rows, shared_scratch);
  uint32_t base = sum.before;
  for (uint32_t e = own.begin; e < own.end; ++e) {
    const uint32_t row =
        lay_out_runs(shared_counters + e, params.permute.experts, params.num_runs, base);
    shared_row_ends[e] = row;
    base += round_up_to_tile(params.permute, row - base);
  }
  return sum.total;
}

template <int kParts>
__global__ void __launch_bounds__(kPermuteMaxThreads)
    permute_block_kernel(const __grid_constant__ BlockParams params) {
  __shared__ SharedStorage shared;
  NF_DYNAMIC_SHARED(uint32_t, shared_row_ends, 4);
  uint32_t* const shared_counters = shared_row_ends + params.permute.experts;
  const uint32_t warp = threadIdx.x / kWarpSize;
  const bool has_run = warp < params.num_runs;
  const SlotRun run = slot_run(0, params.permute.num_slots, params.slots_per_run, warp);
  uint32_t* const shared_own = shared_counters + warp * params.permute.experts;
  for (uint32_t i = threadIdx.x; i < params.num_runs * params.permute.experts; i += blockDim.x) {
    shared_counters[i] = 0;
  }
  __syncthreads();
  wait_for_previous_grids();
  SlotBatch<kParts> kept;
  if (has_run) kept = count_run<kParts>(params.permute, run, shared_own);
  trigger_dependent_launch();
  const TileRange tiles = clear_own_tiles(params.permute);
  __syncthreads();
  const uint32_t rows = lay_out_experts(params, shared_counters, shared_row_ends, shared.scratch);
  if (blockIdx.x == 0 && threadIdx.x == 0) store_totals(params.permute, rows);
  __syncthreads();
  const uint32_t num_slots = params.permute.num_slots;
  const SlotRun slots = slot_run(0, num_slots, params.slots_per_block, blockIdx.x);
  if (has_run) place_run(params.permute, run, kept, {shared_own, shared_row_ends, tiles, slots});
}

void launch_permute_block(const PermuteProblem& problem, const PermuteArgs& args, Stream stream) {
  const CudaDeviceScope scope(problem.device);
  const int64_t experts = problem.layout.local_experts;
  const int64_t slots = problem.layout.tokens * problem.layout.slots;
  const int64_t warps = permute_warps(experts);
  BlockParams params{.permute = make_permute_params(problem, args)};
  params.slots_per_run =
      static_cast<uint32_t>(std::max<int64_t>(1, ceil_div(slots, warps * kWarpSize)) * kWarpSize);
  params.num_runs = static_cast<uint32_t>(ceil_div(slots, params.slots_per_run));
  // Ranks of slots that do not fit into registers are kept in slot_to_row, which only a single CTA
  // may do.
  const bool may_share = params.slots_per_run <= SlotBatch<kManyParts>::kSlots;
  const int64_t blocks = may_share ? std::max<int64_t>(1, ceil_div(slots, kSlotsPerBlock)) : 1;
  params.slots_per_block = static_cast<uint32_t>(ceil_div(slots, blocks));
  // Threads for the runs, for the experts, and for the rows to clear.
  const int64_t wanted = std::max<int64_t>(
      {params.num_runs * int64_t{kWarpSize}, experts, problem.layout.max_rows / (4 * blocks)});
  const int64_t threads = std::min<int64_t>(kPermuteMaxThreads, round_up(wanted, kWarpSize));
  const LaunchShape shape{dim3(static_cast<unsigned>(blocks)), dim3(static_cast<unsigned>(threads)),
                          static_cast<size_t>((params.num_runs + 1) * experts) * sizeof(uint32_t)};
  if (params.slots_per_run <= kWarpSize) {
    launch(permute_block_kernel<1>, shape, stream, params);
  } else {
    launch(permute_block_kernel<kManyParts>, shape, stream, params);
  }
}

Support supports(const PermuteProblem& problem) {
  // sm90_grid's table takes two slots per local expert, so this kernel also takes smaller problems.
  const int64_t most = std::max(kMaxSlots, 2 * int64_t{problem.layout.local_experts} - 1);
  if (problem.layout.tokens * problem.layout.slots > most) {
    return Support::no("more than " + std::to_string(most) + " slots");
  }
  return Support::yes();
}

}  // namespace

const PermuteImpl kPermuteSm90Block{"sm90_block", on_own_code<supports>, launch_permute_block};
const PermuteImpl kPermuteSm80Block{"sm80_block", on_portable_code<supports>, launch_permute_block};

}  // namespace narrowfloat
