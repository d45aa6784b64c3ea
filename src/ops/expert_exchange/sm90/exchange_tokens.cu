// Dispatch: plans where each token goes, stores its row in the memory of those ranks, and waits for
// the rows of all others.
//
// The flag of a rank is set once by the CTA that takes the last ticket of the sending kernel.
// Stores of the other CTAs are ordered before it: they come before their CTA's barrier and fence,
// the fence before the ticket, the last ticket before that CTA's fence and barrier, and these
// before the release of the flag at system scope.
#include <algorithm>

#include "base/int_math.h"
#include "comm/expert_ranks.h"
#include "device/ptx/grid_dependency.cuh"
#include "device/scan.cuh"
#include "device/vector_io.cuh"
#include "ops/expert_exchange/expert_exchange_sm90.h"
#include "ops/expert_exchange/sm90/exchange_cta.cuh"
#include "runtime/cuda/cuda_devices.h"
#include "runtime/cuda/launch.h"

namespace narrowfloat {
namespace {

constexpr int kPlanThreads = 1024;
constexpr int kPlanWarps = kPlanThreads / kWarpSize;
constexpr int kSendThreads = 256;
constexpr int kReceiveThreads = 256;

// --- Plan ----------------------------------------------------------------------------------------

// Finds the places of a token's ids; returns the ranks that have one of them, as a mask.
__device__ uint32_t place_ids(const PlanTokens& args, const ExchangePlan& plan, int64_t token) {
  uint32_t ranks = 0;
  for (int64_t slot = token * args.top_k; slot < (token + 1) * args.top_k; ++slot) {
    int32_t place = args.ids[slot];
    if (place < 0 || place >= args.experts) {
      place = -1;
    } else {
      if (args.place_of_expert != nullptr) place = args.place_of_expert[place];
      ranks |= 1U << rank_of_expert(args.num_places, args.ranks, place);
    }
    plan.ids[slot] = place;
    plan.weights[slot] = args.weights[slot];
  }
  return ranks;
}

// Says which rows will come back for a token, from the places that this thread has stored.
__device__ void expect_results(const PlanTokens& args, const ExchangePlan& plan, int64_t token) {
  const int32_t* const places = plan.places + token * args.ranks;
  if (!args.is_topk) {
    for (int32_t rank = 0; rank < args.ranks; ++rank) {
      plan.returned[token * args.ranks + rank] = {.rank = rank, .row = places[rank]};
    }
    return;
  }
  for (int32_t slot = 0; slot < args.top_k; ++slot) {
    const int64_t idx = token * args.top_k + slot;
    const int32_t place = plan.ids[idx];
    ReturnedRow row;
    if (place >= 0) {
      row.rank = rank_of_expert(args.num_places, args.ranks, place);
      row.row = places[row.rank] * args.top_k + slot;
    }
    plan.returned[idx] = row;
  }
}

// One CTA, a token for each thread at a time: so the places of a rank are those of a prefix sum in
// the order of tokens.
__global__ void __launch_bounds__(kPlanThreads)
    plan_tokens_kernel(const __grid_constant__ PlanTokens args,
                       const __grid_constant__ ExchangePlan plan) {
  // Rows for each rank of the tokens before a warp's.
  __shared__ uint32_t shared_before[kMaxRanks][kPlanWarps];
  __shared__ uint32_t shared_total[kMaxRanks];
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  wait_for_previous_grids();
  if (threadIdx.x < kMaxRanks) shared_total[threadIdx.x] = 0;
  for (int64_t first = 0; first < args.tokens; first += kPlanThreads) {
    const int64_t token = first + threadIdx.x;
    const bool is_token = token < args.tokens;
    const uint32_t ranks = is_token ? place_ids(args, plan, token) : 0;
    for (int rank = 0; rank < args.ranks; ++rank) {
      const uint32_t lanes = __ballot_sync(kFullWarp, (ranks >> rank & 1U) != 0);
      if (lane == 0) shared_before[rank][warp] = static_cast<uint32_t>(__popc(lanes));
    }
    __syncthreads();
    if (warp < args.ranks) {
      const uint32_t count = shared_before[warp][lane];
      const uint32_t total = shared_total[warp];
      const uint32_t inclusive = warp_inclusive_sum(count);
      shared_before[warp][lane] = total + inclusive - count;
      __syncwarp();
      if (lane == kWarpSize - 1) shared_total[warp] = total + inclusive;
    }
    __syncthreads();
    for (int rank = 0; rank < args.ranks; ++rank) {
      const uint32_t lanes = __ballot_sync(kFullWarp, (ranks >> rank & 1U) != 0);
      const auto before = static_cast<uint32_t>(__popc(lanes & ((1U << lane) - 1U)));
      if (!is_token) continue;
      plan.places[token * args.ranks + rank] =
          (ranks >> rank & 1U) != 0 ? static_cast<int32_t>(shared_before[rank][warp] + before) : -1;
    }
    if (is_token) expect_results(args, plan, token);
    __syncthreads();
  }
  if (static_cast<int>(threadIdx.x) < args.ranks) {
    plan.counts[threadIdx.x] = static_cast<int32_t>(shared_total[threadIdx.x]);
  }
  if (threadIdx.x == 0) ++*plan.call;
}

// --- Send ----------------------------------------------------------------------------------------

// Copies a part of a token's row to all ranks that it goes to: each unit is loaded once.
template <class Unit>
__device__ void send_units(const SentPart& part, int64_t token, const int32_t* shared_places,
                           const RankMemory& memory) {
  constexpr int kInFlight = 4;
  const uint8_t* const row = part.data + token * part.row_stride;
  const int64_t step = kSendThreads;
  for (int64_t first = threadIdx.x; first < part.units; first += kInFlight * step) {
    Unit units[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int64_t unit = first + i * step;
      if (unit < part.units) units[i] = load_readonly<Unit>(row + unit * part.unit_stride);
    }
    for (int rank = 0; rank < memory.ranks; ++rank) {
      const int32_t place = shared_places[rank];
      if (place < 0) continue;
      uint8_t* const target = memory.regions[rank] + part.offset + memory.rank * part.block_bytes +
                              place * part.units * static_cast<int64_t>(sizeof(Unit));
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const int64_t unit = first + i * step;
        if (unit < part.units) {
          store(target + unit * static_cast<int64_t>(sizeof(Unit)), units[i]);
        }
      }
    }
  }
}

__device__ void send_part(const SentPart& part, int64_t token, const int32_t* shared_places,
                          const RankMemory& memory) {
  switch (part.unit_bytes) {
    case 16:
      return send_units<uint4>(part, token, shared_places, memory);
    case 8:
      return send_units<uint2>(part, token, shared_places, memory);
    case 4:
      return send_units<uint32_t>(part, token, shared_places, memory);
    case 2:
      return send_units<uint16_t>(part, token, shared_places, memory);
    default:
      return send_units<uint8_t>(part, token, shared_places, memory);
  }
}

// True in all threads of the CTA that is the last of the grid to call it. What all CTAs stored
// before is ordered before what this one does next.
__device__ bool is_last_of_grid(uint32_t* tickets) {
  __shared__ bool shared_is_last;
  __syncthreads();
  if (threadIdx.x == 0) {
    fence_system();
    shared_is_last = atomicAdd(tickets, 1U) == gridDim.x - 1;
    fence_system();
    if (shared_is_last) *tickets = 0;
  }
  __syncthreads();
  return shared_is_last;
}

__global__ void __launch_bounds__(kSendThreads)
    send_tokens_kernel(const __grid_constant__ SendTokens args,
                       const __grid_constant__ ExchangePlan plan,
                       const __grid_constant__ RankMemory memory) {
  __shared__ int32_t shared_places[kMaxRanks];
  const int thread = static_cast<int>(threadIdx.x);
  wait_for_previous_grids();
  for (int64_t token = blockIdx.x; token < args.tokens; token += gridDim.x) {
    if (thread < memory.ranks) {
      shared_places[thread] = plan.places[token * memory.ranks + thread];
    }
    __syncthreads();
    for (int part = 0; part < args.num_parts; ++part) {
      send_part(args.parts[part], token, shared_places, memory);
    }
    __syncthreads();
  }
  if (!is_last_of_grid(plan.tickets) || thread >= memory.ranks) return;
  reinterpret_cast<int32_t*>(memory.regions[thread] + args.counts_offset)[memory.rank] =
      plan.counts[thread];
  store_release(flag_of(memory, args.flags_offset, thread, memory.rank), *plan.call);
}

// --- Receive -------------------------------------------------------------------------------------

// CTA (x, y) is number x of those that look at the ids of rank y.
__global__ void __launch_bounds__(kReceiveThreads)
    receive_tokens_kernel(const __grid_constant__ ReceiveTokens args,
                          const __grid_constant__ ExchangePlan plan,
                          const __grid_constant__ RankMemory memory) {
  __shared__ int32_t shared_count;
  const auto source = static_cast<int>(blockIdx.y);
  wait_for_previous_grids();
  if (threadIdx.x == 0) {
    const uint32_t call = *plan.call;
    int32_t count = 0;
    if (wait_for_flag(memory, args.flags_offset, source, call, Awaited::kTokens)) {
      count = static_cast<int32_t>(
          load_relaxed(reinterpret_cast<const uint32_t*>(args.counts + source)));
      if (count < 0 || count > args.max_tokens) {
        ExchangeCta cta;
        const auto peer = static_cast<uint32_t>(source);
        const uint32_t number = fault_number(call, Awaited::kTokens);
        report_fault(cta, memory, WaitFor{AllReduceFault::kBadIndex, peer, number},
                     static_cast<uint32_t>(count));
        abort_call(cta, memory, WaitFor{AllReduceFault::kAborted, peer, number});
        count = 0;
      }
    }
    shared_count = count;
  }
  __syncthreads();
  const int64_t sent = int64_t{shared_count} * args.top_k;
  const int64_t slots = args.max_tokens * args.top_k;
  int32_t* const ids = args.ids + source * slots;
  const int64_t step = int64_t{gridDim.x} * kReceiveThreads;
  for (int64_t i = int64_t{blockIdx.x} * kReceiveThreads + threadIdx.x; i < slots; i += step) {
    if (i >= sent || ids[i] < 0 || ids[i] >= args.num_places) ids[i] = -1;
  }
}

}  // namespace

void plan_tokens(const PlanTokens& args, const ExchangePlan& plan, Device device, Stream stream) {
  const CudaDeviceScope scope(device);
  launch(plan_tokens_kernel, {dim3(1), dim3(kPlanThreads)}, stream, args, plan);
}

void send_tokens(const SendTokens& args, const ExchangePlan& plan, const RankMemory& memory,
                 Device device, Stream stream) {
  const CudaDeviceScope scope(device);
  constexpr int64_t kCtasPerSm = 4;
  const int64_t most = cuda_device(device.index).num_sms * kCtasPerSm;
  const int64_t ctas = std::clamp<int64_t>(args.tokens, 1, most);
  launch(send_tokens_kernel, {dim3(static_cast<unsigned>(ctas)), dim3(kSendThreads)}, stream, args,
         plan, memory);
}

void receive_tokens(const ReceiveTokens& args, const ExchangePlan& plan, const RankMemory& memory,
                    Device device, Stream stream) {
  const CudaDeviceScope scope(device);
  constexpr int64_t kSlotsPerThread = 8;
  constexpr int64_t kMostCtas = 16;
  const int64_t ctas = std::min(
      ceil_div(args.max_tokens * args.top_k, kReceiveThreads * kSlotsPerThread), kMostCtas);
  launch(receive_tokens_kernel,
         {dim3(static_cast<unsigned>(ctas), static_cast<unsigned>(memory.ranks)),
          dim3(kReceiveThreads)},
         stream, args, plan, memory);
}

}  // namespace narrowfloat
