// sm90_grid: the permutation of a large batch in three launches (permute_sm90.cuh). Slots are cut
// into chunks, one for each block of the first and the last kernel.
//
//   count     block c: slots of every expert in chunk c; all blocks: clear the maps
//   lay out   one block: counts become the row of each chunk's first slot of an expert
//   place     block c: counts again, now by runs of warps; rows of the runs; places the slots
//
// The table between the kernels needs no workspace: chunk c's part lies in slot_to_row, in the
// places of the chunk's own slots, which nobody but block c writes, after it has read the table.
//
//   slot_to_row[chunk begin ...]   [0, experts): counts, then rows;  [experts, 2 experts): row ends
//
// Bytes a slot: 8 read (ids twice), 12 written, and 8 for each row of the buffers to clear.
#include <algorithm>
#include <cuda_runtime.h>

#include "base/int_math.h"
#include "ops/permute/permute_sm90.cuh"

namespace narrowfloat {
namespace {

// Of the counting kernel. Placing takes as many warps as it has counters for.
constexpr int kCountThreads = 512;
constexpr int64_t kMinChunkSlots = 2048;
constexpr int64_t kMaxChunks = 256;

struct GridParams {
  PermuteParams permute;
  uint32_t num_chunks = 0;
  uint32_t slots_per_chunk = 0;  // The last one has the remainder as well.
};

struct Chunk {
  uint32_t begin;
  uint32_t end;
};

__device__ Chunk own_chunk(const GridParams& params) {
  const uint32_t begin = blockIdx.x * params.slots_per_chunk;
  const bool is_last = blockIdx.x + 1 == params.num_chunks;
  return {.begin = begin,
          .end = is_last ? params.permute.num_slots : begin + params.slots_per_chunk};
}

__device__ uint32_t* chunk_table(const GridParams& params, uint32_t chunk) {
  return reinterpret_cast<uint32_t*>(params.permute.args.slot_to_row) +
         chunk * params.slots_per_chunk;
}

__global__ void __launch_bounds__(kCountThreads)
    count_chunks_kernel(const __grid_constant__ GridParams params) {
  extern __shared__ uint32_t shared_counts[];
  const uint32_t experts = params.permute.experts;
  const Chunk chunk = own_chunk(params);
  for (uint32_t e = threadIdx.x; e < experts; e += blockDim.x) shared_counts[e] = 0;
  __syncthreads();
  wait_for_previous_grids();
  for (uint32_t first = chunk.begin; first < chunk.end; first += blockDim.x) {
    const uint32_t expert = local_expert(params.permute, first + threadIdx.x, chunk.end);
    const unsigned same = __match_any_sync(kFullWarp, expert);
    const bool counts = (same & ((1U << threadIdx.x % kWarpSize) - 1)) == 0;
    // Sums of integers: the order does not matter.
    if (expert < experts && counts) atomicAdd(shared_counts + expert, __popc(same));
  }
  allow_next_grid();
  clear_maps(params.permute, blockIdx.x * blockDim.x + threadIdx.x, gridDim.x * blockDim.x);
  __syncthreads();
  uint32_t* const global_counts = chunk_table(params, blockIdx.x);
  for (uint32_t e = threadIdx.x; e < experts; e += blockDim.x) global_counts[e] = shared_counts[e];
}

__device__ uint32_t count_of_expert(const GridParams& params, uint32_t expert) {
  uint32_t count = 0;
#pragma unroll 16
  for (uint32_t chunk = 0; chunk < params.num_chunks; ++chunk) {
    count += load_readonly<uint32_t>(chunk_table(params, chunk) + expert);
  }
  return count;
}

// Counts of an expert become rows from `base` on. Loads of several chunks are in flight at once.
__device__ void store_rows(const GridParams& params, uint32_t expert, uint32_t base,
                           uint32_t row_end) {
  constexpr uint32_t kAtOnce = 8;
  uint32_t row = base;
  for (uint32_t first = 0; first < params.num_chunks; first += kAtOnce) {
    uint32_t counts[kAtOnce];
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      counts[i] = first + i < params.num_chunks ? chunk_table(params, first + i)[expert] : 0U;
    }
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      if (first + i >= params.num_chunks) continue;
      uint32_t* const global_rows = chunk_table(params, first + i);
      global_rows[expert] = row;
      global_rows[params.permute.experts + expert] = row_end;
      row += counts[i];
    }
  }
}

__global__ void __launch_bounds__(kPermuteMaxThreads)
    lay_out_chunks_kernel(const __grid_constant__ GridParams params) {
  __shared__ uint32_t shared_scratch[kPermuteMaxThreads / kWarpSize];
  __shared__ uint32_t shared_counts[kMaxLocalExperts];
  const ExpertRange own = own_experts(params.permute);
  wait_for_previous_grids();
  uint32_t rows = 0;
  for (uint32_t e = own.begin; e < own.end; ++e) {
    shared_counts[e] = count_of_expert(params, e);
    rows += round_up_to_tile(params.permute, shared_counts[e]);
  }
  allow_next_grid();
  const BlockSum sum = block_sum(rows, shared_scratch);
  uint32_t base = sum.before;
  for (uint32_t e = own.begin; e < own.end; ++e) {
    store_rows(params, e, base, base + shared_counts[e]);
    base += round_up_to_tile(params.permute, shared_counts[e]);
  }
  if (threadIdx.x == 0) store_totals(params.permute, sum.total);
}

// Counts of runs become rows from the chunk's rows on. Then the table may be overwritten.
__device__ void lay_out_runs(const GridParams& params, uint32_t num_runs, uint32_t* shared_counters,
                             uint32_t* shared_row_ends) {
  const uint32_t experts = params.permute.experts;
  const uint32_t* const global_rows = chunk_table(params, blockIdx.x);
  for (uint32_t e = threadIdx.x; e < experts; e += blockDim.x) {
    uint32_t row = load_readonly<uint32_t>(global_rows + e);
    shared_row_ends[e] = load_readonly<uint32_t>(global_rows + experts + e);
#pragma unroll 8
    for (uint32_t run = 0; run < num_runs; ++run) {
      uint32_t& counter = shared_counters[run * experts + e];
      const uint32_t count = counter;
      counter = row;
      row += count;
    }
  }
}

__global__ void __launch_bounds__(kPermuteMaxThreads)
    place_chunks_kernel(const __grid_constant__ GridParams params) {
  extern __shared__ uint32_t shared_row_ends[];
  const uint32_t experts = params.permute.experts;
  uint32_t* const shared_counters = shared_row_ends + experts;
  const uint32_t warp = threadIdx.x / kWarpSize;
  const uint32_t num_runs = blockDim.x / kWarpSize;
  const Chunk chunk = own_chunk(params);
  const uint32_t slots = chunk.end - chunk.begin;
  const uint32_t slots_per_run = (slots + blockDim.x - 1) / blockDim.x * kWarpSize;
  const SlotRun run = slot_run(chunk.begin, chunk.end, slots_per_run, warp);
  for (uint32_t i = threadIdx.x; i < num_runs * experts; i += blockDim.x) shared_counters[i] = 0;
  __syncthreads();
  wait_for_previous_grids();
  count_run(params.permute, run, shared_counters + warp * experts);
  allow_next_grid();
  __syncthreads();
  lay_out_runs(params, num_runs, shared_counters, shared_row_ends);
  __syncthreads();
  place_run(params.permute, run, shared_counters + warp * experts, shared_row_ends);
}

void launch_permute_grid(const PermuteProblem& problem, const PermuteArgs& args, Stream stream) {
  const CudaDeviceScope scope(problem.device);
  const int64_t experts = problem.layout.local_experts;
  const int64_t slots = problem.layout.tokens * problem.layout.slots;
  const int64_t chunk = std::max({kMinChunkSlots, 2 * experts, ceil_div(slots, kMaxChunks)});
  GridParams params{.permute = make_permute_params(problem, args)};
  params.num_chunks = static_cast<uint32_t>(std::max<int64_t>(1, slots / chunk));
  params.slots_per_chunk = static_cast<uint32_t>(chunk);
  const int64_t warps =
      std::min<int64_t>(kPermuteMaxThreads / kWarpSize, (kPermuteMaxCounters - experts) / experts);
  const size_t expert_bytes = static_cast<size_t>(experts) * sizeof(uint32_t);
  const dim3 blocks(params.num_chunks);
  launch(count_chunks_kernel, {blocks, dim3(kCountThreads), expert_bytes}, stream, params);
  launch(lay_out_chunks_kernel, {dim3(1), dim3(kPermuteMaxThreads)}, stream, params);
  launch(place_chunks_kernel,
         {blocks, dim3(static_cast<unsigned>(warps * kWarpSize)),
          static_cast<size_t>(warps + 1) * expert_bytes},
         stream, params);
}

Support supports(const PermuteProblem& problem) {
  const Support device = runs_on_cuda(problem.device);
  if (!device.ok()) return device;
  if (problem.layout.tokens * problem.layout.slots < 2 * int64_t{problem.layout.local_experts}) {
    return Support::no("fewer slots than two for each local expert");
  }
  return Support::yes();
}

}  // namespace

const PermuteImpl kPermuteSm90Grid{"sm90_grid", supports, launch_permute_grid};

}  // namespace narrowfloat
