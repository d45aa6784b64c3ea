// A product works on tiles of 4 rows by two vectors of columns, whose sums stay in registers; every
// element is a sum in ascending order whatever the tile. CPUs with AVX2 have vectors of their own,
// with the same operations and so the same bits.
#include "bench_cli/plain_math.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

namespace narrowfloat::cli {
namespace {

// Columns at a time: a type of GCC and Clang for every CPU. Compilers do not find it in a loop over
// floats, which is eight times slower.
using FourLanes = float __attribute__((vector_size(16)));
using EightLanes = float __attribute__((vector_size(32)));
constexpr int64_t kStrip = PackedMatrix::kStrip;
constexpr int64_t kRowTile = 4;

// `kRows` rows of c from `column` on, whose columns of b are at `strip`. It becomes part of a
// function for a CPU that has such vectors.
template <int64_t kRows, typename Lanes>
[[gnu::always_inline]] inline void multiply_tile(const ProductRows& rows, int64_t first_row,
                                                 const float* strip, int64_t column) {
  constexpr int64_t kLanes = sizeof(Lanes) / sizeof(float);
  std::array<Lanes, kRows> low{};
  std::array<Lanes, kRows> high{};
  const float* a = rows.a + first_row * rows.a_stride;
  for (int64_t k = 0; k < rows.inner; ++k) {
    Lanes b_low;
    Lanes b_high;
    std::memcpy(&b_low, strip + k * kStrip, sizeof(Lanes));
    std::memcpy(&b_high, strip + k * kStrip + kLanes, sizeof(Lanes));
#pragma GCC unroll 4
    for (int64_t r = 0; r < kRows; ++r) {
      const float factor = a[r * rows.a_stride + k];
      low[static_cast<size_t>(r)] += factor * b_low;
      high[static_cast<size_t>(r)] += factor * b_high;
    }
  }
  const auto count = static_cast<size_t>(std::min(2 * kLanes, rows.cols - column));
  for (int64_t r = 0; r < kRows; ++r) {
    std::array<float, 2 * kLanes> sums{};
    std::memcpy(sums.data(), &low[static_cast<size_t>(r)], sizeof(Lanes));
    std::memcpy(sums.data() + kLanes, &high[static_cast<size_t>(r)], sizeof(Lanes));
    std::copy_n(sums.data(), count, rows.c + (first_row + r) * rows.c_stride + column);
  }
}

template <typename Lanes>
[[gnu::always_inline]] inline void multiply_with(const ProductRows& rows, const PackedMatrix& b) {
  constexpr int64_t kCols = 2 * sizeof(Lanes) / sizeof(float);
  for (int64_t column = 0; column < rows.cols; column += kCols) {
    const float* strip = b.strip(column / kStrip) + column % kStrip;
    int64_t row = 0;
    for (; row + kRowTile <= rows.rows; row += kRowTile) {
      multiply_tile<kRowTile, Lanes>(rows, row, strip, column);
    }
    for (; row < rows.rows; ++row) multiply_tile<1, Lanes>(rows, row, strip, column);
  }
}

#if defined(__x86_64__)
[[gnu::target("avx2")]] void multiply_with_avx2(const ProductRows& rows, const PackedMatrix& b) {
  multiply_with<EightLanes>(rows, b);
}
#endif

}  // namespace

void PackedMatrix::pack(const StridedMatrix& matrix) {
  inner_ = matrix.rows;
  cols_ = matrix.cols;
  const int64_t strips = (cols_ + kStrip - 1) / kStrip;
  // Padding columns are zero: they are computed and dropped.
  data_.assign(static_cast<size_t>(strips * inner_ * kStrip), 0.0F);
  for (int64_t j = 0; j < cols_; ++j) {
    float* out = data_.data() + j / kStrip * inner_ * kStrip + j % kStrip;
    const float* in = matrix.data + j * matrix.col_stride;
    for (int64_t k = 0; k < inner_; ++k) out[k * kStrip] = in[k * matrix.row_stride];
  }
}

void multiply(const ProductRows& rows, const PackedMatrix& b) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") != 0) return multiply_with_avx2(rows, b);
#endif
  multiply_with<FourLanes>(rows, b);
}

void rms_norm(const float* x, std::span<const float> weight, float eps, float* out) {
  float squares = 0;
  for (size_t i = 0; i < weight.size(); ++i) squares += x[i] * x[i];
  const float mean = squares / static_cast<float>(weight.size());
  const float factor = 1.0F / std::sqrt(mean + eps);
  for (size_t i = 0; i < weight.size(); ++i) out[i] = x[i] * factor * weight[i];
}

RotaryTable::RotaryTable(int64_t positions, int64_t head_dim, double theta) : half_(head_dim / 2) {
  for (int64_t position = 0; position < positions; ++position) {
    for (int64_t j = 0; j < half_; ++j) {
      const double exponent = -static_cast<double>(j) / static_cast<double>(half_);
      const double angle = static_cast<double>(position) * std::pow(theta, exponent);
      cos_.push_back(static_cast<float>(std::cos(angle)));
      sin_.push_back(static_cast<float>(std::sin(angle)));
    }
  }
}

void RotaryTable::rotate(float* head, int64_t position) const {
  const float* cosines = cos_.data() + position * half_;
  const float* sines = sin_.data() + position * half_;
  for (int64_t j = 0; j < half_; ++j) {
    const float first = head[j];
    const float second = head[j + half_];
    head[j] = first * cosines[j] - second * sines[j];
    head[j + half_] = second * cosines[j] + first * sines[j];
  }
}

void softmax(std::span<float> values, float scale) {
  const float largest = *std::max_element(values.begin(), values.end());
  float sum = 0;
  for (float& value : values) {
    value = std::exp((value - largest) * scale);
    sum += value;
  }
  for (float& value : values) value /= sum;
}

double surprise_bits(std::span<const float> logits, size_t index) {
  const double largest = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float logit : logits) sum += std::exp(logit - largest);
  return (std::log(sum) + largest - logits[index]) / std::log(2.0);
}

}  // namespace narrowfloat::cli
