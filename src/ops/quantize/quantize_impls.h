// The records of all implementations; quantize_impls.cpp puts them in order.
#pragma once

#include "ops/quantize/quantize_problem.h"

namespace narrowfloat {

extern const QuantizeImpl kQuantizeCpuReference;
extern const QuantizeImpl kQuantizeCpuBaseline;
// Only in builds for x86-64.
extern const QuantizeImpl kQuantizeCpuAvx2;
extern const QuantizeImpl kQuantizeCpuAvx512;
// Only in builds with CUDA.
extern const QuantizeImpl kQuantizeSm90Blocks;
extern const QuantizeImpl kQuantizeSm80Blocks;
extern const QuantizeImpl kQuantizeSm90Rows;
extern const QuantizeImpl kQuantizeSm80Rows;
extern const QuantizeImpl kQuantizeSm90Tiles;
extern const QuantizeImpl kQuantizeSm80Tiles;

}  // namespace narrowfloat
