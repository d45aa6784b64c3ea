// The kernels for Accumulation::kFast on processors with matrix tiles (AMX BF16). An output is
//
//   total = 0;  for runs of 32 k ascending:  total = total + (sum of 16 k + sum of the next 16 k)
//
// where the two sums are chains of fused multiply-adds in the order of bf16 dot products: pairs of
// k ascending, the odd k before the even one. Weights are multiplied by their block scales first
// wherever bf16 has the products. Blocks of k whose sums have factors, 128 k for most rows with
// scales, have a sum of their own:
//
//   inner = 0;  for runs of the block:  inner = inner + (sum of 16 k + sum of the next 16 k)
//   total = fma(dA * dW, inner, total)
//
// A tile sums the even and the odd elements of its lines apart. So the columns of a run stand in
// tiles in the order 1, 17, 0, 16, 3, 19, 2, 18, ..., 14, 30, which is called tile order.
//
// Magnitudes below 2^-126 count as zero, but not in the last line. Zeros of weights with UE8M0
// scales lose their sign, which shows in no sum that is not zero. A row of a tile does not depend
// on the others, and few rows have these operations in vector registers (TileOrderKernels), so that
// neither the number of rows nor of strips in a call changes a result.
#pragma once

#include "ops/grouped_gemm/x86/bf16_kernels.h"

namespace narrowfloat {

inline constexpr int64_t kTileRunCols = 32;
// Tiles hold two strips of weights and up to so many rows at once.
inline constexpr int64_t kTileStrips = 2;
inline constexpr int64_t kTileGroupRows = 32;
// The most strips that share the rows of a task. Their totals lie side by side.
inline constexpr int64_t kTileTaskStrips = 16;

// Strips of E2M1 codes that are multiplied by their block scales, and all rows.
struct ScaledTileTask {
  int64_t strips = 0;
  int64_t group_rows = 0;  // Up to kTileGroupRows.
  int64_t rows = 0;        // A multiple of group_rows.
  int64_t cols = 0;        // Whole blocks.
  // Blocks have 32 columns with kUE8M0, 16 with kE4M3.
  Bf16StripScale type = Bf16StripScale::kUE8M0;
  // Those of the first strip, and the bytes from one strip to the next.
  const uint8_t* codes = nullptr;   // [cols][8]
  const uint8_t* scales = nullptr;  // [blocks][16]
  int64_t strip_bytes = 0;
  int64_t strip_scale_bytes = 0;
  const uint16_t* values = nullptr;  // [cols / 32][rows][32] in tile order
  float* sums = nullptr;             // [strips][rows][16]
};

// Columns of one or two decoded strips, and of all rows.
struct TileChunk {
  int64_t strips = 0;
  int64_t count = 0;       // The number of rows.
  int64_t group_rows = 0;  // Up to kTileGroupRows.
  int64_t rows = 0;        // `count`, rounded up to a multiple of group_rows.
  int64_t cols = 0;        // A multiple of kTileRunCols. Columns that are not there are zeros.
  int64_t block_cols = 0;  // Blocks whose sums have factors, multiples of kTileRunCols; 0: none.
  int64_t blocks_per_row_scale = 1;
  const uint16_t* values = nullptr;           // [cols / 32][rows][32] in tile order
  const uint16_t* weights[kTileStrips] = {};  // [cols / 2][16][2] each, in tile order
  const float* factors[kTileStrips] = {};     // [blocks][16] each; null: 1
  const float* const* row_scales = nullptr;   // Each row's, from the first block on; null: 1
  float* sums = nullptr;                      // [rows][kTileTaskStrips][16]
};

struct TileKernels {
  // Gives the tiles their extents, and gives them up.
  void (*configure)(int64_t group_rows);
  void (*release)();
  // Copies columns of rows to [cols / 32][rows][32] in tile order; `rows` of them, zeros from
  // `count` on.
  void (*pack_rows)(const uint16_t* const* from, int64_t count, int64_t rows, int64_t cols,
                    uint16_t* out);
  // Adds the products of a chunk to the sums. Tiles have the extents for its group_rows.
  void (*multiply)(const TileChunk& chunk);
  // Decodes strips and adds the products to the sums, which lie a strip apart.
  void (*multiply_scaled)(const ScaledTileTask& task);
};

extern const TileKernels kTileKernelsAmx;

struct FewTileRows {
  FewBf16Rows rows;
  // Whether weights are multiplied by their scales. These have exponents of the range then.
  bool is_scaled;
  int least_weight;
  int most_weight;
  int64_t
      sum_cols;  // Columns whose sums have factors, those of rows alone where is_scaled; 0: none
};

struct TileOrderKernels {
  // Decodes columns of a strip of E2M1 codes, whole blocks, to [cols / 2][16][2] in tile order,
  // multiplied by the scales of blocks: of 16 columns with E4M3, of 32 with UE8M0. Columns that the
  // last run lacks are zeros. Products have to be in bf16's range.
  void (*decode_scaled)(const uint8_t* codes, const uint8_t* scales, Bf16StripScale type,
                        int64_t cols, uint16_t* out);
  // Brings decoded columns, whole runs, from ascending to tile order.
  void (*order)(uint16_t* weights, int64_t cols);
  // As Bf16Kernels::multiply_few_rows, in the order of tiles.
  void (*multiply_few_rows)(const FewTileRows& task);
};

extern const TileOrderKernels kTileOrderKernelsAvx512;

}  // namespace narrowfloat
