// The inner loop of the scale search for CPUs with AVX2. docs/architecture.md has the rules for the
// sources of a level of vector instructions.
//
// A lane is a scale, and sums the errors of a block in the order of its elements, so that they have
// the bits of the portable loop in scale_search.cpp.
#pragma once

#include <cstdint>

namespace narrowfloat {

// Scales that are tried at once.
inline constexpr int64_t kSearchLanes = 8;

struct SearchedBlock {
  const float* x = nullptr;        // Finite.
  const float* weights = nullptr;  // They multiply the squared errors.
  int64_t cols = 0;
};

struct ScaleSearchKernels {
  // Stores the weighted squared errors of a block under kSearchLanes scales, given by their
  // multipliers, which are positive, and by the factors that codes are decoded with.
  using Errors = void (*)(const SearchedBlock& block, const float* multipliers,
                          const float* factors, double* errors);
  Errors of_e2m1;
  Errors of_e4m3;
};

extern const ScaleSearchKernels kScaleSearchKernelsAvx2;

}  // namespace narrowfloat
