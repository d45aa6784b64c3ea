// Emulated: src/device/ptx/keep.cuh.
#pragma once

#include "base/host_device.h"

namespace narrowfloat {

inline uint32_t keep_in_register(uint32_t value) { return value; }
inline uint8_t* keep_global_in_register(uint8_t* address) { return address; }
inline void keep_before(uint32_t&) {}
inline void keep_apart(float&) {}

}  // namespace narrowfloat
