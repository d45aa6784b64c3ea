// Runs device/silu.cuh on packed pairs, for a test that is compiled without CUDA.
#pragma once

#include <cstdint>

#include "narrowfloat/format.h"
#include "narrowfloat/tensor.h"

namespace narrowfloat::testing {

struct SiluPairs {
  const uint32_t* gates = nullptr;  // On the device, as the rest.
  const uint32_t* ups = nullptr;
  uint32_t* products = nullptr;  // Computed by the short form where the gates are in its range.
  uint32_t* plain_products = nullptr;  // Computed by the plain formula.
  int64_t count = 0;
};

// half: BF16 or F16.
void silu_mul_pairs(DType half, MathMode math, const SiluPairs& pairs, Stream stream);

}  // namespace narrowfloat::testing
