// Checks at the door of the operations: each throws kInvalidArgument with the argument's name, what
// was expected, what came, and how to fix it. Nothing has been written when they run.
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
// Not null unless empty, and aligned to its elements.
void require_data(std::string_view argument, const TensorView& view);
// Row-major without gaps.
void require_dense(std::string_view argument, const TensorView& view);
// A dense F32 / I32 / I64 vector of `count` elements on `device`.
void require_vector(std::string_view argument, const TensorView& view, DType dtype, int64_t count,
                    Device device);

// A dense tensor of one of the types, exactly `shape`, on `device`.
void require_tensor(std::string_view argument, const TensorView& view,
                    std::initializer_list<DType> allowed, std::initializer_list<int64_t> shape,
                    Device device);

// On CUDA devices the buffer and its rows start at multiples of 16 bytes, the width of the loads
// and stores there (spec 1.8). Every other device takes anything.
inline constexpr int64_t kCudaAlignment = 16;
void require_cuda_alignment(std::string_view argument, const void* data, Device device);
// `row_bytes`: from a row to the next.
void require_cuda_rows(std::string_view argument, const void* data, int64_t row_bytes,
                       Device device);

// Rank within bounds, no negative extent.
void require_view(std::string_view argument, const TensorView& view);

// A tensor as a matrix of all its leading extents by `cols`.
struct RowMatrix {
  int64_t rows = 0;
  int64_t stride = 0;  // In elements.
};
// The last extent must be `cols` with stride 1, and the leading extents must lie evenly, so that
// one row stride serves them all.
RowMatrix require_rows(std::string_view argument, const TensorView& view, int64_t cols);

// Rows in batches, each with strides of their own.
struct BatchedRows {
  int64_t batch_stride = 0;  // In elements.
  int64_t row_stride = 0;
};
// As require_rows for batch * rows rows; a view of exactly [batch, rows, cols] may have any two
// leading strides of at least `cols`: a transposed view, say. Of an axis of one entry the stride
// does not count; what comes back for it is a stride of the view that counts, or `cols`.
BatchedRows require_batched_rows(std::string_view argument, const TensorView& view, int64_t batch,
                                 int64_t rows, int64_t cols);

// A buffer in memory, for require_disjoint.
struct ByteRange {
  std::string_view argument;
  const void* data = nullptr;
  int64_t size_bytes = 0;
};
// From the first to the last element, whatever the strides.
ByteRange byte_range(std::string_view argument, const TensorView& view);
ByteRange byte_range(std::string_view argument, const ScaleView& view);
// No output shares bytes with another output or an input.
void require_disjoint(std::span<const ByteRange> outputs, std::span<const ByteRange> inputs);

// Values, scales and global scale of a quantized tensor agree with each other and with the format.
// scale_rows: logical rows the scale image must have.
void require_quantized(std::string_view argument, const QuantizedView& view, int64_t scale_rows);
// Type, extents and buffer size of a scale image.
void require_scales(std::string_view argument, const ScaleView& view, FormatId format);

// Offsets of FP8 1x128 row groups: ascending from 0 to `rows`.
void require_row_offsets(const TensorView& offsets, int64_t rows, Device device);

}  // namespace narrowfloat
