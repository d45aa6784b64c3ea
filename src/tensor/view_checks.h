// Checks of the operations' arguments. Each throws kInvalidArgument with the argument's name, what
// was expected, what came, and how to fix it. They run before anything is written.
#pragma once

#include <initializer_list>
#include <span>
#include <string_view>

#include "narrowfloat/format.h"
#include "narrowfloat/tensor.h"

namespace narrowfloat {

void require_dtype(std::string_view argument, const TensorView& view,
                   std::initializer_list<DType> allowed);
void require_device(std::string_view argument, Device device, Device expected);
// Requires data that is not null unless the view is empty, and that is aligned to its elements.
void require_data(std::string_view argument, const TensorView& view);
// Requires row-major storage without gaps.
void require_dense(std::string_view argument, const TensorView& view);
// Requires a dense F32 / I32 / I64 vector of `count` elements on `device`.
void require_vector(std::string_view argument, const TensorView& view, DType dtype, int64_t count,
                    Device device);

// Requires a dense tensor of one of the types, with exactly `shape`, on `device`.
void require_tensor(std::string_view argument, const TensorView& view,
                    std::initializer_list<DType> allowed, std::initializer_list<int64_t> shape,
                    Device device);

// On CUDA devices the buffer and its rows must start at multiples of 16 bytes, the width of loads
// and stores (spec 1.8). Other devices have no requirement.
inline constexpr int64_t kCudaAlignment = 16;
void require_cuda_alignment(std::string_view argument, const void* data, Device device);
// row_bytes: bytes from a row to the next.
void require_cuda_rows(std::string_view argument, const void* data, int64_t row_bytes,
                       Device device);

// Requires a rank within bounds and no negative extent.
void require_view(std::string_view argument, const TensorView& view);

// A tensor as a matrix of all its leading extents by `cols`.
struct RowMatrix {
  int64_t rows = 0;
  int64_t stride = 0;  // In elements.
};
// Requires a last extent of `cols` with stride 1, and leading extents that one row stride covers.
RowMatrix require_rows(std::string_view argument, const TensorView& view, int64_t cols);

// Rows in batches, each with strides of their own.
struct BatchedRows {
  int64_t batch_stride = 0;  // In elements.
  int64_t row_stride = 0;
};
// As require_rows for batch * rows rows; a view of exactly [batch, rows, cols] may have any two
// leading strides of at least `cols`: a transposed view, say. The stride of an axis of one entry is
// not checked; the result has another stride of the view, or `cols`, in its place.
BatchedRows require_batched_rows(std::string_view argument, const TensorView& view, int64_t batch,
                                 int64_t rows, int64_t cols);

// A buffer in memory, for require_disjoint.
struct ByteRange {
  std::string_view argument;
  const void* data = nullptr;
  int64_t size_bytes = 0;
};
// The bytes from the first to the last element, whatever the strides.
ByteRange byte_range(std::string_view argument, const TensorView& view);
ByteRange byte_range(std::string_view argument, const ScaleView& view);
// Requires that no output shares bytes with another output or an input.
void require_disjoint(std::span<const ByteRange> outputs, std::span<const ByteRange> inputs);

// Requires that values, scales and global scale of a quantized tensor agree with each other and
// with the format. scale_rows: logical rows that the scales must have.
void require_quantized(std::string_view argument, const QuantizedView& view, int64_t scale_rows);
// Requires the type, extents and buffer size of block scales.
void require_scales(std::string_view argument, const ScaleView& view, FormatId format);

// Requires offsets of FP8 1x128 row groups that ascend from 0 to `rows`.
void require_row_offsets(const TensorView& offsets, int64_t rows, Device device);

}  // namespace narrowfloat
