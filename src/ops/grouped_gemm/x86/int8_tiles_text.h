// The kernels of int8_tiles.h, written against a processor's matrix tiles.
//
// Tiles is a type of an unnamed namespace with
//   configure(rows), release()     the extents of tiles: sums [rows][16], rows [rows][32 bytes] and
//                                  weights [8][64 bytes]
//   multiply<kIndex>(rows, weights, sums)
//                                  loads rows, 32 bytes apart, and weights, and stores the sums of
//                                  their products; calls alternate between kIndex 0 and 1, each
//                                  with tiles of its own
//   fence()                        tiles see what was stored before
// and with Floats, a vector of 16 fp32:
//   load(from), store(to, x), add(a, b), mul(a, b), broadcast(from)
//   of_integers(from)              16 of int32
//   decode(codes, low, high)       stores 2 * value of the lower and upper four bits of 64 bytes
//   ue8m0(codes)                   16 scales
#pragma once

#include "ops/grouped_gemm/x86/int8_tiles.h"

namespace narrowfloat::int8_tiles {

constexpr int64_t kLanes = 16;
constexpr int64_t kGroupCols = 32;
constexpr int64_t kStepCols = 8;
constexpr int64_t kStepBytes = 64;
constexpr int64_t kPrefetchBytes = 4096;
constexpr int64_t kPageBytes = 4096;

template <class Tiles>
void decode(const Int8Strips& strips, int64_t strip, int64_t first, int64_t cols, uint8_t* out,
            float* factors) {
  const int64_t stride = strips.count * kStepBytes;
  const uint8_t* codes = strips.codes + first / kStepCols * stride + strip * kStepBytes;
  for (int64_t k = 0; k < cols; k += kStepCols, codes += stride, out += 2 * kStepBytes) {
    __builtin_prefetch(codes + kPrefetchBytes);
    Tiles::decode(codes, out, out + kStepBytes);
  }
  const uint8_t* scales = strips.scales + (first / kGroupCols * strips.count + strip) * kLanes;
  for (int64_t k = 0; k < cols; k += kGroupCols) {
    Tiles::store(factors, Tiles::ue8m0(scales));
    factors += kLanes;
    scales += strips.count * kLanes;
  }
}

// The totals of kRows rows stay in registers. While the tiles multiply a group, the sums of the one
// before are scaled and added.
template <class Tiles, int kRows>
class Group {
 public:
  Group(const Int8TileChunk& chunk, int64_t first_row) : chunk_(chunk), first_row_(first_row) {}

  void run() const {
    float* sums = chunk_.sums + first_row_ * kTotalRow;
    Floats totals[kRows];
    // Unrolled early, as below, for the totals to be registers.
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) totals[row] = Tiles::load(sums + row * kTotalRow);
    alignas(kPageBytes) Sums inner[2];
    static_assert(sizeof(inner) <= kPageBytes / 2);
    const int64_t groups = chunk_.cols / kGroupCols;
    multiply<0>(0, inner);
    for (int64_t group = 0; group < groups; group += 2) {
      if (group + 1 < groups) multiply<1>(group + 1, inner);
      add(group, inner[0], totals);
      if (group + 1 == groups) break;
      if (group + 2 < groups) multiply<0>(group + 2, inner);
      add(group + 1, inner[1], totals);
    }
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) Tiles::store(sums + row * kTotalRow, totals[row]);
  }

 private:
  static constexpr int64_t kTotalRow = kInt8TaskStrips * kLanes;
  using Floats = typename Tiles::Floats;
  using Sums = int32_t[kRows][kLanes];

  template <int kIndex>
  void multiply(int64_t group, Sums* inner) const {
    const int64_t k = group * kGroupCols;
    Tiles::template multiply<kIndex>(chunk_.values + k * chunk_.rows + first_row_ * kGroupCols,
                                     chunk_.weights + k * kLanes, inner[kIndex][0]);
  }

  // Inlined, so that the totals are registers.
  [[gnu::always_inline]] void add(int64_t group, const Sums& inner, Floats (&totals)[kRows]) const {
    const Floats of_weights = Tiles::load(chunk_.factors + group * kLanes);
    const float* half_scales = chunk_.half_scales + group * chunk_.rows + first_row_;
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) {
      const Floats factor = Tiles::mul(Tiles::broadcast(half_scales + row), of_weights);
      totals[row] = Tiles::add(totals[row], Tiles::mul(factor, Tiles::of_integers(inner[row])));
    }
  }

  const Int8TileChunk& chunk_;
  const int64_t first_row_;
};

template <class Tiles, int kRows>
void multiply_groups(const Int8TileChunk& chunk) {
  for (int64_t row = 0; row < chunk.rows; row += kRows) Group<Tiles, kRows>(chunk, row).run();
}

template <class Tiles>
void multiply(const Int8TileChunk& chunk) {
  Tiles::fence();
  switch (chunk.group_rows / kInt8TileStep) {
    case 1:
      return multiply_groups<Tiles, 4>(chunk);
    case 2:
      return multiply_groups<Tiles, 8>(chunk);
    case 3:
      return multiply_groups<Tiles, 12>(chunk);
    default:
      return multiply_groups<Tiles, 16>(chunk);
  }
}

template <class Tiles>
constexpr Int8TileKernels int8_tile_kernels_of() {
  return {.configure = Tiles::configure,
          .release = Tiles::release,
          .decode = decode<Tiles>,
          .multiply = multiply<Tiles>};
}

}  // namespace narrowfloat::int8_tiles
