// sm90_grid: the permutation of a large batch in three launches (permute_sm90.cuh). Slots are cut
// into chunks, one for each CTA of the first and the last kernel.
//
//   count     CTA c: slots of every expert in chunk c; all CTAs: clear the maps
//   lay out   one CTA: counts become the row of each chunk's first slot of an expert
//   place     CTA c: counts again, now by runs of warps; rows of the runs; places the slots
//
// The table between the kernels needs no workspace: chunk c's part is stored in slot_to_row, at the
// places of the chunk's own slots, which only CTA c writes, after it has read the table.
//
//   slot_to_row[chunk begin ...]   [0, experts): counts, then rows;  [experts, 2 experts): row ends
//
// Bytes per slot: 8 read (ids twice), 12 written, and 8 for each row of the buffers to clear.
#include <algorithm>
#include <cuda_runtime.h>

#include "base/int_math.h"
#include "ops/permute/permute_sm90.cuh"

namespace narrowfloat {
namespace {

constexpr int kCountThreads = 512;
constexpr int64_t kMinChunkSlots = 512;
constexpr int64_t kMaxChunks = 64;
constexpr int kParts = 2;  // Parts of a batch in the placing kernel.
constexpr int64_t kMaxParts = 16;

struct GridParams {
  PermuteParams permute;
  uint32_t num_chunks = 0;
  uint32_t slots_per_chunk = 0;  // The last chunk also has the remainder.
  uint32_t parts = 1;            // Parts of the threads that lay out.
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
  NF_DYNAMIC_SHARED(uint32_t, shared_counts, 4);
  const uint32_t experts = params.permute.experts;
  const Chunk chunk = own_chunk(params);
  for (uint32_t e = threadIdx.x; e < experts; e += blockDim.x) shared_counts[e] = 0;
  __syncthreads();
  wait_for_previous_grids();
  for (uint32_t first = chunk.begin; first < chunk.end; first += blockDim.x) {
    const uint32_t expert = local_expert(params.permute, first + threadIdx.x, chunk.end);
    // Sums of integers do not depend on the order.
    if (expert < experts) atomicAdd(shared_counts + expert, 1U);
  }
  trigger_dependent_launch();
  clear_own_tiles(params.permute);
  __syncthreads();
  uint32_t* const global_counts = chunk_table(params, blockIdx.x);
  for (uint32_t e = threadIdx.x; e < experts; e += blockDim.x) global_counts[e] = shared_counts[e];
}

// Calls body(table, count) for the counts of an expert in chunks [begin, end), with several loads
// in flight at once.
template <typename Body>
__device__ void for_chunks(const GridParams& params, uint32_t expert, uint32_t begin, uint32_t end,
                           const Body& body) {
  constexpr uint32_t kAtOnce = 16;
  for (uint32_t first = begin; first < end; first += kAtOnce) {
    uint32_t counts[kAtOnce];
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      counts[i] = first + i < end ? chunk_table(params, first + i)[expert] : 0U;
    }
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      if (first + i < end) body(chunk_table(params, first + i), counts[i]);
    }
  }
}

struct LayOutStorage {
  uint32_t counts[kMaxLocalExperts];  // [parts][experts]: slots of an expert in a part's chunks.
  uint32_t bases[kMaxLocalExperts];   // First row of an expert.
  uint32_t scratch[kPermuteMaxThreads / kWarpSize];
};

__device__ uint32_t count_of_expert(const GridParams& params, const LayOutStorage& shared,
                                    uint32_t expert, uint32_t parts) {
  uint32_t count = 0;
  for (uint32_t part = 0; part < parts; ++part) {
    count += shared.counts[part * params.permute.experts + expert];
  }
  return count;
}

// Computes the rows of all experts; ends with a barrier.
__device__ void lay_out_experts(const GridParams& params, LayOutStorage& shared) {
  const ExpertRange own = own_experts(params.permute);
  uint32_t rows = 0;
  for (uint32_t e = own.begin; e < own.end; ++e) {
    rows += round_up_to_tile(params.permute, count_of_expert(params, shared, e, params.parts));
  }
  const BlockSum sum = block_sum(rows, shared.scratch);
  uint32_t base = sum.before;
  for (uint32_t e = own.begin; e < own.end; ++e) {
    shared.bases[e] = base;
    base += round_up_to_tile(params.permute, count_of_expert(params, shared, e, params.parts));
  }
  if (threadIdx.x == 0) store_totals(params.permute, sum.total);
  __syncthreads();
}

// Part p of the threads takes a share of the chunks, its thread e expert e. Above 1024 experts
// there is one part, whose threads take several experts each.
__global__ void __launch_bounds__(kPermuteMaxThreads)
    lay_out_chunks_kernel(const __grid_constant__ GridParams params) {
  __shared__ LayOutStorage shared;
  const uint32_t experts = params.permute.experts;
  const uint32_t part = params.parts > 1 ? threadIdx.x / experts : 0;
  const uint32_t each = (params.num_chunks + params.parts - 1) / params.parts;
  const uint32_t begin = min(part * each, params.num_chunks);
  const uint32_t end = part < params.parts ? min(begin + each, params.num_chunks) : begin;
  const uint32_t first = threadIdx.x - part * experts;
  const uint32_t last = part < params.parts ? experts : 0;
  wait_for_previous_grids();
  for (uint32_t e = first; e < last; e += blockDim.x) {
    uint32_t count = 0;
    for_chunks(params, e, begin, end, [&](uint32_t* /*table*/, uint32_t n) { count += n; });
    shared.counts[part * experts + e] = count;
  }
  trigger_dependent_launch();
  __syncthreads();
  lay_out_experts(params, shared);
  for (uint32_t e = first; e < last; e += blockDim.x) {
    uint32_t row = shared.bases[e] + count_of_expert(params, shared, e, part);
    const uint32_t row_end = shared.bases[e] + count_of_expert(params, shared, e, params.parts);
    for_chunks(params, e, begin, end, [&](uint32_t* global_rows, uint32_t count) {
      global_rows[e] = row;
      global_rows[experts + e] = row_end;
      row += count;
    });
  }
}

// Loads the chunk's part of the table, which may be overwritten afterwards.
__device__ void load_rows(const GridParams& params, uint32_t* shared_rows,
                          uint32_t* shared_row_ends) {
  const uint32_t experts = params.permute.experts;
  const uint32_t* const global_rows = chunk_table(params, blockIdx.x);
  for (uint32_t e = threadIdx.x; e < experts; e += blockDim.x) {
    shared_rows[e] = load_readonly<uint32_t>(global_rows + e);
    shared_row_ends[e] = load_readonly<uint32_t>(global_rows + experts + e);
  }
}

__global__ void __launch_bounds__(kPermuteMaxThreads)
    place_chunks_kernel(const __grid_constant__ GridParams params) {
  NF_DYNAMIC_SHARED(uint32_t, shared_row_ends, 4);
  const uint32_t experts = params.permute.experts;
  uint32_t* const shared_rows = shared_row_ends + experts;
  uint32_t* const shared_counters = shared_rows + experts;
  const uint32_t warp = threadIdx.x / kWarpSize;
  const uint32_t num_runs = blockDim.x / kWarpSize;
  uint32_t* const shared_own = shared_counters + warp * experts;
  const Chunk chunk = own_chunk(params);
  const uint32_t slots = chunk.end - chunk.begin;
  const uint32_t slots_per_run = (slots + blockDim.x - 1) / blockDim.x * kWarpSize;
  const SlotRun run = slot_run(chunk.begin, chunk.end, slots_per_run, warp);
  for (uint32_t i = threadIdx.x; i < num_runs * experts; i += blockDim.x) shared_counters[i] = 0;
  wait_for_previous_grids();
  load_rows(params, shared_rows, shared_row_ends);
  __syncthreads();
  const SlotBatch<kParts> kept = count_run<kParts>(params.permute, run, shared_own);
  trigger_dependent_launch();
  __syncthreads();
  for (uint32_t e = threadIdx.x; e < experts; e += blockDim.x) {
    lay_out_runs(shared_counters + e, experts, num_runs, shared_rows[e]);
  }
  __syncthreads();
  const PermuteParams& permute = params.permute;
  place_run(permute, run, kept, {shared_own, shared_row_ends, {0, permute.max_tiles}, run});
}

void launch_permute_grid(const PermuteProblem& problem, const PermuteArgs& args, Stream stream) {
  const CudaDeviceScope scope(problem.device);
  const int64_t experts = problem.layout.local_experts;
  const int64_t slots = problem.layout.tokens * problem.layout.slots;
  const int64_t chunk = std::max({kMinChunkSlots, 2 * experts, ceil_div(slots, kMaxChunks)});
  GridParams params{.permute = make_permute_params(problem, args)};
  params.num_chunks = static_cast<uint32_t>(std::max<int64_t>(1, slots / chunk));
  params.slots_per_chunk = static_cast<uint32_t>(chunk);
  params.parts =
      static_cast<uint32_t>(std::clamp<int64_t>(kPermuteMaxThreads / experts, 1, kMaxParts));
  const int64_t warps = std::min(permute_warps(experts), ceil_div(chunk, kParts * kWarpSize));
  const size_t expert_bytes = static_cast<size_t>(experts) * sizeof(uint32_t);
  const dim3 blocks(params.num_chunks);
  launch(count_chunks_kernel, {blocks, dim3(kCountThreads), expert_bytes}, stream, params);
  launch(lay_out_chunks_kernel, {dim3(1), dim3(kPermuteMaxThreads)}, stream, params);
  launch(place_chunks_kernel,
         {blocks, dim3(static_cast<unsigned>(warps * kWarpSize)),
          static_cast<size_t>(warps + 2) * expert_bytes},
         stream, params);
}

Support supports(const PermuteProblem& problem) {
  if (problem.layout.tokens * problem.layout.slots < 2 * int64_t{problem.layout.local_experts}) {
    return Support::no("fewer slots than two for each local expert");
  }
  return Support::yes();
}

}  // namespace

const PermuteImpl kPermuteSm90Grid{"sm90_grid", on_own_code<supports>, launch_permute_grid};
const PermuteImpl kPermuteSm80Grid{"sm80_grid", on_portable_code<supports>, launch_permute_grid};

}  // namespace narrowfloat
