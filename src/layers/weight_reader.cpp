// Scales of other dtypes than the format's own (BF16 or F8_E8M0 in place of F32) are widened here,
// so that later code sees one dtype.
#include "layers/weight_reader.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/assert.h"
#include "base/int_math.h"
#include "base/throw_error.h"
#include "checkpoint/escape.h"
#include "formats/float16.h"
#include "formats/ue8m0.h"
#include "runtime/parallel.h"

namespace narrowfloat {
namespace {

constexpr int64_t kReadGrain = 64;                // Rows of which parts are read by one task.
constexpr int64_t kPartBytes = int64_t{1} << 20;  // Bytes of whole rows that one task reads.

uint64_t to_unsigned(int64_t value) { return static_cast<uint64_t>(value); }

const CheckpointTensor& part(const Checkpoint& checkpoint, const LogicalTensor& weight,
                             size_t index) {
  const CheckpointTensor* tensor = checkpoint.find(weight.parts.at(index));
  NF_ASSERT(tensor != nullptr);
  return *tensor;
}

float read_global_scale(const Checkpoint& checkpoint, const LogicalTensor& weight) {
  const ConventionSpec& spec = convention_spec(*weight.convention);
  if (spec.global_sense == GlobalScaleSense::kNone) return 1.0F;
  const CheckpointTensor& tensor = part(checkpoint, weight, 2);
  float scale = 0;
  checkpoint.read(tensor, 0, std::as_writable_bytes(std::span(&scale, 1)));
  if (!std::isfinite(scale) || scale <= 0.0F) {
    throw_error(ErrorKind::kCorruptData,
                "{}: tensor '{}': the global scale must be finite and positive, got {}",
                printable(checkpoint.path()), printable(tensor.info.name), scale);
  }
  return scale;
}

float widened_scale(DType dtype, const std::byte* stored) {
  if (dtype == DType::kF8E8M0) return UE8M0::decode(static_cast<uint8_t>(*stored));
  if (dtype == DType::kF32) {
    float scale = 0;
    std::memcpy(&scale, stored, sizeof(scale));
    return scale;
  }
  NF_ASSERT(dtype == DType::kBF16 || dtype == DType::kF16);
  uint16_t pattern = 0;
  std::memcpy(&pattern, stored, sizeof(pattern));
  return dtype == DType::kBF16 ? bf16_to_float(pattern) : f16_to_float(pattern);
}

// The bytes of a row in a file that are read.
struct RowPart {
  uint64_t row_bytes = 0;
  uint64_t begin = 0;
  uint64_t part_bytes = 0;
};

// Reads the part of each row from row `first` on, until `out` is full.
void read_rows(const Checkpoint& checkpoint, const CheckpointTensor& tensor, int64_t first,
               const RowPart& part, std::span<std::byte> out) {
  const uint64_t before = to_unsigned(first) * part.row_bytes;
  if (part.part_bytes == part.row_bytes || out.empty()) {
    // All processors copy from the page cache.
    const auto size = static_cast<int64_t>(out.size());
    parallel_for(ceil_div(size, kPartBytes), 1, [&](int64_t begin, int64_t end) {
      const uint64_t at = to_unsigned(begin * kPartBytes);
      const uint64_t last = to_unsigned(std::min(end * kPartBytes, size));
      checkpoint.read(tensor, before + at, out.subspan(at, last - at));
    });
    return;
  }
  const auto rows = static_cast<int64_t>(out.size() / part.part_bytes);
  parallel_for(rows, kReadGrain, [&](int64_t first_row, int64_t last_row) {
    for (int64_t row = first_row; row < last_row; ++row) {
      const uint64_t index = to_unsigned(row);
      checkpoint.read(tensor, before + index * part.row_bytes + part.begin,
                      out.subspan(index * part.part_bytes, part.part_bytes));
    }
  });
}

// Transposes tile by tile, so that cache lines of both sides are used up while they are cached. One
// task is a strip of source columns of one expert.
template <typename Element>
void transpose_elements(const CodeMatrix& matrix, std::span<const std::byte> from,
                        std::span<std::byte> to) {
  constexpr int64_t kTile = 32;
  const int64_t strips = ceil_div(matrix.cols, kTile);
  const auto copy = [&](int64_t expert, int64_t row, int64_t col) {
    const int64_t before = expert * matrix.rows * matrix.cols;
    const auto source = to_unsigned(before + row * matrix.cols + col) * sizeof(Element);
    const auto target = to_unsigned(before + col * matrix.rows + row) * sizeof(Element);
    std::memcpy(to.data() + target, from.data() + source, sizeof(Element));
  };
  parallel_for(matrix.experts * strips, 1, [&](int64_t begin, int64_t end) {
    for (int64_t strip = begin; strip < end; ++strip) {
      const int64_t expert = strip / strips;
      const int64_t first_col = strip % strips * kTile;
      const int64_t last_col = std::min(first_col + kTile, matrix.cols);
      for (int64_t first_row = 0; first_row < matrix.rows; first_row += kTile) {
        const int64_t last_row = std::min(first_row + kTile, matrix.rows);
        for (int64_t col = first_col; col < last_col; ++col) {
          for (int64_t row = first_row; row < last_row; ++row) copy(expert, row, col);
        }
      }
    }
  });
}

}  // namespace

int64_t PlainReader::cols_of(std::span<const int64_t> shape) {
  return shape.empty() ? 1 : shape.back();
}

int64_t PlainReader::rows_of(std::span<const int64_t> shape) {
  int64_t rows = 1;
  for (size_t i = 0; i + 1 < shape.size(); ++i) rows *= shape[i];
  return rows;
}

uint64_t PlainReader::buffer_bytes(const TensorInfo& info, int64_t rows) {
  return to_unsigned(rows * cols_of(info.shape)) * to_unsigned(bits(info.dtype)) / 8;
}

PlainReader::PlainReader(const Checkpoint& checkpoint, const CheckpointTensor& tensor,
                         int64_t max_rows, std::optional<ColumnRange> columns)
    : checkpoint_(checkpoint),
      tensor_(tensor),
      first_col_(columns ? columns->first : 0),
      cols_(columns ? columns->count : cols_of(tensor.info.shape)),
      rows_(rows_of(tensor.info.shape)),
      buffer_bytes_(size_bytes(std::min(max_rows, rows_) * cols_)),
      buffer_(std::make_unique_for_overwrite<std::byte[]>(buffer_bytes_)) {}

uint64_t PlainReader::size_bytes(int64_t elements) const {
  return to_unsigned(elements) * to_unsigned(bits(tensor_.info.dtype)) / 8;
}

bool PlainReader::load(int64_t first, int64_t count) {
  if (loaded_rows_ == count && loaded_first_ == first) return false;
  loaded_rows_ = 0;
  const std::span<std::byte> target =
      std::span(buffer_.get(), buffer_bytes_).first(size_bytes(count * cols_));
  const int64_t stored_cols = cols_of(tensor_.info.shape);
  read_rows(checkpoint_, tensor_, first,
            {size_bytes(stored_cols), size_bytes(first_col_), size_bytes(cols_)}, target);
  loaded_first_ = first;
  loaded_rows_ = count;
  return true;
}

TensorView PlainReader::view() const {
  return TensorView::contiguous(buffer_.get(), tensor_.info.dtype, {loaded_rows_, cols_});
}

CodeMatrix code_matrix(const LogicalTensor& weight) {
  const std::vector<int64_t>& shape = weight.shape;
  if (shape.size() == 2) return {.experts = 1, .rows = shape[0], .cols = shape[1]};
  NF_ASSERT(shape.size() == 3);
  CodeMatrix matrix = {.experts = shape[0], .rows = shape[1], .cols = shape[2]};
  if (weight.is_transposed) std::swap(matrix.rows, matrix.cols);
  return matrix;
}

void transpose_experts(const CodeMatrix& matrix, DType dtype, std::span<const std::byte> from,
                       std::span<std::byte> to) {
  if (bits(dtype) == 32) {
    transpose_elements<uint32_t>(matrix, from, to);
  } else {
    NF_ASSERT(bits(dtype) == 16);
    transpose_elements<uint16_t>(matrix, from, to);
  }
}

std::vector<float> read_block_scales(const Checkpoint& checkpoint, const LogicalTensor& weight) {
  const CheckpointTensor& tensor = part(checkpoint, weight, 1);
  std::vector<std::byte> stored(tensor.info.size_bytes);
  checkpoint.read(tensor, 0, stored);
  std::vector<float> scales(to_unsigned(tensor.info.num_elements()));
  const size_t stored_bytes = to_unsigned(bits(tensor.info.dtype)) / 8;
  for (size_t i = 0; i < scales.size(); ++i) {
    scales[i] = widened_scale(tensor.info.dtype, &stored[i * stored_bytes]);
  }
  return scales;
}

std::optional<float> stored_scalar(const Checkpoint& checkpoint, const CheckpointTensor& tensor) {
  const DType dtype = tensor.info.dtype;
  const bool is_float = dtype == DType::kF32 || dtype == DType::kBF16 || dtype == DType::kF16;
  if (!is_float || tensor.info.num_elements() != 1) return std::nullopt;
  std::vector<std::byte> stored(tensor.info.size_bytes);
  checkpoint.read(tensor, 0, stored);
  return widened_scale(dtype, stored.data());
}

QuantizedReader::QuantizedReader(const Checkpoint& checkpoint, const LogicalTensor& weight,
                                 int64_t max_rows, std::optional<ColumnRange> columns)
    : checkpoint_(checkpoint),
      values_(part(checkpoint, weight, 0)),
      scales_(part(checkpoint, weight, 1)),
      stored_cols_(code_matrix(weight).cols),
      first_col_(columns ? columns->first : 0),
      coded_(convention_spec(*weight.convention),
             std::min(max_rows, code_matrix(weight).all_rows()),
             columns ? columns->count : stored_cols_, read_global_scale(checkpoint, weight)) {
  NF_ASSERT(first_col_ % format_info(coded_.spec().info.format).block_cols == 0);
  if (coded_.spec().global_sense != GlobalScaleSense::kNone) loaded_bytes_ += sizeof(float);
}

void QuantizedReader::load(int64_t first, int64_t count) {
  const FormatInfo& format = format_info(coded_.spec().info.format);
  const int64_t tile = format.block_rows;
  NF_ASSERT(first % tile == 0 || first % tile + count <= tile);
  coded_.set_rows(count);
  const auto row_bytes = [&](int64_t cols) { return to_unsigned(cols * format.element_bits / 8); };
  read_rows(checkpoint_, values_, first,
            {row_bytes(stored_cols_), row_bytes(first_col_), row_bytes(coded_.cols())},
            coded_.values());
  loaded_bytes_ += coded_.values().size();
  load_scales(first);
}

void QuantizedReader::load_scales_only(int64_t first, int64_t count) {
  coded_.set_rows(count);
  load_scales(first);
}

// The stored scales of rows, or of the tensor, stand for those of blocks.
void QuantizedReader::load_whole_scales(int64_t first) {
  const bool is_per_row = coded_.spec().info.scale_extent == ScaleExtent::kRow;
  const uint64_t stored_bytes = to_unsigned(bits(scales_.info.dtype)) / 8;
  const uint64_t count = is_per_row ? to_unsigned(coded_.rows()) : 1;
  std::vector<std::byte> stored(count * stored_bytes);
  checkpoint_.read(scales_, is_per_row ? to_unsigned(first) * stored_bytes : 0, stored);
  loaded_bytes_ += stored.size();
  std::vector<float> scales(count);
  for (uint64_t i = 0; i < count; ++i) {
    scales[i] = widened_scale(scales_.info.dtype, &stored[i * stored_bytes]);
  }
  coded_.set_whole_scales(scales);
}

void QuantizedReader::load_scales(int64_t first) {
  if (coded_.spec().info.scale_extent != ScaleExtent::kBlock) {
    load_whole_scales(first);
    return;
  }
  const FormatInfo& format = format_info(coded_.spec().info.format);
  const std::span<std::byte> target = coded_.scales();
  const auto scale_bytes = to_unsigned(bytes(scale_type_of(coded_.spec())));
  const uint64_t stored_bytes = to_unsigned(bits(scales_.info.dtype)) / 8;
  const auto row_bytes = [&](int64_t cols) {
    return to_unsigned(ceil_div(cols, format.block_cols)) * stored_bytes;
  };
  const auto read = [&](std::span<std::byte> out) {
    read_rows(checkpoint_, scales_, first / format.block_rows,
              {row_bytes(stored_cols_), row_bytes(first_col_), row_bytes(coded_.cols())}, out);
    loaded_bytes_ += out.size();
  };
  if (stored_bytes == scale_bytes) {
    read(target);
    return;
  }
  const uint64_t count = target.size() / scale_bytes;
  std::vector<std::byte> stored(count * stored_bytes);
  read(stored);
  for (uint64_t i = 0; i < count; ++i) {
    const float scale = widened_scale(scales_.info.dtype, &stored[i * stored_bytes]);
    std::memcpy(&target[i * sizeof(float)], &scale, sizeof(scale));
  }
}

}  // namespace narrowfloat
