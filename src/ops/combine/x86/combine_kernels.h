// The inner loop of the CPU combine as a table of functions, one for each level of x86 vector
// instructions. docs/architecture.md has the rules for the sources of a level.
//
// A lane does the operations of combine_cpu.cpp in their order, so it has their bits, NaN included.
#pragma once

#include <cstdint>

namespace narrowfloat {

enum class CombineElement : int { kF32 = 0, kBf16 = 1, kF16 = 2 };

// A slot with a row.
struct CombineTerm {
  const void* row;  // From the first column on.
  float weight;
};

struct CombineKernels {
  // out = the sum of weight * row over the terms in their order, for `cols` columns, a multiple of
  // 16.
  using Combine = void (*)(const CombineTerm* terms, int64_t count, int64_t cols, void* out);
  Combine combine[3][3];  // Indexed by the elements of the rows and of the output.
};

extern const CombineKernels kCombineKernelsAvx2;
extern const CombineKernels kCombineKernelsAvx512;

}  // namespace narrowfloat
