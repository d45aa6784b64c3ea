// Emulated: src/device/ptx/mbarrier.cuh.
#pragma once

#include "device/ptx/shared_memory.cuh"

namespace narrowfloat {

inline void init_barrier(uint32_t barrier, uint32_t arrivals) {
  emulator::init_barrier(barrier, arrivals);
}
inline void fence_barrier_init() {}
inline void arrive(uint32_t barrier) { emulator::arrive(emulator::cluster_rank(), barrier); }
inline void arrive_and_expect(uint32_t barrier, uint32_t bytes) {
  emulator::arrive_and_expect(barrier, bytes);
}
inline bool try_wait(uint32_t barrier, uint32_t parity) {
  emulator::wait_for_phase(barrier, parity);
  return true;
}
inline bool try_wait_asleep(uint32_t barrier, uint32_t parity) { return try_wait(barrier, parity); }
inline void arrive_after_copies(uint32_t barrier) { emulator::arrive_after_copies(barrier); }
inline void fence_async_proxy() {}
inline void sync_threads(int id, int threads) { emulator::sync_named(id, threads); }

}  // namespace narrowfloat
