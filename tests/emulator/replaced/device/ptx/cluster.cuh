// Emulated: src/device/ptx/cluster.cuh.
#pragma once

#include "base/host_device.h"
#include "emulator/machine.h"

namespace narrowfloat {

inline uint32_t cluster_rank() { return emulator::cluster_rank(); }
inline uint32_t cluster_size() { return emulator::cluster_size(); }
inline void arrive_at_cluster() { emulator::arrive_at_cluster(); }
inline void wait_for_cluster() { emulator::wait_for_cluster(); }

inline void store_in_block(uint32_t shared, uint32_t rank, uint32_t value) {
  std::memcpy(emulator::shared_memory_of(rank, shared, 4), &value, 4);
}
inline void arrive_in_block(uint32_t barrier, uint32_t rank) { emulator::arrive(rank, barrier); }
inline void arrive_in_block_if(bool arrives, uint32_t barrier, uint32_t rank) {
  if (arrives) emulator::arrive(rank, barrier);
}
inline void send_to_block(uint32_t shared, uint32_t rank, uint32_t value, uint32_t barrier) {
  uint8_t* to = emulator::shared_memory_of(rank, shared, 4);
  emulator::copy_to_barrier([=] { std::memcpy(to, &value, 4); }, static_cast<uint16_t>(1U << rank),
                            barrier, 4);
}

}  // namespace narrowfloat
