// The inner loop of the CPU maxima as a table of functions, one for each level of x86 vector
// instructions. docs/architecture.md has the rules for the sources of a level.
#pragma once

#include <cstdint>

namespace narrowfloat {

// The largest magnitude of `count` elements as its bits; 0 if none is a number. infinity: the bits
// of the type's infinity. Magnitudes above are NaN and do not count.
struct AmaxKernels {
  uint32_t (*largest_of_32)(const void* x, int64_t count, int32_t infinity);
  uint32_t (*largest_of_16)(const void* x, int64_t count, int16_t infinity);
};

extern const AmaxKernels kAmaxKernelsAvx2;
extern const AmaxKernels kAmaxKernelsAvx512;

}  // namespace narrowfloat
