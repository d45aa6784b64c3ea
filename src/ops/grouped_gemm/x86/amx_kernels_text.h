// The kernels of amx_kernels.h that need tiles, written against a processor's matrix tiles.
//
// Tiles is a type of an unnamed namespace with eight tiles of up to 16 rows of 64 bytes:
//   configure(first, second), release()     the rows of both tiles of rows, and of their sums
//   zero<kTile>(), load<kTile>(from, stride), store<kTile>(to, stride)     strides are in bytes
//   multiply<kSums>()                       sums += rows * weights, pairs of bf16 along k: the sums
//                                           [i][j] of tiles 0 to 3 are those of tiles 4 + i, 6 + j
//   fence()                                 load() sees what was stored before
//   copy_run(to, from)                      32 columns, from ascending to tile order; null: zeros
//   add_scaled(total, weight_factors, row_factor, inner)   16 numbers; null: factors of 1
#pragma once

#include <cstddef>

#include "ops/grouped_gemm/x86/amx_kernels.h"

namespace narrowfloat::amx_kernels {

constexpr int64_t kLanes = 16;
constexpr int64_t kTileRows = 16;
static_assert(kTileGroupRows == 2 * kTileRows && kTileStrips == 2);

// Tiles 0 to 3 are sums [tile of rows][strip], 4 and 5 rows, 6 and 7 weights.
template <class Tiles, int kRowTiles, int kStrips>
struct TileBlock {
  // Sums in memory: the elements from one row to the next, and from one strip to the next.
  struct Distances {
    int64_t row;
    int64_t strip;
  };

  static void clear_sums() {
    Tiles::template zero<0>();
    if constexpr (kStrips == 2) Tiles::template zero<1>();
    if constexpr (kRowTiles == 2) Tiles::template zero<2>();
    if constexpr (kRowTiles == 2 && kStrips == 2) Tiles::template zero<3>();
  }
  static void load_sums(const float* from, Distances distances) {
    const auto stride = distances.row * static_cast<int64_t>(sizeof(float));
    const float* second = from + kTileRows * distances.row;
    Tiles::template load<0>(from, stride);
    if constexpr (kStrips == 2) Tiles::template load<1>(from + distances.strip, stride);
    if constexpr (kRowTiles == 2) Tiles::template load<2>(second, stride);
    if constexpr (kRowTiles == 2 && kStrips == 2) {
      Tiles::template load<3>(second + distances.strip, stride);
    }
  }
  static void store_sums(float* to, Distances distances) {
    const auto stride = distances.row * static_cast<int64_t>(sizeof(float));
    float* second = to + kTileRows * distances.row;
    Tiles::template store<0>(to, stride);
    if constexpr (kStrips == 2) Tiles::template store<1>(to + distances.strip, stride);
    if constexpr (kRowTiles == 2) Tiles::template store<2>(second, stride);
    if constexpr (kRowTiles == 2 && kStrips == 2) {
      Tiles::template store<3>(second + distances.strip, stride);
    }
  }
  // Adds the products of a run. weights: those of each strip.
  static void add_products(const uint16_t* rows, const uint16_t* const* weights, int64_t offset) {
    constexpr int64_t kLine = kTileRunCols * sizeof(uint16_t);
    Tiles::template load<6>(weights[0] + offset, kLine);
    Tiles::template load<4>(rows, kLine);
    Tiles::template multiply<0>();
    if constexpr (kStrips == 2) {
      Tiles::template load<7>(weights[1] + offset, kLine);
      Tiles::template multiply<1>();
    }
    if constexpr (kRowTiles == 2) {
      Tiles::template load<5>(rows + kTileRows * kTileRunCols, kLine);
      Tiles::template multiply<2>();
      if constexpr (kStrips == 2) Tiles::template multiply<3>();
    }
  }
};

// Some columns of one or two strips, with a tile or two of rows.
template <class Tiles, int kRowTiles, int kStrips>
class Group {
 public:
  Group(const TileChunk& chunk, int64_t first_row) : chunk_(chunk), first_row_(first_row) {}

  void run() {
    if (chunk_.block_cols == 0) {
      float* sums = totals(0);
      Block::load_sums(sums, kTotals);
      add_products(0, chunk_.cols);
      return Block::store_sums(sums, kTotals);
    }
    run_blocks();
  }

 private:
  using Block = TileBlock<Tiles, kRowTiles, kStrips>;
  static constexpr int64_t kTotalRow = kTileTaskStrips * kLanes;
  static constexpr typename Block::Distances kTotals{kTotalRow, kLanes};
  using Inner = float[kTileGroupRows][kStrips][kLanes];

  [[nodiscard]] float* totals(int64_t row) const {
    return chunk_.sums + (first_row_ + row) * kTotalRow;
  }

  // The sums of a block are scaled while the tiles compute the next one.
  void run_blocks() {
    alignas(64) Inner inner[2];
    int64_t block = 0;
    for (int64_t first = 0; first < chunk_.cols; first += chunk_.block_cols, ++block) {
      const int64_t left = chunk_.cols - first;
      Block::clear_sums();
      add_products(first, first + (left < chunk_.block_cols ? left : chunk_.block_cols));
      Block::store_sums(inner[block % 2][0][0], {kStrips * kLanes, kLanes});
      if (block > 0) add_to_totals(inner[(block - 1) % 2], block - 1);
    }
    add_to_totals(inner[(block - 1) % 2], block - 1);
  }

  void add_products(int64_t first, int64_t end) const {
    for (int64_t k = first; k < end; k += kTileRunCols) {
      Block::add_products(chunk_.values + k * chunk_.rows + first_row_ * kTileRunCols,
                          chunk_.weights, k * kLanes);
    }
  }

  void add_to_totals(const Inner& inner, int64_t block) const {
    const int64_t left = chunk_.count - first_row_;
    const int64_t rows = left < chunk_.group_rows ? left : chunk_.group_rows;
    for (int64_t row = 0; row < rows; ++row) {
      const float* scale = nullptr;
      if (chunk_.row_scales != nullptr) {
        scale = chunk_.row_scales[first_row_ + row] + block / chunk_.blocks_per_row_scale;
      }
      for (int strip = 0; strip < kStrips; ++strip) {
        const float* factors = chunk_.factors[strip];
        if (factors != nullptr) factors += block * kLanes;
        Tiles::add_scaled(totals(row) + strip * kLanes, factors, scale, inner[row][strip]);
      }
    }
  }

  const TileChunk& chunk_;
  const int64_t first_row_;
};

template <class Tiles, int kRowTiles, int kStrips>
void multiply_groups(const TileChunk& chunk) {
  for (int64_t row = 0; row < chunk.count; row += chunk.group_rows) {
    Group<Tiles, kRowTiles, kStrips>(chunk, row).run();
  }
}

template <class Tiles>
void multiply(const TileChunk& chunk) {
  Tiles::fence();
  if (chunk.group_rows > kTileRows) {
    (chunk.strips == 1 ? multiply_groups<Tiles, 2, 1> : multiply_groups<Tiles, 2, 2>)(chunk);
  } else {
    (chunk.strips == 1 ? multiply_groups<Tiles, 1, 1> : multiply_groups<Tiles, 1, 2>)(chunk);
  }
}

template <class Tiles>
void configure(int64_t group_rows) {
  const int64_t first = group_rows < kTileRows ? group_rows : kTileRows;
  Tiles::configure(first, group_rows - first);
}

template <class Tiles>
void pack_rows(const uint16_t* const* from, int64_t count, int64_t rows, int64_t cols,
               uint16_t* out) {
  for (int64_t row = 0; row < rows; ++row) {
    uint16_t* to = out + row * kTileRunCols;
    int64_t k = 0;
    for (; k + kTileRunCols <= cols; k += kTileRunCols) {
      Tiles::copy_run(to + k * rows, row < count ? from[row] + k : nullptr);
    }
    if (k == cols) continue;
    uint16_t run[kTileRunCols] = {};
    if (row < count) {
      __builtin_memcpy(run, from[row] + k, static_cast<size_t>(cols - k) * sizeof(uint16_t));
    }
    Tiles::copy_run(to + k * rows, run);
  }
}

}  // namespace narrowfloat::amx_kernels
