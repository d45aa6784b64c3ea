// The inner loops of cpu_baseline: a few activation rows times the 16 lanes of a decoded strip.
//
// A lane is a weight row. Its sum runs over k in ascending order and never meets another lane, so
// vector width, register blocking and the split of K into chunks change no bit of it.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "ops/grouped_gemm/strip_operands.h"

namespace narrowfloat {

// 128-bit vectors, which every x86-64 and arm64 has.
template <typename Real>
struct Simd;
template <>
struct Simd<float> {
  using Vector [[gnu::vector_size(16)]] = float;
  static constexpr int64_t kWidth = 4;
};
template <>
struct Simd<double> {
  using Vector [[gnu::vector_size(16)]] = double;
  static constexpr int64_t kWidth = 2;
};

template <typename Real>
using VectorOf = typename Simd<Real>::Vector;

inline constexpr int64_t kLanes = 16;

// Multiplies kRows rows with the chunk, kVectors vectors of lanes at a time, whose sums stay in
// registers.
template <typename Real, int kRows, int kVectors>
class RegisterBlock {
 public:
  using Rows = const RowOperand<Real>*;

  static void run(const WeightChunk<Real>& chunk, Rows rows) {
    for (int64_t lane = 0; lane < kLanes; lane += kVectors * kWidth) {
      if (chunk.group_cols == 0) {
        run_ungrouped(chunk, rows, lane);
      } else {
        run_groups(chunk, rows, lane);
      }
    }
  }

 private:
  using Vector = VectorOf<Real>;
  static constexpr int64_t kWidth = Simd<Real>::kWidth;
  using Sums = std::array<std::array<Vector, kVectors>, kRows>;

  static void run_ungrouped(const WeightChunk<Real>& chunk, Rows rows, int64_t lane) {
    Sums sums;
    for (size_t row = 0; row < kRows; ++row) {
      for (size_t v = 0; v < kVectors; ++v) sums[row][v] = load(rows[row].sums + lane, v);
    }
    sums = added(sums, chunk.weights + lane, rows, 0, chunk.cols);
    for (size_t row = 0; row < kRows; ++row) {
      for (size_t v = 0; v < kVectors; ++v) store(sums[row][v], rows[row].sums + lane, v);
    }
  }

  // sums += (row's factor * lane's factor) * (sum over the group), group by group.
  static void run_groups(const WeightChunk<Real>& chunk, Rows rows, int64_t lane) {
    int64_t group = 0;
    for (int64_t k = 0; k < chunk.cols; k += chunk.group_cols, ++group) {
      const int64_t count = std::min(chunk.group_cols, chunk.cols - k);
      const Sums inner = added(Sums{}, chunk.weights + k * kLanes + lane, rows, k, count);
      const Real* factors = chunk.factors + group * kLanes + lane;
      for (size_t row = 0; row < kRows; ++row) {
        Real* sums = rows[row].sums + lane;
        for (size_t v = 0; v < kVectors; ++v) {
          const Vector factor = rows[row].factors[group] * load(factors, v);
          store(load(sums, v) + factor * inner[row][v], sums, v);
        }
      }
    }
  }

  // Adds the products of columns [first, first + count) one after another.
  static Sums added(Sums sums, const Real* weights, Rows rows, int64_t first, int64_t count) {
    std::array<const Real*, kRows> values;
    for (size_t row = 0; row < kRows; ++row) values[row] = rows[row].values + first;
    for (int64_t k = 0; k < count; ++k, weights += kLanes) {
      for (size_t row = 0; row < kRows; ++row) {
        for (size_t v = 0; v < kVectors; ++v) {
          sums[row][v] += values[row][k] * load(weights, v);
        }
      }
    }
    return sums;
  }

  static Vector load(const Real* from, size_t index) {
    Vector vector;
    __builtin_memcpy(&vector, __builtin_assume_aligned(from + index * kWidth, 16), sizeof(vector));
    return vector;
  }
  static void store(Vector vector, Real* to, size_t index) {
    __builtin_memcpy(__builtin_assume_aligned(to + index * kWidth, 16), &vector, sizeof(vector));
  }
};

// Multiplies all rows of a row block, in register blocks that fit the 16 vector registers.
template <typename Real>
void multiply_chunk(const WeightChunk<Real>& chunk, const RowOperand<Real>* rows, int64_t count) {
  constexpr int kHalf = 4;
  for (; count >= 3; rows += 3, count -= 3) RegisterBlock<Real, 3, kHalf>::run(chunk, rows);
  if (count == 2) RegisterBlock<Real, 2, kHalf>::run(chunk, rows);
  if (count == 1) RegisterBlock<Real, 1, kHalf>::run(chunk, rows);
}

}  // namespace narrowfloat
