// Emulated: src/device/ptx/shared_memory.cuh.
#pragma once

#include "base/host_device.h"
#include "emulator/machine.h"

namespace narrowfloat {

inline uint32_t shared_address(const void* pointer) { return emulator::shared_address(pointer); }

template <class T>
T emulated_load(uint32_t address) {
  emulator::require(address % sizeof(T) == 0, "a load that is not aligned");
  T result;
  std::memcpy(&result, emulator::shared_memory(address, sizeof(T)), sizeof(T));
  return result;
}
template <class T>
void emulated_store(uint32_t address, const T& value) {
  emulator::require(address % sizeof(T) == 0, "a store that is not aligned");
  std::memcpy(emulator::shared_memory(address, sizeof(T)), &value, sizeof(T));
}
inline uint32_t load_shared(uint32_t address) { return emulated_load<uint32_t>(address); }
inline uint2 load_shared_8(uint32_t address) { return emulated_load<uint2>(address); }
inline uint4 load_shared_16(uint32_t address) { return emulated_load<uint4>(address); }
inline void store_shared(uint32_t address, uint32_t value) { emulated_store(address, value); }
inline void store_shared_8(uint32_t address, uint32_t low, uint32_t high) {
  emulated_store(address, uint2{low, high});
}
inline void store_shared_16(uint32_t address, const uint4& value) {
  emulated_store(address, value);
}
inline void clear_shared_16(uint32_t address) { emulated_store(address, uint4{0, 0, 0, 0}); }

}  // namespace narrowfloat
