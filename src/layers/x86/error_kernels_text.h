// The kernels of error_kernels.h, written against a level of vector instructions.
//
// Level is a type of an unnamed namespace with
//   Floats             8 fp32 lanes, one for each lane of the sums
//   Doubles, kDoubles  a vector of doubles, and its lanes
//   Counts             8 counters of 32 bits
// and elementary operations. Products and sums are rounded apart, never fused.
#pragma once

#include "layers/x86/error_kernels.h"

namespace narrowfloat::error_kernels {

template <class Level, ErrorOperand kType>
typename Level::Floats load(const void* elements, int64_t first) {
  if constexpr (kType == ErrorOperand::kF32) {
    return Level::load_f32(static_cast<const char*>(elements) + first * 4);
  } else if constexpr (kType == ErrorOperand::kBf16) {
    return Level::load_bf16(static_cast<const char*>(elements) + first * 2);
  } else {
    return Level::load_f16(static_cast<const char*>(elements) + first * 2);
  }
}

template <class Level>
struct Sums {
  static constexpr int kParts = static_cast<int>(kErrorLanes) / Level::kDoubles;

  typename Level::Doubles parts[kParts];

  void load(const double* lanes) {
    for (int i = 0; i < kParts; ++i) parts[i] = Level::load_doubles(lanes + i * Level::kDoubles);
  }
  void store(double* lanes) const {
    for (int i = 0; i < kParts; ++i) Level::store_doubles(lanes + i * Level::kDoubles, parts[i]);
  }
};

template <class Level, ErrorOperand kX, ErrorOperand kY>
void add(const PieceOperands& piece, ErrorLanes& lanes, PieceFigures& figures) {
  Sums<Level> error_squares;
  Sums<Level> x_squares;
  Sums<Level> y_squares;
  Sums<Level> products;
  error_squares.load(lanes.error_squares);
  x_squares.load(lanes.x_squares);
  y_squares.load(lanes.y_squares);
  products.load(lanes.products);
  auto largest = Level::zero();
  auto flushed = Level::no_counts();
  auto clipped = Level::no_counts();
  const int64_t block_cols = piece.limits != nullptr ? piece.block_cols : piece.count;
  for (int64_t begin = 0, block = 0; begin < piece.count; begin += block_cols, ++block) {
    const int64_t end = begin + block_cols < piece.count ? begin + block_cols : piece.count;
    const auto limit =
        Level::floats(piece.limits != nullptr ? piece.limits[block] : __builtin_inff());
    for (int64_t i = begin; i < end; i += kErrorLanes) {
      const auto x = load<Level, kX>(piece.x, i);
      const auto y = load<Level, kY>(piece.y, i);
      clipped = Level::count_above(clipped, x, limit);
      flushed = Level::count_flushed(flushed, x, y);
      for (int part = 0; part < Sums<Level>::kParts; ++part) {
        const auto wide_x = Level::widen(x, part);
        const auto wide_y = Level::widen(y, part);
        const auto error = Level::sub(wide_x, wide_y);
        const auto accumulate = [part](Sums<Level>& sums, auto a, auto b) {
          sums.parts[part] = Level::add(sums.parts[part], Level::mul(a, b));
        };
        accumulate(error_squares, error, error);
        accumulate(x_squares, wide_x, wide_x);
        accumulate(y_squares, wide_y, wide_y);
        accumulate(products, wide_x, wide_y);
        largest = Level::max_abs(largest, error);
      }
    }
  }
  error_squares.store(lanes.error_squares);
  x_squares.store(lanes.x_squares);
  y_squares.store(lanes.y_squares);
  products.store(lanes.products);
  double maxima[Level::kDoubles];
  Level::store_doubles(maxima, largest);
  for (const double maximum : maxima) {
    if (maximum > figures.max_abs) figures.max_abs = maximum;
  }
  figures.flushed += Level::total(flushed);
  if (piece.limits != nullptr) figures.clipped += Level::total(clipped);
}

template <class Level>
constexpr ErrorKernels error_kernels_of() {
  constexpr auto kF32 = ErrorOperand::kF32;
  constexpr auto kBf16 = ErrorOperand::kBf16;
  constexpr auto kF16 = ErrorOperand::kF16;
  return {.add = {{add<Level, kF32, kF32>, add<Level, kF32, kBf16>, add<Level, kF32, kF16>},
                  {add<Level, kBf16, kF32>, add<Level, kBf16, kBf16>, add<Level, kBf16, kF16>},
                  {add<Level, kF16, kF32>, add<Level, kF16, kBf16>, add<Level, kF16, kF16>}}};
}

}  // namespace narrowfloat::error_kernels
