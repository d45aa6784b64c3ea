// The values of a logical tensor, quantized or not, as rows of floats: what `diff` and `check`
// compare. Rows are those of the unquantized weight, in ranges that the caller chooses.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "layers/memory_plan.h"
#include "layers/weight_reader.h"
#include "narrowfloat/checkpoint.h"

namespace narrowfloat {

class ValueReader {
 public:
  // Keeps references to both.
  ValueReader(const Checkpoint& checkpoint, const LogicalTensor& tensor)
      : checkpoint_(checkpoint), tensor_(tensor) {}

  [[nodiscard]] const LogicalTensor& tensor() const { return tensor_; }
  [[nodiscard]] bool has_values() const { return tensor_.convention || is_float(tensor_.dtype); }
  [[nodiscard]] const CheckpointTensor& part(size_t index) const {
    return *checkpoint_.find(tensor_.parts[index]);
  }
  // Bytes [begin, begin + size) of a stored part.
  [[nodiscard]] std::string piece(size_t part_index, uint64_t begin, uint64_t size) const;
  // The scale of the whole tensor as stored, good or not; empty where there is none.
  [[nodiscard]] std::optional<float> stored_global_scale() const;
  // The rows at which ranges may begin; whole experts where they are transposed.
  [[nodiscard]] RowGrid grid() const;
  // "nvfp4-ct" or "BF16".
  [[nodiscard]] std::string description() const;

  // Allocates the buffers for ranges of at most so many rows; call it before load().
  void prepare(int64_t max_rows);
  // The returned rows are valid until the next call.
  FloatRows load(int64_t first, int64_t count);
  // The last range: the codes of a quantized weight, the rows of an unquantized one.
  [[nodiscard]] QuantizedWeight& coded() { return coded_->coded(); }
  [[nodiscard]] TensorView plain() const { return plain_->view(); }

  // Limits of the last range; empty where they are unknown.
  [[nodiscard]] std::optional<ClipLimits> clip_limits() const;

 private:
  [[nodiscard]] int64_t rows_of_codes(int64_t rows) const;

  const Checkpoint& checkpoint_;
  const LogicalTensor& tensor_;
  std::unique_ptr<QuantizedReader> coded_;
  std::unique_ptr<PlainReader> plain_;
  std::vector<float> decoded_;
  std::vector<float> transposed_;
};

// Whether the stored bytes of a part are the same, dtype and shape included.
bool parts_equal(const ValueReader& a, const ValueReader& b, size_t index);

}  // namespace narrowfloat
