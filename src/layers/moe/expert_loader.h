// Loads the experts of one layer from files into canonical tensors, and quantizes them where the
// files hold unquantized weights.
#pragma once

#include <cstddef>
#include <vector>

#include "layers/moe/expert_names.h"
#include "narrowfloat/gemm.h"

namespace narrowfloat {

// One of the layer's stacked weights, and the factors of its codes.
struct StackedWeight {
  WeightFormat format = WeightFormat::kBf16;
  int64_t experts = 0;
  int64_t rows = 0;
  int64_t cols = 0;
  std::vector<std::byte> values;
  std::vector<std::byte> scales;  // Linear, expert after expert.

  // Buffers for all experts.
  StackedWeight(WeightFormat weight_format, int64_t num_experts, int64_t num_rows,
                int64_t num_cols);
  [[nodiscard]] WeightView view() const;
};

// Matrices of all experts as a file stores them, [E, rows, cols].
struct StackedSource {
  const LogicalTensor& weight;
  bool is_transposed = false;  // The unquantized weight is [E, cols, rows].
  int64_t rows = 0;
  int64_t cols = 0;
};

struct MatrixRows {
  int64_t first = 0;
  int64_t count = 0;
};

// Says what is loaded of a matrix: ranges of rows, one after another, and as many columns as the
// stacked weight has. Ranges start and end at blocks of its format.
struct MatrixPart {
  std::vector<MatrixRows> rows;
  int64_t first_col = 0;
};

// Loads experts of a stacked weight from tensors of files, of which it reads nothing but the part.
class ExpertLoader {
 public:
  ExpertLoader(const Checkpoint& checkpoint, StackedWeight& target);

  // Returns the decode scale of the whole tensor: 1 for formats without one. Throws
  // kInvalidArgument for a quantized tensor of another format than the target's, kCorruptData for a
  // wrong shape. shape: what the matrix must have; first_row: of the expert, where the part goes.
  float load(const LogicalTensor& weight, const std::vector<int64_t>& shape, const MatrixPart& part,
             int64_t expert, int64_t first_row);

  // Loads from matrix number `id` of a stacked weight all rows of an expert. Otherwise as load().
  float load_stacked(const StackedSource& source, const MatrixPart& part, int64_t id,
                     int64_t expert);

  // Bytes of the file's tensors that were loaded so far.
  [[nodiscard]] uint64_t loaded_bytes() const { return loaded_bytes_; }

 private:
  struct Place {
    std::byte* values;
    std::byte* scales;
    size_t values_bytes;
    size_t scales_bytes;
  };
  [[nodiscard]] Place place(int64_t expert, int64_t first_row, int64_t rows);
  // Rows of the part as [rows, cols] of the tensor's type. before: rows of the tensor before the
  // matrix.
  std::vector<std::byte> read_plain(const CheckpointTensor& tensor, const MatrixPart& part,
                                    int64_t before);
  // The same where the tensor has the matrix transposed.
  std::vector<std::byte> read_transposed(const CheckpointTensor& tensor, const MatrixPart& part,
                                         int64_t before);
  float load_coded(const LogicalTensor& weight, const MatrixPart& part, int64_t before,
                   int64_t expert, int64_t first_row);
  float code_plain(const TensorView& plain, const Place& place) const;

  const Checkpoint& checkpoint_;
  StackedWeight& target_;
  uint64_t loaded_bytes_ = 0;
};

// Throws kUnsupported for a tensor that is not F32, BF16 or F16.
void require_float(const Checkpoint& checkpoint, const CheckpointTensor& tensor);

// Format of weights that a convention stores.
WeightFormat weight_format(Convention convention);

}  // namespace narrowfloat
