// The grouped GEMM with Accumulation::kFast on processors with bf16 dot products or tiles: the
// packed strips, row blocks and epilogue of the other CPU implementations around the kernels of
// x86/bf16_kernels.h.
#pragma once

#include "ops/grouped_gemm/grouped_gemm_problem.h"
#include "ops/grouped_gemm/x86/amx_kernels.h"

namespace narrowfloat {

struct TileGemmKernels {
  TileKernels tiles;
  TileOrderKernels few_rows;
};

// Rows are not fp32. tiles: null where the processor has none.
void run_bf16_gemm(const GroupedGemmProblem& problem, const GemmCall& call,
                   const Bf16Kernels& kernels, const TileGemmKernels* tiles);

}  // namespace narrowfloat
