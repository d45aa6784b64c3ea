// Arithmetic on two 16-bit floats in a word, one instruction per function. Denormals are kept.
#pragma once

#include "base/host_device.h"

namespace narrowfloat {

// mul.rn.f16x2
__device__ inline uint32_t mul_f16x2(uint32_t a, uint32_t b) {
  uint32_t result;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

// max.f16x2, max.bf16x2: a number wins over NaN.
__device__ inline uint32_t max_f16x2(uint32_t a, uint32_t b) {
  uint32_t result;
  asm("max.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}
__device__ inline uint32_t max_bf16x2(uint32_t a, uint32_t b) {
  uint32_t result;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

}  // namespace narrowfloat
