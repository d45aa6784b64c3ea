// Dispatch: plans where each token goes, stores its row in the blocks of those ranks, and waits for
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
__device__ uint64_t place_ids(const PlanTokens& args, const ExchangePlan& plan, int64_t token) {
  uint64_t ranks = 0;
  for (int64_t slot = token * args.top_k; slot < (token + 1) * args.top_k; ++slot) {
    int32_t place = args.ids[slot];
    if (place < 0 || place >= args.experts) {
      place = -1;
    } else {
      if (args.place_of_expert != nullptr) place = args.place_of_expert[place];
      ranks |= uint64_t{1} << rank_of_expert(args.num_places, args.ranks, place);
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
  __shared__ uint32_t shared_before[kMostExchangeRanks][kPlanWarps];
  __shared__ uint32_t shared_total[kMostExchangeRanks];
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  wait_for_previous_grids();
  if (threadIdx.x < kMostExchangeRanks) shared_total[threadIdx.x] = 0;
  for (int64_t first = 0; first < args.tokens; first += kPlanThreads) {
    const int64_t token = first + threadIdx.x;
    const bool is_token = token < args.tokens;
    const uint64_t ranks = is_token ? place_ids(args, plan, token) : 0;
    for (int rank = 0; rank < args.ranks; ++rank) {
      const uint32_t lanes = __ballot_sync(kFullWarp, (ranks >> rank & 1) != 0);
      if (lane == 0) shared_before[rank][warp] = static_cast<uint32_t>(__popc(lanes));
    }
    __syncthreads();
    for (int rank = warp; rank < args.ranks; rank += kPlanWarps) {
      const uint32_t count = shared_before[rank][lane];
      const uint32_t total = shared_total[rank];
      const uint32_t inclusive = warp_inclusive_sum(count);
      shared_before[rank][lane] = total + inclusive - count;
      __syncwarp();
      if (lane == kWarpSize - 1) shared_total[rank] = total + inclusive;
    }
    __syncthreads();
    for (int rank = 0; rank < args.ranks; ++rank) {
      const uint32_t lanes = __ballot_sync(kFullWarp, (ranks >> rank & 1) != 0);
      const auto before = static_cast<uint32_t>(__popc(lanes & ((1U << lane) - 1U)));
      if (!is_token) continue;
      plan.places[token * args.ranks + rank] =
          (ranks >> rank & 1) != 0 ? static_cast<int32_t>(shared_before[rank][warp] + before) : -1;
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

// Calls f(Unit()) with the type of a unit's size.
template <class Function>
__device__ void with_unit(int32_t unit_bytes, Function&& f) {
  switch (unit_bytes) {
    case 16:
      return f(uint4{});
    case 8:
      return f(uint2{});
    case 4:
      return f(uint32_t{});
    case 2:
      return f(uint16_t{});
    default:
      return f(uint8_t{});
  }
}

constexpr int kUnitsInFlight = 4;

// Copies a part of a token's row to all ranks that it goes to: each unit is loaded once.
template <class Unit>
__device__ void send_units(const SentPart& part, int64_t token, const int32_t* shared_places,
                           const SendTokens& args) {
  const uint8_t* const row = part.data + token * part.row_stride;
  const int64_t step = kSendThreads;
  for (int64_t first = threadIdx.x; first < part.units; first += kUnitsInFlight * step) {
    Unit units[kUnitsInFlight];
#pragma unroll
    for (int i = 0; i < kUnitsInFlight; ++i) {
      const int64_t unit = first + i * step;
      if (unit < part.units) units[i] = load_readonly<Unit>(row + unit * part.unit_stride);
    }
    for (int rank = 0; rank < args.ranks; ++rank) {
      const int32_t place = shared_places[rank];
      if (place < 0) continue;
      uint8_t* const target = args.targets.at[rank] + part.offset +
                              place * part.units * static_cast<int64_t>(sizeof(Unit));
#pragma unroll
      for (int i = 0; i < kUnitsInFlight; ++i) {
        const int64_t unit = first + i * step;
        if (unit < part.units) {
          store(target + unit * static_cast<int64_t>(sizeof(Unit)), units[i]);
        }
      }
    }
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
  __shared__ int32_t shared_places[kMostExchangeRanks];
  const int thread = static_cast<int>(threadIdx.x);
  wait_for_previous_grids();
  for (int64_t token = blockIdx.x; token < args.tokens; token += gridDim.x) {
    if (thread < args.ranks) shared_places[thread] = plan.places[token * args.ranks + thread];
    __syncthreads();
    for (int i = 0; i < args.num_parts; ++i) {
      const SentPart& part = args.parts[i];
      with_unit(part.unit_bytes,
                [&](auto unit) { send_units<decltype(unit)>(part, token, shared_places, args); });
    }
    __syncthreads();
  }
  if (!is_last_of_grid(plan.tickets) || thread >= args.ranks) return;
  *reinterpret_cast<int32_t*>(args.targets.at[thread] + args.count_offset) = plan.counts[thread];
  if (args.flags_offset == kNoFlags) return;
  store_release(flag_of(memory, args.flags_offset, thread, memory.rank), *plan.call);
}

// --- Receive -------------------------------------------------------------------------------------

// The rows that rank `source` has sent; 0 where it did not come, or sent a count that cannot be.
__device__ int32_t await_rows(const ReceiveTokens& args, const ExchangePlan& plan,
                              const RankMemory& memory, int source) {
  const uint32_t call = *plan.call;
  if (args.flags_offset != kNoFlags &&
      !wait_for_flag(memory, args.flags_offset, source, call, Awaited::kTokens)) {
    return 0;
  }
  const uint8_t* const sent = args.sent_counts.first + source * args.sent_counts.stride;
  const auto count = static_cast<int32_t>(load_relaxed(reinterpret_cast<const uint32_t*>(sent)));
  if (count >= 0 && count <= args.max_tokens) return count;
  ExchangeCta cta;
  const auto peer = static_cast<uint32_t>(source);
  const uint32_t number = fault_number(call, Awaited::kTokens);
  report_fault(cta, memory, WaitFor{AllReduceFault::kBadIndex, peer, number},
               static_cast<uint32_t>(count));
  abort_call(cta, memory, WaitFor{AllReduceFault::kAborted, peer, number});
  return 0;
}

// Copies this CTA's share of the rows that one rank has sent.
template <class Unit>
__device__ void receive_units(const ReceivedPart& part, int source, int32_t rows) {
  const uint8_t* const from = part.sent.first + source * part.sent.stride;
  uint8_t* const to = part.target + source * part.block_bytes;
  const int64_t size_bytes = rows * part.row_bytes;
  constexpr int64_t kUnitBytes = sizeof(Unit);
  const int64_t step = int64_t{gridDim.x} * kReceiveThreads * kUnitBytes;
  const int64_t begin = (int64_t{blockIdx.x} * kReceiveThreads + threadIdx.x) * kUnitBytes;
  for (int64_t first = begin; first < size_bytes; first += kUnitsInFlight * step) {
    Unit units[kUnitsInFlight];
#pragma unroll
    for (int i = 0; i < kUnitsInFlight; ++i) {
      if (first + i * step < size_bytes) units[i] = load_readonly<Unit>(from + first + i * step);
    }
#pragma unroll
    for (int i = 0; i < kUnitsInFlight; ++i) {
      if (first + i * step < size_bytes) store(to + first + i * step, units[i]);
    }
  }
}

// CTA (x, y) is number x of those that look at what rank y has sent.
__global__ void __launch_bounds__(kReceiveThreads)
    receive_tokens_kernel(const __grid_constant__ ReceiveTokens args,
                          const __grid_constant__ ExchangePlan plan,
                          const __grid_constant__ RankMemory memory) {
  __shared__ int32_t shared_count;
  const auto source = static_cast<int>(blockIdx.y);
  wait_for_previous_grids();
  if (threadIdx.x == 0) {
    const bool is_first = blockIdx.x == 0;
    if (is_first && source == 0) tell_end_of_exchange(args.end_of_exchange);
    shared_count = await_rows(args, plan, memory, source);
    if (is_first && args.flags_offset == kNoFlags) args.counts[source] = shared_count;
  }
  __syncthreads();
  const int32_t rows = shared_count;
  for (int i = 0; i < args.num_parts; ++i) {
    with_unit(args.parts[i].unit_bytes,
              [&](auto unit) { receive_units<decltype(unit)>(args.parts[i], source, rows); });
  }
  const int64_t sent = int64_t{rows} * args.top_k;
  const int64_t slots = args.max_tokens * args.top_k;
  const auto* const sent_ids =
      reinterpret_cast<const int32_t*>(args.sent_ids.first + source * args.sent_ids.stride);
  int32_t* const ids = args.ids + source * slots;
  const int64_t step = int64_t{gridDim.x} * kReceiveThreads;
  for (int64_t i = int64_t{blockIdx.x} * kReceiveThreads + threadIdx.x; i < slots; i += step) {
    const int32_t id = i < sent ? sent_ids[i] : -1;
    ids[i] = id >= 0 && id < args.num_places ? id : -1;
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
  // Threads of a rank's CTAs: for 8 ids each, or as many units as are in flight at once.
  int64_t threads = ceil_div(args.max_tokens * args.top_k, int64_t{8});
  for (int i = 0; i < args.num_parts; ++i) {
    const ReceivedPart& part = args.parts[i];
    threads =
        std::max(threads, ceil_div(part.block_bytes, int64_t{part.unit_bytes} * kUnitsInFlight));
  }
  const int64_t most =
      args.num_parts == 0 ? 16 : ceil_div(cuda_device(device.index).num_sms * 4, args.ranks);
  const int64_t ctas = std::min(ceil_div(threads, int64_t{kReceiveThreads}), most);
  launch(
      receive_tokens_kernel,
      {dim3(static_cast<unsigned>(ctas), static_cast<unsigned>(args.ranks)), dim3(kReceiveThreads)},
      stream, args, plan, memory);
}

}  // namespace narrowfloat
