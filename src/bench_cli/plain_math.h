// The fp32 arithmetic of a transformer outside of its experts: matrix products, RMS norm, rotary
// embedding, softmax. Sums have a fixed order, on one thread.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace narrowfloat::cli {

// A dense matrix in memory with any strides: element (i, j) is at data[i * row + j * col].
struct StridedMatrix {
  const float* data = nullptr;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t row_stride = 0;
  int64_t col_stride = 1;
};

// The right-hand side of a product: [inner, cols] in strips of a few columns, one after another, so
// that the inner loop reads memory in order.
class PackedMatrix {
 public:
  static constexpr int64_t kStrip = 16;

  PackedMatrix() = default;
  // Reuses the memory of what was packed before.
  void pack(const StridedMatrix& matrix);
  [[nodiscard]] int64_t inner() const { return inner_; }
  [[nodiscard]] int64_t cols() const { return cols_; }
  [[nodiscard]] const float* strip(int64_t index) const {
    return data_.data() + index * inner_ * kStrip;
  }

 private:
  int64_t inner_ = 0;
  int64_t cols_ = 0;
  std::vector<float> data_;
};

// The left-hand side and the result of a product, both with dense columns.
struct ProductRows {
  const float* a = nullptr;
  int64_t a_stride = 0;
  float* c = nullptr;
  int64_t c_stride = 0;
  int64_t rows = 0;
  int64_t inner = 0;  // At most the packed matrix's.
  int64_t cols = 0;   // Likewise.
};
// c = a * b over the first `inner` rows and `cols` columns of b, each sum in ascending order.
void multiply(const ProductRows& rows, const PackedMatrix& b);

// out = x / sqrt(mean(x^2) + eps) * weight; `out` may be x.
void rms_norm(const float* x, std::span<const float> weight, float eps, float* out);

// Cosines and sines of the rotary embedding for positions [0, positions).
class RotaryTable {
 public:
  RotaryTable() = default;
  RotaryTable(int64_t positions, int64_t head_dim, double theta);
  // Rotates one head: (u[j], u[j + half]) by the angle of position and j (half split).
  void rotate(float* head, int64_t position) const;

 private:
  int64_t half_ = 0;
  std::vector<float> cos_;
  std::vector<float> sin_;
};

// values = softmax(values * scale), for at least one value. Up to a multiple of kSoftmaxAlignment
// values after them are overwritten.
constexpr int64_t kSoftmaxAlignment = 16;
void softmax(float* values, int64_t count, float scale);

// -log2 of the softmax probability of `index`.
double surprise_bits(std::span<const float> logits, size_t index);

}  // namespace narrowfloat::cli
