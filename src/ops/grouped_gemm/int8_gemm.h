// The grouped GEMM with rows in int8: the packed strips, row blocks and epilogue of the other CPU
// implementations around the kernels of x86/int8_kernels.h.
#pragma once

#include "ops/grouped_gemm/grouped_gemm_problem.h"
#include "ops/grouped_gemm/x86/int8_kernels.h"
#include "ops/grouped_gemm/x86/int8_tiles.h"

namespace narrowfloat {

// Sums are not fp64. tiles: for many rows and groups of 32 columns; null where the processor has
// none. They change no bit.
void run_int8_gemm(const GroupedGemmProblem& problem, const GemmCall& call,
                   const Int8Kernels& kernels, const Int8TileKernels* tiles);

}  // namespace narrowfloat
