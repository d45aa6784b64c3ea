// The kernels of combine_kernels.h, written against a level of vector instructions.
//
// Level is a type of an unnamed namespace with kLanes, vectors of fp32 (Floats), fma() and
//   load<CombineElement>(x, i)        kLanes elements from element i on
//   store<CombineElement>(out, i, x)  rounded once; a NaN becomes the canonical one
#pragma once

#include "ops/combine/x86/combine_kernels.h"

namespace narrowfloat::combine_kernels {

// Columns [col, col + kVectors * kLanes).
template <class Level, CombineElement kRow, CombineElement kOut, int kVectors>
void combine_cols(const CombineTerm* terms, int64_t count, int64_t col, void* out) {
  typename Level::Floats sums[kVectors];
  for (auto& sum : sums) sum = Level::floats(0.0F);
  for (int64_t i = 0; i < count; ++i) {
    const auto weight = Level::floats(terms[i].weight);
    for (int v = 0; v < kVectors; ++v) {
      const auto y = Level::template load<kRow>(terms[i].row, col + v * Level::kLanes);
      sums[v] = Level::fma(weight, y, sums[v]);
    }
  }
  for (int v = 0; v < kVectors; ++v) {
    Level::template store<kOut>(out, col + v * Level::kLanes, sums[v]);
  }
}

template <class Level, CombineElement kRow, CombineElement kOut>
void combine(const CombineTerm* terms, int64_t count, int64_t cols, void* out) {
  constexpr int kVectors = 4;
  constexpr int64_t kCols = kVectors * Level::kLanes;
  int64_t col = 0;
  for (; col + kCols <= cols; col += kCols) {
    combine_cols<Level, kRow, kOut, kVectors>(terms, count, col, out);
  }
  for (; col < cols; col += Level::kLanes) {
    combine_cols<Level, kRow, kOut, 1>(terms, count, col, out);
  }
}

template <class Level>
constexpr CombineKernels combine_kernels_of() {
  using enum CombineElement;
  return {
      .combine = {
          {combine<Level, kF32, kF32>, combine<Level, kF32, kBf16>, combine<Level, kF32, kF16>},
          {combine<Level, kBf16, kF32>, combine<Level, kBf16, kBf16>, combine<Level, kBf16, kF16>},
          {combine<Level, kF16, kF32>, combine<Level, kF16, kBf16>, combine<Level, kF16, kF16>}}};
}

}  // namespace narrowfloat::combine_kernels
