// See tensors.h.
#include "support/tensors.h"

#include <array>
#include <cstring>
#include <utility>
#include <vector>

#include "tensor/element_io.h"

namespace narrowfloat::testing {
namespace {

// The elements of a fill. A conformance test asks for the same ones once for each implementation,
// and making them takes longer than most implementations.
struct FilledElements {
  Fill fill{};
  DType dtype{};
  uint64_t seed = 0;
  std::vector<uint8_t> bytes;

  [[nodiscard]] bool are(Fill its_fill, DType its_dtype, uint64_t its_seed, size_t size) const {
    return !bytes.empty() && fill == its_fill && dtype == its_dtype && seed == its_seed &&
           bytes.size() == size;
  }
};

// Valid until the next call of the thread but one: an input and a residual alternate.
const std::vector<uint8_t>& filled_elements(Fill fill, DType dtype, uint64_t seed, int64_t count) {
  thread_local std::array<FilledElements, 2> latest;
  const auto size = static_cast<size_t>(count * element_bytes(dtype));
  for (const FilledElements& one : latest) {
    if (one.are(fill, dtype, seed, size)) return one.bytes;
  }
  std::swap(latest[0], latest[1]);
  latest[0] = {fill, dtype, seed, std::vector<uint8_t>(size)};
  Random random(seed);
  // One fill over all elements, so that its parameters are those of the matrix.
  fill_elements(fill, dtype, random, count, latest[0].bytes.data());
  return latest[0].bytes;
}

}  // namespace

Matrix::Matrix(const MatrixShape& shape, const BufferStyle& style) : shape_(shape) {
  // The last row has no gap: a guard follows it.
  const int64_t elements = num_rows() == 0 ? 0 : (num_rows() - 1) * stride() + shape.cols;
  BufferStyle aligned = style;
  aligned.misalignment -= aligned.misalignment % element_bytes(shape.dtype);
  buffer_ = GuardedBuffer(elements * element_bytes(shape.dtype), aligned);
}

Matrix Matrix::filled(const MatrixShape& shape, Fill fill, uint64_t seed,
                      const BufferStyle& style) {
  Matrix matrix(shape, style);
  const auto row_bytes = static_cast<size_t>(shape.cols * element_bytes(shape.dtype));
  const std::vector<uint8_t>& all =
      filled_elements(fill, shape.dtype, seed, matrix.num_rows() * shape.cols);
  for (int64_t i = 0; i < matrix.num_rows() && row_bytes > 0; ++i) {
    std::memcpy(matrix.row(i), all.data() + static_cast<size_t>(i) * row_bytes, row_bytes);
  }
  return matrix;
}

TensorView Matrix::view(int rank) const {
  TensorView view = TensorView::contiguous(buffer_.data(), shape_.dtype, {0, 0});
  if (rank == 3) view = TensorView::contiguous(buffer_.data(), shape_.dtype, {0, 0, 0});
  const auto last = static_cast<size_t>(view.rank - 1);
  view.shape[last] = shape_.cols;
  view.strides[last] = 1;
  view.strides[last - 1] = stride();
  view.shape[last - 1] = rank == 3 ? shape_.rows : num_rows();
  if (rank == 3) {
    view.shape[0] = shape_.batch;
    view.strides[0] = shape_.rows * stride();
  }
  return view;
}

void* Matrix::row(int64_t flat_row) const {
  return element_pointer(static_cast<void*>(buffer_.data()), shape_.dtype, flat_row * stride());
}

float Matrix::at(int64_t flat_row, int64_t col) const {
  return load_element(shape_.dtype, row(flat_row), col);
}

void Matrix::set(int64_t flat_row, int64_t col, float value) const {
  store_element(shape_.dtype, element_bits(shape_.dtype, value), col, row(flat_row));
}

void Matrix::poison_row(int64_t flat_row, uint8_t byte) const {
  if (shape_.cols == 0) return;
  std::memset(row(flat_row), byte, static_cast<size_t>(shape_.cols * element_bytes(shape_.dtype)));
}

std::vector<uint8_t> Matrix::elements() const {
  std::vector<uint8_t> all;
  const auto bytes = static_cast<size_t>(shape_.cols * element_bytes(shape_.dtype));
  for (int64_t i = 0; i < num_rows() && bytes > 0; ++i) {
    const auto* first = static_cast<const uint8_t*>(row(i));
    all.insert(all.end(), first, first + bytes);
  }
  return all;
}

Vector::Vector(DType dtype, int64_t count, const BufferStyle& style)
    : dtype_(dtype), count_(count), buffer_(count * element_bytes(dtype), style) {}

TensorView Vector::view() const { return TensorView::contiguous(buffer_.data(), dtype_, {count_}); }

QuantizedTensor::QuantizedTensor(const QuantizedLayout& quantized_layout, const BufferStyle& style,
                                 std::optional<int64_t> global_scales)
    : layout(quantized_layout) {
  if (global_scales && layout.global_scales > 0) layout.global_scales = *global_scales;
  BufferStyle aligned = style;
  values = GuardedBuffer(layout.values_bytes, style);
  aligned.misalignment -= style.misalignment % bytes(format_info(layout.format).scale_type);
  scales = GuardedBuffer(layout.scales_bytes, aligned);
  aligned.misalignment = style.misalignment / 4 * 4;
  global_scale = GuardedBuffer(layout.global_scales * 4, aligned);
  view = layout.bind(values.data(), scales.data(), global_scale.data<float>());
}

QuantizedBytes bytes_of(const QuantizedTensor& tensor) {
  return {tensor.values.copy(), tensor.scales.copy(), tensor.global_scale.copy()};
}

QuantizedTensor quantized(const Matrix& input, const QuantizeTo& to) {
  const MatrixShape& shape = input.shape();
  std::optional<int64_t> global_scales;
  const TensorView& scales = to.options.encode_scales;
  if (!scales.is_absent()) global_scales = scales.num_elements();
  if (!to.options.valid_rows.is_absent() && scales.is_absent() && !to.options.encode_scale &&
      to.format == FormatId::kNvfp4) {
    global_scales = shape.batch;
  }
  QuantizedTensor tensor(
      quantized_layout(
          to.format, shape.rows, shape.cols,
          {.scale_layout = to.layout, .batch = shape.batch, .alignment = to.alignment}),
      {}, global_scales);
  quantize(input.view(), tensor.view, to.options);
  return tensor;
}

Matrix dequantized(const QuantizedView& tensor) {
  Matrix output(
      {.dtype = DType::kF32, .batch = tensor.batch, .rows = tensor.rows, .cols = tensor.cols});
  dequantize(tensor, output.view());
  return output;
}

}  // namespace narrowfloat::testing
