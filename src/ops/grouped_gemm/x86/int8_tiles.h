// The inner loops of the CPU grouped GEMM for rows in int8 (int8_rows.h) on processors with matrix
// tiles of bytes (AMX INT8). An output has the operations of int8_kernels.h, with the same bits:
// tiles sum the products of a group of 32 columns in int32, vector registers do the rest. Groups of
// 16 columns have twice as many sums, whose way through memory takes longer than vectors take.
#pragma once

#include "ops/grouped_gemm/x86/int8_kernels.h"

namespace narrowfloat {

// Rows of a tile of sums, at most.
inline constexpr int64_t kInt8TileRows = 16;
// A tile has so many rows or a multiple of it.
inline constexpr int64_t kInt8TileStep = 4;
// The most strips that share the rows of a task. Their totals lie side by side.
inline constexpr int64_t kInt8TaskStrips = 16;
// The most columns of a chunk: 2 KiB of weights.
inline constexpr int64_t kInt8ChunkCols = 128;

// Columns of a decoded strip, and of all rows.
struct Int8TileChunk {
  int64_t group_rows = 0;              // A multiple of kInt8TileStep, at most kInt8TileRows.
  int64_t rows = 0;                    // A multiple of group_rows.
  int64_t cols = 0;                    // A multiple of 32.
  const uint8_t* values = nullptr;     // [cols / 32][rows][32], int8
  const float* half_scales = nullptr;  // [cols / 32][rows]
  // [cols / 4][16][4], int8: 2 * value. In the second half of a page of 4 KiB: a load waits for
  // stores before it whose addresses have the same lower twelve bits, and sums have the first half.
  const uint8_t* weights = nullptr;
  const float* factors = nullptr;  // [cols / 32][16]
  float* sums = nullptr;           // [rows][kInt8TaskStrips][16]
};

struct Int8TileKernels {
  // Gives the tiles their extents, and gives them up.
  void (*configure)(int64_t group_rows);
  void (*release)();
  // Decodes columns, a multiple of 32, of one of `count` strips whose steps alternate
  // (strip_weights.h): codes to [cols / 4][16][4], and UE8M0 scales to [cols / 32][16].
  void (*decode)(const Int8Strips& strips, int64_t strip, int64_t first, int64_t cols, uint8_t* out,
                 float* factors);
  // Adds the products of a chunk to the sums. Tiles have the extents for its groups.
  void (*multiply)(const Int8TileChunk& chunk);
};

extern const Int8TileKernels kInt8TileKernelsAmx;

}  // namespace narrowfloat
