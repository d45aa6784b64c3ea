// A product works on tiles of rows by vectors of columns, whose sums stay in registers; every
// element is a sum in ascending order whatever the tile. Vectors are as wide as the CPU has them.
// They have the same operations at every width, none of them fused, so results have the same bits
// everywhere.
#include "bench_cli/plain_math.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace narrowfloat::cli {
namespace {

// Columns at a time: types of GCC and Clang for every CPU. Compilers do not find them in a loop
// over floats, which is eight times slower. Functions take vectors by reference, since the calling
// convention of wide ones depends on the CPU; they become part of a function for a CPU that has
// such vectors.
template <int kBytes>
struct Vectors {
  typedef float Floats __attribute__((vector_size(kBytes)));  // NOLINT(modernize-use-using): clang
  typedef int32_t Ints __attribute__((vector_size(kBytes)));  // NOLINT(modernize-use-using): clang
  static constexpr int64_t kLanes = kBytes / sizeof(float);
};
constexpr int64_t kStrip = PackedMatrix::kStrip;

// `kRows` rows of c from `column` on, whose columns of b are at `strip`.
template <class Vector, int64_t kRows>
[[gnu::always_inline]] inline void multiply_tile(const ProductRows& rows, int64_t first_row,
                                                 const float* strip, int64_t column) {
  using Floats = typename Vector::Floats;
  constexpr int64_t kLanes = Vector::kLanes;
  constexpr int64_t kVectors = kLanes == kStrip ? 1 : 2;
  constexpr int64_t kCols = kVectors * kLanes;
  Floats sums[kRows][kVectors] = {};
  const float* a = rows.a + first_row * rows.a_stride;
  for (int64_t k = 0; k < rows.inner; ++k) {
    Floats b[kVectors];
    std::memcpy(&b, strip + k * kStrip, sizeof(b));
#pragma GCC unroll 8
    for (int64_t r = 0; r < kRows; ++r) {
      const float factor = a[r * rows.a_stride + k];
#pragma GCC unroll 2
      for (int64_t v = 0; v < kVectors; ++v) sums[r][v] += factor * b[v];
    }
  }
  float* c = rows.c + first_row * rows.c_stride + column;
  const int64_t left = rows.cols - column;
#pragma GCC unroll 8
  for (int64_t r = 0; r < kRows; ++r) {
    if (left >= kCols) {
      std::memcpy(c + r * rows.c_stride, &sums[r], sizeof(sums[r]));
    } else {
      float padded[kCols];
      std::memcpy(padded, &sums[r], sizeof(sums[r]));
      std::copy_n(padded, left, c + r * rows.c_stride);
    }
  }
}

template <class Vector, int64_t kRows>
[[gnu::always_inline]] inline void multiply_with(const ProductRows& rows, const PackedMatrix& b) {
  constexpr int64_t kCols = std::min(2 * Vector::kLanes, kStrip);
  for (int64_t column = 0; column < rows.cols; column += kCols) {
    const float* strip = b.strip(column / kStrip) + column % kStrip;
    int64_t row = 0;
    for (; row + kRows <= rows.rows; row += kRows) {
      multiply_tile<Vector, kRows>(rows, row, strip, column);
    }
    for (; row < rows.rows; ++row) multiply_tile<Vector, 1>(rows, row, strip, column);
  }
}

// x = exp(x) for x <= 0 within 3 ulp; less than 2^-125 for x < -87.
template <class Vector>
[[gnu::always_inline]] inline void exponential(typename Vector::Floats& x) {
  using Floats = typename Vector::Floats;
  using Ints = typename Vector::Ints;
  constexpr float kRound = 0x1.8p23F;
  const Floats bounded = x < -87.0F ? Floats{} - 87.0F : x;
  // The nearest integer of x / ln 2 is in the lowest bits of `shifted`.
  const Floats shifted = bounded * 0x1.715476p+0F + kRound;
  const Floats n = shifted - kRound;
  // ln 2 in two parts; the product with the first one is exact.
  const Floats r = bounded - n * 0x1.62e400p-1F - n * 0x1.7f7d1cp-20F;
  Floats p = r * (1.0F / 720.0F) + 1.0F / 120.0F;
  p = p * r + 1.0F / 24.0F;
  p = p * r + 1.0F / 6.0F;
  p = p * r + 0.5F;
  p = p * r + 1.0F;
  p = p * r + 1.0F;
  Ints bits;
  Ints exponent;
  std::memcpy(&bits, &p, sizeof(p));
  std::memcpy(&exponent, &shifted, sizeof(shifted));
  bits += exponent << 23;
  std::memcpy(&x, &bits, sizeof(bits));
}

// Sixteen partial sums whatever the vectors are, so that they are added in one order.
template <class Vector>
[[gnu::always_inline]] inline void softmax_with(float* values, int64_t count, float scale) {
  using Floats = typename Vector::Floats;
  constexpr int64_t kVectors = kSoftmaxAlignment / Vector::kLanes;
  const int64_t end = (count + kSoftmaxAlignment - 1) / kSoftmaxAlignment * kSoftmaxAlignment;
  std::fill(values + count, values + end, std::numeric_limits<float>::lowest());
  Floats x[kVectors];
  Floats maxima[kVectors];
  std::memcpy(&maxima, values, sizeof(maxima));
  for (int64_t i = kSoftmaxAlignment; i < end; i += kSoftmaxAlignment) {
    std::memcpy(&x, values + i, sizeof(x));
    for (int64_t v = 0; v < kVectors; ++v) maxima[v] = x[v] > maxima[v] ? x[v] : maxima[v];
  }
  float lanes[kSoftmaxAlignment];
  std::memcpy(lanes, &maxima, sizeof(lanes));
  const float largest = *std::max_element(lanes, lanes + kSoftmaxAlignment);
  Floats sums[kVectors] = {};
  for (int64_t i = 0; i < end; i += kSoftmaxAlignment) {
    std::memcpy(&x, values + i, sizeof(x));
    for (int64_t v = 0; v < kVectors; ++v) {
      x[v] = (x[v] - largest) * scale;
      exponential<Vector>(x[v]);
      sums[v] += x[v];
    }
    std::memcpy(values + i, &x, sizeof(x));
  }
  std::memcpy(lanes, &sums, sizeof(lanes));
  for (int64_t step = kSoftmaxAlignment / 2; step > 0; step /= 2) {
    for (int64_t i = 0; i < step; ++i) lanes[i] += lanes[i + step];
  }
  for (int64_t i = 0; i < end; i += kSoftmaxAlignment) {
    std::memcpy(&x, values + i, sizeof(x));
    for (int64_t v = 0; v < kVectors; ++v) x[v] /= lanes[0];
    std::memcpy(values + i, &x, sizeof(x));
  }
}

// The functions for one width of vectors.
struct Kernels {
  void (*multiply)(const ProductRows& rows, const PackedMatrix& b);
  void (*softmax)(float* values, int64_t count, float scale);
};

#if defined(__x86_64__)
[[gnu::target("avx512f")]] void multiply_avx512(const ProductRows& rows, const PackedMatrix& b) {
  multiply_with<Vectors<64>, 8>(rows, b);
}
[[gnu::target("avx512f")]] void softmax_avx512(float* values, int64_t count, float scale) {
  softmax_with<Vectors<64>>(values, count, scale);
}
[[gnu::target("avx2")]] void multiply_avx2(const ProductRows& rows, const PackedMatrix& b) {
  multiply_with<Vectors<32>, 4>(rows, b);
}
[[gnu::target("avx2")]] void softmax_avx2(float* values, int64_t count, float scale) {
  softmax_with<Vectors<32>>(values, count, scale);
}
#endif
void multiply_portable(const ProductRows& rows, const PackedMatrix& b) {
  multiply_with<Vectors<16>, 4>(rows, b);
}
void softmax_portable(float* values, int64_t count, float scale) {
  softmax_with<Vectors<16>>(values, count, scale);
}

Kernels kernels_of_cpu() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") != 0) return {multiply_avx512, softmax_avx512};
  if (__builtin_cpu_supports("avx2") != 0) return {multiply_avx2, softmax_avx2};
#endif
  return {multiply_portable, softmax_portable};
}
const Kernels kKernels = kernels_of_cpu();

}  // namespace

void PackedMatrix::pack(const StridedMatrix& matrix) {
  inner_ = matrix.rows;
  cols_ = matrix.cols;
  const int64_t strips = (cols_ + kStrip - 1) / kStrip;
  // Padding columns may have any number: they are computed and dropped.
  data_.resize(static_cast<size_t>(strips * inner_ * kStrip));
  for (int64_t j = 0; j < cols_; ++j) {
    float* out = data_.data() + j / kStrip * inner_ * kStrip + j % kStrip;
    const float* in = matrix.data + j * matrix.col_stride;
    for (int64_t k = 0; k < inner_; ++k) out[k * kStrip] = in[k * matrix.row_stride];
  }
}

void multiply(const ProductRows& rows, const PackedMatrix& b) { kKernels.multiply(rows, b); }

void softmax(float* values, int64_t count, float scale) { kKernels.softmax(values, count, scale); }

void rms_norm(const float* x, std::span<const float> weight, float eps, float* out) {
  // Eight partial sums: one chain of additions would be most of the time.
  constexpr size_t kSums = 8;
  float sums[kSums] = {};
  size_t i = 0;
  for (; i + kSums <= weight.size(); i += kSums) {
    for (size_t j = 0; j < kSums; ++j) sums[j] += x[i + j] * x[i + j];
  }
  for (size_t j = 0; i + j < weight.size(); ++j) sums[j] += x[i + j] * x[i + j];
  float squares = 0;
  for (const float sum : sums) squares += sum;
  const float mean = squares / static_cast<float>(weight.size());
  const float factor = 1.0F / std::sqrt(mean + eps);
  for (size_t k = 0; k < weight.size(); ++k) out[k] = x[k] * factor * weight[k];
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

double surprise_bits(std::span<const float> logits, size_t index) {
  const double largest = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float logit : logits) sum += std::exp(logit - largest);
  return (std::log(sum) + largest - logits[index]) / std::log(2.0);
}

}  // namespace narrowfloat::cli
