// The block scales of neighbouring rows on their way to or from swizzled_128x4.
//
// There a row's scales are runs of 4 bytes that lie 512 bytes apart. Such addresses share few sets
// of the first-level cache: a row of 4096 elements fills them, and the next row finds none of its
// lines. So a task works on a band of rows, whose scales it has row after row, and copies them as
// whole lines, tile after tile. Rows r, r + 32, r + 64 and r + 96 of a tile have 16 bytes side by
// side, so a band is as many neighbouring rows of each quarter of a tile.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>

#include "narrowfloat/format.h"
#include "tensor/layouts/swizzled_128x4.h"

namespace narrowfloat {

struct BandedScales {
  int64_t batch;
  int64_t rows;
  int64_t blocks;  // Scales of a row.
};

// How the rows of matrices are cut into bands.
struct ScaleBands {
  int64_t run = 0;         // Rows of a band in a quarter of a tile; 0 where there are no bands.
  int64_t per_matrix = 0;  // Bands of a matrix. Rows of the last tile may lie past the matrix.

  // None where rows are too few for all threads, or too short to gain.
  static ScaleBands of(const BandedScales& scales, int64_t threads);
  [[nodiscard]] int64_t rows() const { return 4 * run; }
};

class ScaleBand {
 public:
  static constexpr int64_t kTileRows = Swizzled128x4Layout::kTileRows;

  // blocks: scales of a row.
  ScaleBand(const ScaleBands& bands, int64_t blocks, int64_t band);

  // The row of the matrix that is the band's row `index`.
  [[nodiscard]] int64_t row(int64_t index) const {
    return first_row_ + index / run_ * (kTileRows / 4) + index % run_;
  }

  // Keeps scales of the band's row `index` from a block on. Pieces of a row come in their order.
  void keep(int64_t index, int64_t first_block, std::span<const uint8_t> scales) {
    num_kept_[static_cast<size_t>(index)] = first_block + static_cast<int64_t>(scales.size());
    std::copy(scales.begin(), scales.end(), scales_of(index) + first_block);
  }
  // Has the cache fetch a share of the lines that store() writes: all of them, after a call for
  // each of the band's rows.
  void fetch(const ScaleView& tensor, int64_t batch, int64_t index) const;
  // Scales that are not kept are 0 from now on.
  void clear_others();
  // Copies the scales of all rows, padding included, to or from the matrix `batch` of a tensor in
  // swizzled_128x4.
  void store(const ScaleView& tensor, int64_t batch);
  void load(const ScaleView& tensor, int64_t batch);

  // Points to the scales of the band's row `index`, of which a multiple of 64 may be read.
  [[nodiscard]] uint8_t* scales_of(int64_t index) { return scales_.data() + index * row_bytes_; }

 private:
  friend ScaleBands;
  static constexpr int64_t kBytes = int64_t{64} << 10;

  // Bytes from a row to the next: an odd number of lines, so that the same block of all rows lies
  // in different sets of the cache.
  static int64_t row_bytes(int64_t blocks);
  // Points to the band's first place in the first tile.
  [[nodiscard]] uint8_t* place_in(const ScaleView& tensor, int64_t batch) const;
  template <typename Visitor>
  void for_tiles(const ScaleView& tensor, int64_t batch, const Visitor& visitor);

  int64_t blocks_;
  int64_t run_;
  int64_t first_row_;
  int64_t row_bytes_;
  std::array<int64_t, kTileRows> num_kept_{};  // Scales of each row.
  alignas(64) std::array<uint8_t, kBytes> scales_;
};

}  // namespace narrowfloat
