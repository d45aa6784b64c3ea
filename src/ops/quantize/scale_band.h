// The block scales of neighbouring rows on their way to swizzled_128x4.
//
// There a row's scales are runs of 4 bytes that lie 512 bytes apart. Such addresses share few sets
// of the first-level cache: a row of 4096 elements fills them, and the next row finds none of its
// lines. So a task quantizes a band of rows, keeps their scales row after row, and then copies
// whole lines, tile after tile. Rows r, r + 32, r + 64 and r + 96 of a tile have 16 bytes side by
// side, so a band is as many neighbouring rows of each quarter of a tile.
#pragma once

#include <array>
#include <span>

#include "ops/quantize/quantize_problem.h"
#include "tensor/layouts/swizzled_128x4.h"

namespace narrowfloat {

// How the rows of matrices are cut into bands.
struct ScaleBands {
  int64_t run = 0;         // Rows of a band in a quarter of a tile; 0 where there are no bands.
  int64_t per_matrix = 0;  // Bands of a matrix. Rows of the last tile may lie past the matrix.

  // None where no tensor of scales is swizzled_128x4, or too few rows for all threads.
  static ScaleBands of(const QuantizeProblem& problem, const QuantizeArgs& args, int64_t threads);
  [[nodiscard]] int64_t rows() const { return 4 * run; }
};

class ScaleBand {
 public:
  static constexpr int64_t kTileRows = Swizzled128x4Layout::kTileRows;

  ScaleBand(const QuantizeArgs& args, const ScaleBands& bands, int64_t batch, int64_t band);

  // The row of the matrix that is the band's row `index`.
  [[nodiscard]] int64_t row(int64_t index) const {
    return first_row_ + index / run_ * (kTileRows / 4) + index % run_;
  }

  // Keeps scales of the band's row `index` from a block on. Pieces of a row come in their order.
  void keep(int64_t index, int64_t first_block, std::span<const uint8_t> scales);

  // Stores the scales that were kept, and zeros for others of these rows' tiles.
  void store();

 private:
  friend ScaleBands;
  static constexpr int64_t kBytes = int64_t{64} << 10;

  // Bytes from a row to the next: an odd number of lines, so that the same block of all rows lies
  // in different sets of the cache.
  static int64_t row_bytes(int64_t blocks);
  uint8_t* row_scales(int64_t index) { return scales_.data() + index * row_bytes_; }
  void clear_padding();
  void store_to(const ScaleView& output);
  void store_tiles(int64_t first_block, int64_t tiles, uint8_t* out);

  const QuantizeArgs& args_;
  int64_t batch_;
  int64_t run_;
  int64_t first_row_;
  int64_t row_bytes_;
  std::array<int64_t, kTileRows> num_kept_{};  // Scales of each row.
  alignas(64) std::array<uint8_t, kBytes> scales_;
};

}  // namespace narrowfloat
