// Loads the rows of a weight that a conversion writes (convert_plan.h) from the source: as codes
// and scales, or as values. Rows of stacked experts are put into their order.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "layers/convert_plan.h"
#include "layers/memory_plan.h"
#include "layers/weight_reader.h"

namespace narrowfloat {

class RowLoader {
 public:
  RowLoader(const Checkpoint& checkpoint, const TargetWeight& weight);

  // Ranges may begin at these rows: of simple weights at whole tiles of both formats, of others at
  // whole experts.
  static RowGrid grid(const TargetWeight& weight);
  // Loads rows [first, first + count) as the source stores them. `codes` has its format.
  void load_codes(int64_t first, int64_t count, QuantizedWeight& codes);
  // Loads their values, count * cols.
  void load_values(int64_t first, int64_t count, std::span<float> values);
  // Bytes of the buffers of a loader and of `codes`, or of one for values.
  static uint64_t buffer_bytes(const TargetWeight& weight, int64_t rows, bool as_values);

 private:
  template <typename Take>
  void for_each_piece(int64_t first, int64_t count, Take take);
  QuantizedReader& load(const SourceRows& source, int64_t first, int64_t count);

  const Checkpoint& checkpoint_;
  const TargetWeight& weight_;
  std::optional<QuantizedReader> reader_;
  const LogicalTensor* reads_ = nullptr;  // The tensor of reader_, and its buffer's rows.
  int64_t reader_rows_ = 0;
  std::vector<float> decoded_;
};

// The source's convention of a weight.
const ConventionSpec& source_spec(const TargetWeight& weight);

}  // namespace narrowfloat
