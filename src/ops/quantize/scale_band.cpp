// See scale_band.h.
#include "ops/quantize/scale_band.h"

#include <algorithm>
#include <cstring>

#include "base/int_math.h"
#include "ops/quantize/quantize_output.h"

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

bool is_swizzled(const ScaleView& scales) {
  return scales.data != nullptr && scales.layout == Layout::kId;
}

// The scales of four neighbouring blocks in each lane.
using Quads [[gnu::vector_size(16)]] = uint32_t;

}  // namespace

ScaleBands ScaleBands::of(const QuantizeProblem& problem, const QuantizeArgs& args,
                          int64_t threads) {
  const bool takes = is_swizzled(args.scales) || is_swizzled(args.extra_scales);
  // The lines of a few tiles stay in the cache from a row to the next.
  const bool is_small = problem.rows < kQuarter || args.scales.blocks < kLine;
  if (!takes || problem.has_row_list || is_small) return {};
  // Longer runs read longer parts of memory in its order.
  for (int64_t run = kQuarter; run >= kLeastRun; run /= 2) {
    const ScaleBands bands{run, ceil_div(problem.rows, Layout::kTileRows) * (kQuarter / run)};
    const bool fits = bands.rows() * ScaleBand::row_bytes(args.scales.blocks) <= ScaleBand::kBytes;
    const bool is_enough =
        threads == 1 || problem.batch * bands.per_matrix >= kBandsOfThread * threads;
    if (fits && is_enough) return bands;
  }
  return {};
}

ScaleBand::ScaleBand(const QuantizeArgs& args, const ScaleBands& bands, int64_t batch, int64_t band)
    : args_(args),
      batch_(batch),
      run_(bands.run),
      first_row_(band * bands.rows() / kTileRows * kTileRows + band * bands.run % kQuarter),
      row_bytes_(row_bytes(args.scales.blocks)) {}

int64_t ScaleBand::row_bytes(int64_t blocks) {
  return (ceil_div(blocks, kLine) | int64_t{1}) * kLine;
}

void ScaleBand::keep(int64_t index, int64_t first_block, std::span<const uint8_t> scales) {
  num_kept_[static_cast<size_t>(index)] = first_block + static_cast<int64_t>(scales.size());
  std::copy(scales.begin(), scales.end(), row_scales(index) + first_block);
}

void ScaleBand::store() {
  if (std::all_of(num_kept_.begin(), num_kept_.end(), [](int64_t kept) { return kept == 0; })) {
    return;
  }
  clear_padding();
  store_to(args_.scales);
  store_to(args_.extra_scales);
}

// Rows and blocks that were not kept.
void ScaleBand::clear_padding() {
  const int64_t padded = round_up(args_.scales.blocks, Layout::kTileBlocks);
  for (int64_t index = 0; index < 4 * run_; ++index) {
    const int64_t kept = num_kept_[static_cast<size_t>(index)];
    if (kept < padded) std::fill(row_scales(index) + kept, row_scales(index) + padded, uint8_t{0});
  }
}

void ScaleBand::store_to(const ScaleView& output) {
  if (output.data == nullptr) return;
  if (!is_swizzled(output)) {
    for (int64_t index = 0; index < 4 * run_; ++index) {
      const auto kept = static_cast<size_t>(num_kept_[static_cast<size_t>(index)]);
      if (kept > 0) {
        store_scale_runs<uint8_t>(output, batch_, row(index), 0, {row_scales(index), kept});
      }
    }
    return;
  }
  auto* out = static_cast<uint8_t*>(output.data) + batch_ * (output.capacity / output.batch) +
              Layout::offset(first_row_, 0, {output.rows, output.blocks});
  const int64_t tiles = ceil_div(output.blocks, Layout::kTileBlocks);
  for (int64_t tile = 0; tile < tiles; tile += 4, out += 4 * kTileScales) {
    store_tiles(tile * Layout::kTileBlocks, std::min<int64_t>(4, tiles - tile), out);
  }
}

// Stores the band's scales of up to four tiles: four quads of each of four rows, transposed.
void ScaleBand::store_tiles(int64_t first_block, int64_t tiles, uint8_t* out) {
  const auto load = [&](int64_t index) {
    Quads quads;
    std::memcpy(&quads, row_scales(index) + first_block, sizeof(quads));
    return quads;
  };
  for (int64_t place = 0; place < run_; ++place, out += sizeof(Quads)) {
    const Quads a = load(place);
    const Quads b = load(run_ + place);
    const Quads c = load(2 * run_ + place);
    const Quads d = load(3 * run_ + place);
    const Quads low_ab = __builtin_shufflevector(a, b, 0, 4, 1, 5);
    const Quads low_cd = __builtin_shufflevector(c, d, 0, 4, 1, 5);
    const Quads high_ab = __builtin_shufflevector(a, b, 2, 6, 3, 7);
    const Quads high_cd = __builtin_shufflevector(c, d, 2, 6, 3, 7);
    const std::array<Quads, 4> of_tiles = {__builtin_shufflevector(low_ab, low_cd, 0, 1, 4, 5),
                                           __builtin_shufflevector(low_ab, low_cd, 2, 3, 6, 7),
                                           __builtin_shufflevector(high_ab, high_cd, 0, 1, 4, 5),
                                           __builtin_shufflevector(high_ab, high_cd, 2, 3, 6, 7)};
    const auto store_tile = [&](size_t tile) {
      std::memcpy(out + static_cast<int64_t>(tile) * kTileScales, &of_tiles[tile], sizeof(Quads));
    };
    // With a constant number nothing but registers is between loads and stores.
    if (tiles == 4) {
      for (size_t tile = 0; tile < 4; ++tile) store_tile(tile);
    } else {
      for (size_t tile = 0; tile < static_cast<size_t>(tiles); ++tile) store_tile(tile);
    }
  }
}

}  // namespace narrowfloat
