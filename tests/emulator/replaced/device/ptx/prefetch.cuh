// Emulated: src/device/ptx/prefetch.cuh.
#pragma once

namespace narrowfloat {

inline void prefetch_to_l2(const void*) {}

}  // namespace narrowfloat
