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

// Matrices of all experts as a file stores them.
struct StackedSource {
  const LogicalTensor& weight;
  bool is_transposed = false;  // The unquantized weight is [E, K, N].
};

// Rows [first_row, first_row + rows) of one expert of a stacked weight, from one tensor of a file.
class ExpertLoader {
 public:
  ExpertLoader(const Checkpoint& checkpoint, StackedWeight& target);

  // Returns the decode scale of the whole tensor: 1 for formats without one. Throws
  // kInvalidArgument for a quantized tensor of another format than the target's, kCorruptData for a
  // wrong shape.
  float load(const LogicalTensor& weight, int64_t expert, int64_t first_row, int64_t rows);

  // Loads the whole matrix of one expert, number `id` of a stacked weight [E, rows, cols] or,
  // transposed, [E, cols, rows]; only its part of the file is read. Otherwise as load().
  float load_stacked(const StackedSource& source, int64_t id, int64_t expert);

 private:
  struct Place {
    std::byte* values;
    std::byte* scales;
    size_t values_bytes;
    size_t scales_bytes;
  };
  [[nodiscard]] Place place(int64_t expert, int64_t first_row, int64_t rows);
  float load_plain(const LogicalTensor& weight, const Place& place, int64_t rows);
  float load_coded(const LogicalTensor& weight, const Place& place, int64_t first, int64_t rows);
  float code_plain(const TensorView& plain, const Place& place) const;

  const Checkpoint& checkpoint_;
  StackedWeight& target_;
};

// Throws kUnsupported for a tensor that is not F32, BF16 or F16.
void require_float(const Checkpoint& checkpoint, const CheckpointTensor& tensor);

// Format of weights that a convention stores.
WeightFormat weight_format(Convention convention);

}  // namespace narrowfloat
