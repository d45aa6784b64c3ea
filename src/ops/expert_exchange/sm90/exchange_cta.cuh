// Flags between ranks for the kernels of expert parallelism: comm/protocol.h on a GPU, for a CTA
// whose threads wait for one rank each.
#pragma once

#include "comm/protocol.h"
#include "device/end_of_exchange.cuh"
#include "device/ptx/system_memory.cuh"

namespace narrowfloat {

struct ExchangeCta {
  bool aborted = false;

  __device__ static uint32_t load_relaxed(const uint32_t* address) {
    return narrowfloat::load_relaxed(address);
  }
  __device__ static uint32_t load_acquire(const uint32_t* address) {
    return narrowfloat::load_acquire(address);
  }
  __device__ static void store_release(uint32_t* address, uint32_t value) {
    narrowfloat::store_release(address, value);
  }
  __device__ static void fence() { fence_system(); }
  __device__ static bool claim(uint32_t* address) { return swap_if_equal_gpu(address, 0, 1) == 0; }
  __device__ static uint64_t now_ns() { return global_time_ns(); }
  __device__ static void pause(uint32_t /*spins*/) {}
  __device__ static void reached(ProtocolPoint /*point*/) {}
};

// The flag that `source` sets in the memory of `owner`.
__device__ inline uint32_t* flag_of(const RankMemory& memory, int64_t flags_offset, int owner,
                                    int source) {
  return reinterpret_cast<uint32_t*>(memory.regions[owner] + flags_offset) + source;
}

enum class Awaited : uint32_t { kTokens = 0, kResults = 1 };

// The number that a fault has: it says which call failed, and what a rank waited for in it.
__device__ inline uint32_t fault_number(uint32_t call, Awaited awaited) {
  return 2 * call + static_cast<uint32_t>(awaited);
}

// Waits until rank `source` has set its flag to `call`. What it wrote before is visible to this
// thread then. False: it did not come, or a rank has given up.
__device__ inline bool wait_for_flag(const RankMemory& memory, int64_t flags_offset, int source,
                                     uint32_t call, Awaited awaited) {
  ExchangeCta cta;
  heed_abort(cta, memory, enter_call(cta, memory));
  const uint32_t* const flag = flag_of(memory, flags_offset, memory.rank, source);
  const auto missing = [&] {
    return WaitFor{AllReduceFault::kBarrierWait, static_cast<uint32_t>(source),
                   fault_number(call, awaited)};
  };
  if (!wait_until(cta, memory, missing, [&] { return cta.load_acquire(flag) == call; })) {
    return false;
  }
  // A rank that has given up sets its later flags as others do. It has set all abort cells before.
  heed_abort(cta, memory, enter_call(cta, memory));
  return !cta.aborted;
}

}  // namespace narrowfloat
