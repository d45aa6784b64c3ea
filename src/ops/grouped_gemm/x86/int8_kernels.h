// The inner loops of the CPU grouped GEMM for rows in int8 (int8_rows.h) as a table of functions,
// one for each level of x86 vector instructions. docs/architecture.md has the rules for the sources
// of a level.
//
// A lane is a weight row and takes four columns at once. Codes of weights become 2 * value + 12,
// which is 0 to 24, since the instructions multiply unsigned by signed bytes; a sum starts at -12
// times the sum of the row's codes. With the factors of int8_rows.h, in each lane:
//
//   inner = the sum of the group in integers, exact
//   total = total + (half_scale * dW) * inner          each operation rounded
#pragma once

#include <cstdint>

#include "ops/grouped_gemm/x86/epilogue_kernels.h"

namespace narrowfloat {

inline constexpr int32_t kInt8Offset = 12;

// A row in int8: codes [cols], and at the given bytes starts [groups] as int32 and half scales
// [cols / 32] as fp32. cols is a multiple of 32. Groups have 32 columns and weights whose scales
// are UE8M0, or 16 columns and weights whose scales are E4M3.
struct Int8RowLayout {
  int64_t cols = 0;
  int64_t group_cols = 0;
  int64_t starts = 0;
  int64_t half_scales = 0;
};

struct Int8Row {
  const uint8_t* data = nullptr;
  float* sums = nullptr;  // [strips][16]
};

// One or two strips of E2M1 codes whose steps of 8 columns alternate (strip_weights.h), whole.
struct Int8Strips {
  Int8RowLayout layout;
  int64_t count = 0;
  const uint8_t* codes = nullptr;   // [cols / 8][count][64]
  const uint8_t* scales = nullptr;  // [groups][count][16]
};

struct Int8Kernels {
  // Rounds a row of bf16.
  using RoundRow = void (*)(const uint16_t* values, const Int8RowLayout& layout, uint8_t* out);
  // The sums of all rows with the strips.
  using Multiply = void (*)(const Int8Strips& strips, const Int8Row* rows, int64_t count);

  RoundRow round_row;
  Multiply multiply;
  const EpilogueKernels* epilogue;
};

extern const Int8Kernels kInt8KernelsAvx2;
extern const Int8Kernels kInt8KernelsAvx512;

}  // namespace narrowfloat
