// The end of an exchange that other grids made (comm/allreduce_args.h), told to the host.
#pragma once

#include "comm/allreduce_args.h"
#include "device/ptx/system_memory.cuh"

namespace narrowfloat {

// One thread of a grid that comes after the exchange calls it.
__device__ inline void tell_end_of_exchange(const EndOfExchange& end) {
  if (end.ended == nullptr) return;
  const uint32_t ended = *end.ended + 1;
  *end.ended = ended;
  store_relaxed_8(end.progress, {.x = 0, .y = ended});
}

}  // namespace narrowfloat
