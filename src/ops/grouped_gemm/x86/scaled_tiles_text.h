// TileKernels::multiply_scaled of amx_kernels.h, written against a processor's matrix tiles
// (amx_kernels_text.h), which have besides
//   Decoder<kType>, decode(codes, scales, has_second, out)
//                       decodes 32 columns of a strip in tile order, times their scales;
//                       has_second: whether those from 16 on are there, which else become zeros
//
// Chunks of columns of a pair of strips are multiplied one after the other, first along the
// columns, then along the strips. Between the steps of a chunk stand those that decode the next
// one, since processors compute tiles and vectors at the same time.
#pragma once

#include "ops/grouped_gemm/x86/amx_kernels_text.h"

namespace narrowfloat::amx_kernels {

// Columns of a chunk. Two decoded chunks of two strips, 16 KiB, stay in the first-level cache.
constexpr int64_t kScaledChunkCols = 128;
// Codes are fetched into the cache so many chunks before they are decoded.
constexpr int64_t kChunksAhead = 4;

// Whole units of kStrips strips from first_strip on.
template <class Tiles, Bf16StripScale kType, int kRowTiles, int kStrips>
class ScaledStrips {
 public:
  ScaledStrips(const ScaledTileTask& task, int64_t first_strip, int64_t units)
      : task_(task),
        first_strip_(first_strip),
        groups_(task.rows / task.group_rows),
        chunks_of_unit_((task.cols + kScaledChunkCols - 1) / kScaledChunkCols),
        chunks_(units * chunks_of_unit_) {}

  void run() {
    const Chunk first = chunk(0);
    for (int64_t step = 0; step < decoding_steps(first); ++step) decode(first, step, 0);
    Tiles::fence();
    for (int64_t i = 0; i < chunks_; ++i) multiply(chunk(i), chunk(i + 1));
  }

 private:
  using Block = TileBlock<Tiles, kRowTiles, kStrips>;
  static constexpr int64_t kScaleCols = kType == Bf16StripScale::kE4M3 ? 16 : 32;

  struct Chunk {
    int64_t index;
    int64_t strip;
    int64_t first;  // Columns.
    int64_t end;
  };

  // After the task's chunks come those of the strips that follow in memory.
  [[nodiscard]] Chunk chunk(int64_t index) const {
    const int64_t first = index % chunks_of_unit_ * kScaledChunkCols;
    const int64_t end = first + kScaledChunkCols;
    return {.index = index,
            .strip = first_strip_ + index / chunks_of_unit_ * kStrips,
            .first = first,
            .end = end < task_.cols ? end : task_.cols};
  }
  [[nodiscard]] static int64_t runs(const Chunk& chunk) {
    return (chunk.end - chunk.first + kTileRunCols - 1) / kTileRunCols;
  }
  [[nodiscard]] static int64_t decoding_steps(const Chunk& chunk) { return runs(chunk) * kStrips; }

  // Bytes from a chunk's codes to those that are fetched meanwhile.
  [[nodiscard]] int64_t fetch_distance(const Chunk& from) const {
    const Chunk to = chunk(from.index + kChunksAhead);
    return (to.strip - from.strip) * task_.strip_bytes + (to.first - from.first) * kLanes / 2;
  }

  // A step decodes a run of one strip.
  [[gnu::always_inline]] void decode(const Chunk& chunk, int64_t step, int64_t fetch_distance) {
    constexpr int64_t kRunBytes = kTileRunCols * kLanes / 2;
    constexpr int64_t kLineBytes = 64;
    const int64_t strip = step % kStrips;
    const int64_t run = step / kStrips;
    const int64_t k = chunk.first + run * kTileRunCols;
    const uint8_t* codes = task_.codes + (chunk.strip + strip) * task_.strip_bytes + k * kLanes / 2;
    const uint8_t* scales =
        task_.scales + (chunk.strip + strip) * task_.strip_scale_bytes + k / kScaleCols * kLanes;
    for (int64_t byte = 0; byte < kRunBytes; byte += kLineBytes) {
      __builtin_prefetch(codes + fetch_distance + byte);
    }
    decoder_.decode(codes, scales, k + kTileRunCols / 2 < task_.cols,
                    decoded_[chunk.index % 2][strip] + run * kTileRunCols * kLanes);
  }

  void multiply(const Chunk& chunk, const Chunk& next) {
    const typename Block::Distances distances{kLanes, task_.rows * kLanes};
    const uint16_t* weights[kStrips];
    for (int strip = 0; strip < kStrips; ++strip) weights[strip] = decoded_[chunk.index % 2][strip];
    const int64_t to_decode = next.index < chunks_ ? decoding_steps(next) : 0;
    const int64_t distance = fetch_distance(next);
    const int64_t steps = groups_ * runs(chunk);
    int64_t decoded = 0;
    int64_t due = 0;
    for (int64_t group = 0; group < groups_; ++group) {
      const int64_t first_row = group * task_.group_rows;
      float* sums = task_.sums + (chunk.strip * task_.rows + first_row) * kLanes;
      // The sums of a single group stay in their tiles.
      if (groups_ > 1 || chunk.first == 0) Block::load_sums(sums, distances);
      for (int64_t run = 0; run < runs(chunk); ++run) {
        const int64_t k = run * kTileRunCols;
        Block::add_products(
            task_.values + (chunk.first + k) * task_.rows + first_row * kTileRunCols, weights,
            k * kLanes);
        for (due += to_decode; due >= steps; due -= steps) decode(next, decoded++, distance);
        Tiles::fence();
      }
      if (groups_ > 1 || chunk.end == task_.cols) Block::store_sums(sums, distances);
    }
  }

  const ScaledTileTask& task_;
  const int64_t first_strip_;
  const int64_t groups_;
  const int64_t chunks_of_unit_;
  const int64_t chunks_;
  const typename Tiles::template Decoder<kType> decoder_{};
  alignas(64) uint16_t decoded_[2][kStrips][kScaledChunkCols * kLanes];
};

template <class Tiles, Bf16StripScale kType, int kRowTiles>
void multiply_scaled_strips(const ScaledTileTask& task) {
  const int64_t pairs = task.strips / kTileStrips;
  if (pairs > 0) ScaledStrips<Tiles, kType, kRowTiles, kTileStrips>(task, 0, pairs).run();
  const int64_t left = task.strips % kTileStrips;
  if (left > 0) ScaledStrips<Tiles, kType, kRowTiles, 1>(task, task.strips - left, left).run();
}

template <class Tiles>
void multiply_scaled(const ScaledTileTask& task) {
  const bool has_two = task.group_rows > kTileRows;
  if (task.type == Bf16StripScale::kE4M3) {
    (has_two ? multiply_scaled_strips<Tiles, Bf16StripScale::kE4M3, 2>
             : multiply_scaled_strips<Tiles, Bf16StripScale::kE4M3, 1>)(task);
  } else {
    (has_two ? multiply_scaled_strips<Tiles, Bf16StripScale::kUE8M0, 2>
             : multiply_scaled_strips<Tiles, Bf16StripScale::kUE8M0, 1>)(task);
  }
}

template <class Tiles>
constexpr TileKernels tile_kernels_of() {
  return {.configure = configure<Tiles>,
          .release = Tiles::release,
          .pack_rows = pack_rows<Tiles>,
          .multiply = multiply<Tiles>,
          .multiply_scaled = multiply_scaled<Tiles>};
}

}  // namespace narrowfloat::amx_kernels
