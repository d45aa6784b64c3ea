// multiply() of bf16_kernels.h on processors with matrix tiles (AMX BF16). A block's inner sum is
//
//   inner = 0;  for runs of 32 k of the block:  inner = inner + (sum of even k + sum of odd k)
//   total = fma(dA * dW, inner, total)
//
// A run has 16 k where a chunk or its blocks are no multiples of 32. Without blocks a chunk is one,
// with the factor 1. A row of a tile does not depend on the others, so the number of rows in a call
// changes no result. Magnitudes below 2^-126 count as zero in inner.
#pragma once

#include "ops/grouped_gemm/x86/bf16_kernels.h"

namespace narrowfloat {

struct AmxKernels {
  Bf16Kernels::Multiply multiply;
};

extern const AmxKernels kBf16KernelsAmx;

}  // namespace narrowfloat
