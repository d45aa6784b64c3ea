// See scale_band.h.
#include "tensor/scale_band.h"

#include <cstring>

#include "base/int_math.h"

namespace narrowfloat {
namespace {

using Layout = Swizzled128x4Layout;

constexpr int64_t kLine = 64;
constexpr int64_t kQuarter = Layout::kTileRows / 4;
constexpr int64_t kTileScales = Layout::kTileRows * Layout::kTileBlocks;
// With shorter runs tasks would share lines.
constexpr int64_t kLeastRun = 4;
// Threads take different times, so each should find several bands.
constexpr int64_t kBandsOfThread = 4;

// The scales of four neighbouring blocks in each lane.
using Quads [[gnu::vector_size(16)]] = uint32_t;

// Lines of four quads each, a step apart. Those past the last one are read as zeros and not
// written.
struct QuadsOf {
  uint8_t* first;
  int64_t step;
  int64_t lines;

  [[nodiscard]] Quads load(int64_t line) const {
    Quads quads{};
    if (line < lines) std::memcpy(&quads, first + line * step, sizeof(quads));
    return quads;
  }
  void store(int64_t line, Quads quads) const {
    if (line < lines) std::memcpy(first + line * step, &quads, sizeof(quads));
  }
};

// Stores quad i of line j as quad j of line i.
void transpose(const QuadsOf& from, const QuadsOf& to) {
  const Quads a = from.load(0);
  const Quads b = from.load(1);
  const Quads c = from.load(2);
  const Quads d = from.load(3);
  const Quads low_ab = __builtin_shufflevector(a, b, 0, 4, 1, 5);
  const Quads low_cd = __builtin_shufflevector(c, d, 0, 4, 1, 5);
  const Quads high_ab = __builtin_shufflevector(a, b, 2, 6, 3, 7);
  const Quads high_cd = __builtin_shufflevector(c, d, 2, 6, 3, 7);
  to.store(0, __builtin_shufflevector(low_ab, low_cd, 0, 1, 4, 5));
  to.store(1, __builtin_shufflevector(low_ab, low_cd, 2, 3, 6, 7));
  to.store(2, __builtin_shufflevector(high_ab, high_cd, 0, 1, 4, 5));
  to.store(3, __builtin_shufflevector(high_ab, high_cd, 2, 3, 6, 7));
}

}  // namespace

ScaleBands ScaleBands::of(const BandedScales& scales, int64_t threads) {
  // The lines of a few tiles stay in the cache from a row to the next.
  if (scales.rows < Layout::kTileRows || scales.blocks < kLine) return {};
  // Longer runs read longer parts of memory in its order.
  for (int64_t run = kQuarter; run >= kLeastRun; run /= 2) {
    const ScaleBands bands{run, ceil_div(scales.rows, Layout::kTileRows) * (kQuarter / run)};
    const bool fits = bands.rows() * ScaleBand::row_bytes(scales.blocks) <= ScaleBand::kBytes;
    const bool is_enough =
        threads == 1 || scales.batch * bands.per_matrix >= kBandsOfThread * threads;
    if (fits && is_enough) return bands;
  }
  return {};
}

ScaleBand::ScaleBand(const ScaleBands& bands, int64_t blocks, int64_t band)
    : blocks_(blocks),
      run_(bands.run),
      first_row_(band * bands.rows() / kTileRows * kTileRows + band * bands.run % kQuarter),
      row_bytes_(row_bytes(blocks)) {}

int64_t ScaleBand::row_bytes(int64_t blocks) {
  return (ceil_div(blocks, kLine) | int64_t{1}) * kLine;
}

uint8_t* ScaleBand::place_in(const ScaleView& tensor, int64_t batch) const {
  return static_cast<uint8_t*>(tensor.data) + batch * (tensor.capacity / tensor.batch) +
         Layout::offset(first_row_, 0, {tensor.rows, blocks_});
}

void ScaleBand::fetch(const ScaleView& tensor, int64_t batch, int64_t index) const {
  const int64_t tiles = ceil_div(blocks_, Layout::kTileBlocks);
  const int64_t rows = 4 * run_;
  const uint8_t* first = place_in(tensor, batch);
  for (int64_t tile = tiles * index / rows; tile < tiles * (index + 1) / rows; ++tile) {
    for (int64_t byte = 0; byte < run_ * static_cast<int64_t>(sizeof(Quads)); byte += kLine) {
      __builtin_prefetch(first + tile * kTileScales + byte);
    }
  }
}

void ScaleBand::clear_others() {
  const int64_t padded = round_up(blocks_, Layout::kTileBlocks);
  for (int64_t index = 0; index < 4 * run_; ++index) {
    const int64_t kept = num_kept_[static_cast<size_t>(index)];
    if (kept < padded) std::fill(scales_of(index) + kept, scales_of(index) + padded, uint8_t{0});
  }
}

// Calls visitor(quads of the tiles, quads of the rows) for each four rows of up to four tiles.
template <typename Visitor>
void ScaleBand::for_tiles(const ScaleView& tensor, int64_t batch, const Visitor& visitor) {
  uint8_t* first = place_in(tensor, batch);
  const int64_t tiles = ceil_div(blocks_, Layout::kTileBlocks);
  const int64_t quarter_bytes = run_ * row_bytes_;
  for (int64_t tile = 0; tile < tiles; tile += 4, first += 4 * kTileScales) {
    const int64_t count = std::min<int64_t>(4, tiles - tile);
    for (int64_t place = 0; place < run_; ++place) {
      uint8_t* in_tiles = first + place * static_cast<int64_t>(sizeof(Quads));
      uint8_t* in_rows = scales_of(place) + tile * Layout::kTileBlocks;
      // A constant number leaves nothing but registers between loads and stores.
      if (count == 4) {
        visitor(QuadsOf{in_tiles, kTileScales, 4}, QuadsOf{in_rows, quarter_bytes, 4});
      } else {
        visitor(QuadsOf{in_tiles, kTileScales, count}, QuadsOf{in_rows, quarter_bytes, 4});
      }
    }
  }
}

void ScaleBand::store(const ScaleView& tensor, int64_t batch) {
  for_tiles(tensor, batch,
            [](const QuadsOf& tiles, const QuadsOf& rows) { transpose(rows, tiles); });
}

void ScaleBand::load(const ScaleView& tensor, int64_t batch) {
  for_tiles(tensor, batch,
            [](const QuadsOf& tiles, const QuadsOf& rows) { transpose(tiles, rows); });
}

}  // namespace narrowfloat
