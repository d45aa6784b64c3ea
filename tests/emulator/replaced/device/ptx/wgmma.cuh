// Emulated: src/device/ptx/wgmma.cuh.
#pragma once

#include "base/host_device.h"
#include "emulator/machine.h"

namespace narrowfloat {

inline void wgmma_fence() {}
inline void wgmma_commit() { emulator::commit_multiplications(); }
inline void wgmma_wait() { emulator::wait_for_multiplications(0); }
inline void wgmma_wait_but_one() { emulator::wait_for_multiplications(1); }

// The hardware's descriptor, so that code which adds to it means the same.
inline uint64_t swizzled_descriptor(uint32_t address) {
  return (address & 0x3FFFFU) >> 4 | uint64_t{1} << 16 | uint64_t{64} << 32 | uint64_t{1} << 62;
}

template <int kCount>
void take_registers() {}
template <int kCount>
void give_registers() {}

}  // namespace narrowfloat
