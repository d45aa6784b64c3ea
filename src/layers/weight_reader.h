// Reads weights of a checkpoint in ranges of rows: unquantized ones unchanged, quantized ones as
// QuantizedWeight. The caller chooses the ranges; a range of a quantized weight starts at a
// multiple of the format's block rows (128 for 128x128 blocks, else 1) or lies within such a tile.
// Readers of some columns read nothing of the others.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "layers/quantized_weight.h"
#include "narrowfloat/checkpoint.h"

namespace narrowfloat {

// Some columns of all rows; of a quantized weight whole blocks of its format.
struct ColumnRange {
  int64_t first = 0;
  int64_t count = 0;
};

// Reads an unquantized tensor as rows of its last extent.
class PlainReader {
 public:
  // columns: default: all. Elements of a tensor of which some are read have whole bytes.
  PlainReader(const Checkpoint& checkpoint, const CheckpointTensor& tensor, int64_t max_rows,
              std::optional<ColumnRange> columns = {});

  [[nodiscard]] int64_t rows() const { return rows_; }
  [[nodiscard]] int64_t cols() const { return cols_; }
  // Loads rows [first, first + count) as [count, cols]. Returns whether they had to be read: the
  // last range stays in memory.
  bool load(int64_t first, int64_t count);
  [[nodiscard]] TensorView view() const;
  [[nodiscard]] FloatRows float_rows() const { return {tensor_.info.dtype, buffer_.get()}; }
  [[nodiscard]] std::span<const std::byte> bytes() const {
    return {buffer_.get(), size_bytes(loaded_rows_ * cols_)};
  }

  static uint64_t buffer_bytes(const TensorInfo& info, int64_t rows);
  // Rows and columns of a tensor of any rank as a matrix.
  static int64_t cols_of(std::span<const int64_t> shape);
  static int64_t rows_of(std::span<const int64_t> shape);

 private:
  [[nodiscard]] uint64_t size_bytes(int64_t elements) const;

  const Checkpoint& checkpoint_;
  const CheckpointTensor& tensor_;
  int64_t first_col_;
  int64_t cols_;
  int64_t rows_;
  uint64_t buffer_bytes_;
  std::unique_ptr<std::byte[]> buffer_;  // NOLINT(modernize-avoid-c-arrays): a vector writes zeros.
  int64_t loaded_first_ = 0;
  int64_t loaded_rows_ = 0;
};

// The codes of a quantized weight as one matrix: rows of K, stacked experts one after another.
struct CodeMatrix {
  int64_t experts = 1;
  int64_t rows = 0;  // Rows of one expert.
  int64_t cols = 0;

  [[nodiscard]] int64_t all_rows() const { return experts * rows; }
};
CodeMatrix code_matrix(const LogicalTensor& weight);

// Transposes each of the experts [rows, cols], of 16 or 32 bits an element. Buffers do not overlap.
void transpose_experts(const CodeMatrix& matrix, DType dtype, std::span<const std::byte> from,
                       std::span<std::byte> to);

// All block scales of a weight whose format has F32 scales.
std::vector<float> read_block_scales(const Checkpoint& checkpoint, const LogicalTensor& weight);

// The number of a tensor of one element in F32, BF16 or F16; none of any other tensor.
std::optional<float> stored_scalar(const Checkpoint& checkpoint, const CheckpointTensor& tensor);

// Reads a quantized weight. Throws kCorruptData for a global scale that is not finite and positive.
// Rows are those of its code matrix.
class QuantizedReader {
 public:
  // columns: default: all.
  QuantizedReader(const Checkpoint& checkpoint, const LogicalTensor& weight, int64_t max_rows,
                  std::optional<ColumnRange> columns = {});

  // `first` must be a multiple of the format's block rows, or the range within one such tile.
  void load(int64_t first, int64_t count);
  // Leaves the codes as they are.
  void load_scales_only(int64_t first, int64_t count);
  [[nodiscard]] QuantizedWeight& coded() { return coded_; }
  // Bytes that were read so far, the global scale among them.
  [[nodiscard]] uint64_t loaded_bytes() const { return loaded_bytes_; }

 private:
  void load_scales(int64_t first);
  void load_whole_scales(int64_t first);

  const Checkpoint& checkpoint_;
  const CheckpointTensor& values_;
  const CheckpointTensor& scales_;
  int64_t stored_cols_;
  int64_t first_col_;
  QuantizedWeight coded_;
  uint64_t loaded_bytes_ = 0;
};

}  // namespace narrowfloat
