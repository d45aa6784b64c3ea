// The inner loops of the CPU grouped GEMM as a table of functions, one for each level of x86 vector
// instructions. docs/architecture.md has the rules for the sources of a level.
//
// A lane is a weight row, as in strip_kernel.h: its sum runs over k in ascending order, and every
// product and every sum is rounded, so all levels have the oracle's bits.
#pragma once

#include <cstdint>

#include "ops/grouped_gemm/strip_operands.h"
#include "ops/grouped_gemm/x86/epilogue_kernels.h"

namespace narrowfloat {

// The most strips and rows of one call of GemmKernels::few_rows.
inline constexpr int64_t kFewStrips = 4;
inline constexpr int64_t kFewRows = 4;

enum class StripScale : int { kNone = 0, kE4M3 = 1, kUE8M0 = 2 };

// The scales of a strip's blocks, [blocks][16] bytes.
struct StripScales {
  StripScale type = StripScale::kNone;
  int64_t block_cols = 0;
  const uint8_t* codes = nullptr;
};

// Some strips of E2M1 codes with block scales, whole: [cols][8] bytes each.
struct FewRows {
  int64_t cols;
  StripScale type;
  int64_t block_cols;
  int64_t strips;
  int64_t rows;
  const uint8_t* codes[kFewStrips];
  const uint8_t* scales[kFewStrips];
  const float* values[kFewRows];
  float* sums[kFewRows];  // [strips][16] of each row.
};

struct GemmKernels {
  // Decode columns of a strip to [cols][16], times the scale of each block.
  using DecodeScaled = void (*)(const uint8_t* codes, int64_t cols, const StripScales& scales,
                                float* out);
  using Decode = void (*)(const void* codes, int64_t cols, float* out);
  // Adds the products of a chunk to the sums of its rows (strip_kernel.h).
  using Multiply = void (*)(const WeightChunk<float>& chunk, const RowOperand<float>* rows,
                            int64_t count);
  // Sums of products over all columns. Weights are decoded in registers.
  using MultiplyFewRows = void (*)(const FewRows& task);

  DecodeScaled decode_e2m1;
  Decode decode_e4m3;
  Decode decode_bf16;
  Multiply multiply;
  MultiplyFewRows multiply_few_rows;
  // The same with fused multiply-adds, for Accumulation::kFast.
  Multiply fused_multiply;
  MultiplyFewRows fused_multiply_few_rows;
  const EpilogueKernels* epilogue;
};

extern const GemmKernels kGemmKernelsAvx2;
extern const GemmKernels kGemmKernelsAvx512;

}  // namespace narrowfloat
