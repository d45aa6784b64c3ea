// Emulated: src/device/ptx/wgmma_e4m3*.cuh, for every number of tokens. Sums are exact to fp32's
// last bits, where a GPU has 13 fraction bits.
#pragma once

#include "emulator/multiply.h"

namespace narrowfloat {

template <int kSums>
void wgmma_e4m3(float (&d)[kSums], const uint32_t (&a)[4], uint64_t b, int accumulate) {
  emulator::multiply_registers<emulator::E4m3Operand>(d, kSums, a, b, accumulate);
}
template <int kSums>
void wgmma_e4m3(float (&d)[kSums], uint64_t a, uint64_t b, int accumulate) {
  emulator::multiply_shared<emulator::E4m3Operand>(d, kSums, a, b, accumulate);
}

}  // namespace narrowfloat
