// The kernel of amx_kernels.h, written against a processor's matrix tiles.
//
// Tiles is a type of an unnamed namespace with eight tiles of up to 16 rows of 64 bytes:
//   configure(shape), release()             sets their extents, and gives them up
//   zero<kTile>(), load<kTile>(from, stride), store<kTile>(to, stride)     strides are in bytes
//   multiply<kSums>()                       sums += rows * weights, pairs of bf16 along k: the sums
//                                           [i][j] of tiles 0 to 3 are those of tiles 4 + i, 6 + j
//   fence()                                 load() sees what was stored before
//   add_scaled(total, weight_factors, row_factor, inner)   16 numbers; null: factors of 1
#pragma once

#include <cstddef>

#include "ops/grouped_gemm/x86/amx_kernels.h"

namespace narrowfloat::amx_kernels {

constexpr int64_t kLanes = 16;
constexpr int64_t kTileRows = 16;
// Two tiles of rows times two strips of weights have four tiles of sums.
constexpr int64_t kGroupRows = 2 * kTileRows;
// Columns of a buffered row: neighbours begin in other sets of the cache.
constexpr int64_t kRowCols = kBf16ChunkCols + 32;

struct TileShape {
  int64_t rows[2];  // Each tile of rows has so many.
  int64_t step;     // Columns of a product: 16 or 32.
};

// Tiles 0 to 3 are sums [tile of rows][strip], 4 and 5 rows, 6 and 7 weights.
template <class Tiles, int kRowTiles, int kStrips>
class Group {
 public:
  Group(const Bf16Chunk& chunk, const Bf16Row* rows, int64_t count, int64_t step)
      : chunk_(chunk), rows_(rows), count_(count), step_(step) {
    for (int64_t row = 0; row < count; ++row) {
      __builtin_memcpy(values_[row], rows[row].values,
                       static_cast<size_t>(chunk.cols) * sizeof(uint16_t));
    }
    Tiles::fence();
  }

  // The sums of a block are scaled while the tiles compute the next block.
  void run() {
    const int64_t block_cols = chunk_.block_cols == 0 ? chunk_.cols : chunk_.block_cols;
    int64_t block = 0;
    for (int64_t first = 0; first < chunk_.cols; first += block_cols, ++block) {
      const int64_t left = chunk_.cols - first;
      add_products(first, first + (left < block_cols ? left : block_cols), inner_[block % 2]);
      if (block > 0) add_to_totals(block - 1);
    }
    add_to_totals(block - 1);
  }

 private:
  using Inner = float[kGroupRows][kStrips][kLanes];

  void add_products(int64_t first, int64_t end, Inner& inner) {
    constexpr int64_t kWeightStride = 2 * kLanes * sizeof(uint16_t);
    constexpr int64_t kRowStride = kRowCols * sizeof(uint16_t);
    Tiles::template zero<0>();
    if constexpr (kStrips == 2) Tiles::template zero<1>();
    if constexpr (kRowTiles == 2) Tiles::template zero<2>();
    if constexpr (kRowTiles == 2 && kStrips == 2) Tiles::template zero<3>();
    for (int64_t k = first; k < end; k += step_) {
      Tiles::template load<6>(chunk_.weights[0] + k * kLanes, kWeightStride);
      Tiles::template load<4>(values_[0] + k, kRowStride);
      Tiles::template multiply<0>();
      if constexpr (kStrips == 2) {
        Tiles::template load<7>(chunk_.weights[1] + k * kLanes, kWeightStride);
        Tiles::template multiply<1>();
      }
      if constexpr (kRowTiles == 2) {
        Tiles::template load<5>(values_[kTileRows] + k, kRowStride);
        Tiles::template multiply<2>();
        if constexpr (kStrips == 2) Tiles::template multiply<3>();
      }
    }
    constexpr int64_t kInnerStride = sizeof(inner[0]);
    Tiles::template store<0>(inner[0][0], kInnerStride);
    if constexpr (kStrips == 2) Tiles::template store<1>(inner[0][1], kInnerStride);
    if constexpr (kRowTiles == 2) {
      Tiles::template store<2>(inner[kTileRows][0], kInnerStride);
      if constexpr (kStrips == 2) Tiles::template store<3>(inner[kTileRows][1], kInnerStride);
    }
  }

  void add_to_totals(int64_t block) const {
    const Inner& inner = inner_[block % 2];
    for (int64_t row = 0; row < count_; ++row) {
      const float* scales = rows_[row].scales;
      if (scales != nullptr) scales += block / chunk_.blocks_per_row_scale;
      for (int strip = 0; strip < kStrips; ++strip) {
        const float* factors =
            chunk_.block_cols == 0 ? nullptr : chunk_.factors[strip] + block * kLanes;
        Tiles::add_scaled(rows_[row].sums + strip * kLanes, factors, scales, inner[row][strip]);
      }
    }
  }

  const Bf16Chunk& chunk_;
  const Bf16Row* rows_;
  const int64_t count_;
  const int64_t step_;
  alignas(64) uint16_t values_[kGroupRows][kRowCols];
  alignas(64) Inner inner_[2];
};

template <class Tiles, int kRowTiles, int kStrips>
void multiply_group(const Bf16Chunk& chunk, const Bf16Row* rows, int64_t count, int64_t step) {
  Group<Tiles, kRowTiles, kStrips>(chunk, rows, count, step).run();
}

template <class Tiles>
void multiply(const Bf16Chunk& chunk, const Bf16Row* rows, int64_t count) {
  const bool has_long_steps = chunk.cols % 32 == 0 && chunk.block_cols % 32 == 0;
  const int64_t step = has_long_steps ? 32 : 16;
  // Groups of nearly equal size.
  for (int64_t groups = (count + kGroupRows - 1) / kGroupRows; groups > 0; --groups) {
    const int64_t some = (count + groups - 1) / groups;
    const int64_t first = some < kTileRows ? some : kTileRows;
    Tiles::configure({.rows = {first, some - first}, .step = step});
    if (some > kTileRows) {
      (chunk.strips == 1 ? multiply_group<Tiles, 2, 1> : multiply_group<Tiles, 2, 2>)(chunk, rows,
                                                                                      some, step);
    } else {
      (chunk.strips == 1 ? multiply_group<Tiles, 1, 1> : multiply_group<Tiles, 1, 2>)(chunk, rows,
                                                                                      some, step);
    }
    rows += some;
    count -= some;
  }
  Tiles::release();
}

}  // namespace narrowfloat::amx_kernels
