// Emulated: src/device/ptx/system_memory.cuh.
#pragma once

#include "base/host_device.h"
#include "emulator/machine.h"

namespace narrowfloat {

inline void store_relaxed_16(void* address, const uint4& value) {
  emulator::require(emulator::is_aligned(address, 16), "a store of 16 bytes that is not aligned");
  emulator::store_relaxed([=] { std::memcpy(address, &value, 16); });
}
inline void store_relaxed_8(void* address, const uint2& value) {
  emulator::require(emulator::is_aligned(address, 8), "a store of 8 bytes that is not aligned");
  emulator::store_relaxed([=] { std::memcpy(address, &value, 8); });
}
inline uint4 load_relaxed_16(const void* address) {
  emulator::require(emulator::is_aligned(address, 16), "a load of 16 bytes that is not aligned");
  emulator::spin();
  uint4 value;
  std::memcpy(&value, address, 16);
  return value;
}
inline uint32_t load_relaxed(const uint32_t* address) {
  emulator::spin();
  return *address;
}
inline uint32_t load_acquire(const uint32_t* address) { return load_relaxed(address); }
inline void store_release(uint32_t* address, uint32_t value) {
  emulator::fence();
  *address = value;
}
inline void fence_system() { emulator::fence(); }
inline uint32_t swap_if_equal_gpu(uint32_t* address, uint32_t expected, uint32_t value) {
  emulator::fence();
  const uint32_t previous = *address;
  if (previous == expected) *address = value;
  return previous;
}
inline uint64_t global_time_ns() { return emulator::time_ns(); }

}  // namespace narrowfloat
