// The inner loops of the CPU grouped GEMM for Accumulation::kFast on processors with bf16 dot
// products (AVX-512 BF16). docs/architecture.md has the rules for the sources of a level.
//
// Every value of every mode without its block scale is exact in bf16. A lane is a weight row and
// takes two columns at once:
//
//   inner = 0;  for pairs of k of the block:  inner = inner + x[k + 1] * w[k + 1] + x[k] * w[k]
//   total = fma(dA * dW, inner, total)        dW alone where rows have no scales
//
// Without blocks inner goes on over all of k. Lanes do not depend on each other, so neither the
// number of rows nor of strips in a call changes a result. Magnitudes below 2^-126 count as zero in
// inner. Matrix tiles have an order of their own (amx_kernels.h).
#pragma once

#include <cstdint>

#include "ops/grouped_gemm/x86/epilogue_kernels.h"

namespace narrowfloat {

// The most strips of one chunk.
inline constexpr int64_t kBf16Strips = 2;
// The most columns of one chunk: 8 KiB of bf16 weights of a strip. It consists of whole blocks in
// every mode.
inline constexpr int64_t kBf16ChunkCols = 256;

// Columns of one or two decoded strips.
struct Bf16Chunk {
  int64_t strips = 0;
  int64_t cols = 0;
  int64_t block_cols = 0;                     // 0: sums go on from chunk to chunk.
  int64_t blocks_per_row_scale = 1;           // Blocks that share a scale of a row.
  const uint16_t* weights[kBf16Strips] = {};  // [cols / 2][16][2] each.
  const float* factors[kBf16Strips] = {};     // [blocks][16] each: the weights' scales.
};

// One row, from the chunk's first column on.
struct Bf16Row {
  const uint16_t* values = nullptr;
  const float* scales = nullptr;  // Null: rows have none.
  float* sums = nullptr;          // [strips][16]
};

enum class Bf16StripScale : int { kE4M3 = 0, kUE8M0 = 1 };

// The most strips and rows of one call of Bf16Kernels::multiply_few_rows.
inline constexpr int64_t kFewBf16Strips = 4;
inline constexpr int64_t kFewBf16Rows = 4;

// Some strips of E2M1 codes with block scales, whole: [cols][8] bytes each.
struct FewBf16Rows {
  int64_t cols;
  Bf16StripScale type;
  int64_t block_cols;
  int64_t blocks_per_row_scale;
  int64_t strips;
  int64_t rows;
  const uint8_t* codes[kFewBf16Strips];
  const uint8_t* scales[kFewBf16Strips];  // [blocks][16]
  const uint16_t* values[kFewBf16Rows];
  const float* row_scales[kFewBf16Rows];  // Null: rows have none.
  float* sums[kFewBf16Rows];              // [strips][16] of each row.
};

struct Bf16Kernels {
  // Decode an even number of columns of a strip to [cols / 2][16][2].
  using Decode = void (*)(const void* codes, int64_t cols, uint16_t* out);
  // Decodes the 16 scales of each block.
  using DecodeScales = void (*)(const uint8_t* codes, int64_t blocks, Bf16StripScale type,
                                float* out);
  // Adds the products of a chunk to the sums of its rows.
  using Multiply = void (*)(const Bf16Chunk& chunk, const Bf16Row* rows, int64_t count);
  // Sums of products over all columns. Weights are decoded in registers.
  using MultiplyFewRows = void (*)(const FewBf16Rows& task);

  Decode decode_e2m1;
  Decode decode_e4m3;
  Decode decode_bf16;
  DecodeScales decode_scales;
  Multiply multiply;
  MultiplyFewRows multiply_few_rows;
  const EpilogueKernels* epilogue;
};

extern const Bf16Kernels kBf16KernelsAvx512;

}  // namespace narrowfloat
