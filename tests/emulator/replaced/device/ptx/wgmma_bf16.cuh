// Emulated: src/device/ptx/wgmma_bf16*.cuh, for every number of tokens.
#pragma once

#include "emulator/multiply.h"

namespace narrowfloat {

template <int kSums>
void wgmma_bf16(float (&d)[kSums], const uint32_t (&a)[4], uint64_t b, int accumulate) {
  emulator::multiply_registers<emulator::Bf16Operand>(d, kSums, a, b, accumulate);
}

}  // namespace narrowfloat
