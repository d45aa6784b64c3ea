// Owning tensors in guarded memory, and the views that the operations take.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "narrowfloat/quantize.h"
#include "support/fills.h"
#include "support/guarded_buffer.h"

namespace narrowfloat::testing {

// [batch * rows, cols] with a gap after each row. view() has rank 2 or 3.
struct MatrixShape {
  DType dtype = DType::kBF16;
  int64_t batch = 1;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t gap = 0;  // Elements between rows; poison.
};

class Matrix {
 public:
  Matrix() = default;
  explicit Matrix(const MatrixShape& shape, const BufferStyle& style = {});
  static Matrix filled(const MatrixShape& shape, Fill fill, uint64_t seed,
                       const BufferStyle& style = {});

  [[nodiscard]] const MatrixShape& shape() const { return shape_; }
  [[nodiscard]] TensorView view(int rank = 2) const;
  [[nodiscard]] int64_t num_rows() const { return shape_.batch * shape_.rows; }
  [[nodiscard]] int64_t stride() const { return shape_.cols + shape_.gap; }
  [[nodiscard]] void* row(int64_t flat_row) const;
  [[nodiscard]] float at(int64_t flat_row, int64_t col) const;
  void set(int64_t flat_row, int64_t col, float value) const;
  void poison_row(int64_t flat_row, uint8_t byte) const;
  // The elements without the gaps.
  [[nodiscard]] std::vector<uint8_t> elements() const;
  [[nodiscard]] const GuardedBuffer& buffer() const { return buffer_; }

 private:
  MatrixShape shape_;
  GuardedBuffer buffer_;
};

// A dense vector: scales, row lists, offsets, weights.
class Vector {
 public:
  Vector() = default;
  Vector(DType dtype, int64_t count, const BufferStyle& style = {});
  template <typename T>
  static Vector of(DType dtype, const std::vector<T>& values, const BufferStyle& style = {}) {
    Vector vector(dtype, static_cast<int64_t>(values.size()), style);
    for (size_t i = 0; i < values.size(); ++i) vector.buffer_.template data<T>()[i] = values[i];
    return vector;
  }
  [[nodiscard]] TensorView view() const;
  [[nodiscard]] const GuardedBuffer& buffer() const { return buffer_; }

 private:
  DType dtype_ = DType::kF32;
  int64_t count_ = 0;
  GuardedBuffer buffer_;
};

// The three buffers of a quantized tensor.
struct QuantizedTensor {
  QuantizedLayout layout{};
  GuardedBuffer values;
  GuardedBuffer scales;
  GuardedBuffer global_scale;
  QuantizedView view;

  QuantizedTensor() = default;
  // global_scales: number of decode scales, if not the layout's.
  explicit QuantizedTensor(const QuantizedLayout& quantized_layout, const BufferStyle& style = {},
                           std::optional<int64_t> global_scales = {});
  [[nodiscard]] bool intact() const {
    return values.intact() && scales.intact() && global_scale.intact();
  }
};

// The three buffers' bytes, for comparisons.
struct QuantizedBytes {
  std::vector<uint8_t> values;
  std::vector<uint8_t> scales;
  std::vector<uint8_t> global_scale;
  bool operator==(const QuantizedBytes&) const = default;
};
QuantizedBytes bytes_of(const QuantizedTensor& tensor);

// Quantizes `input` into a fresh tensor.
struct QuantizeTo {
  FormatId format = FormatId::kNvfp4;
  std::optional<ScaleLayoutId> layout;
  QuantizeOptions options;
  int64_t alignment = 32;
};
QuantizedTensor quantized(const Matrix& input, const QuantizeTo& to);

// Decoded to F32.
Matrix dequantized(const QuantizedView& tensor);

}  // namespace narrowfloat::testing
