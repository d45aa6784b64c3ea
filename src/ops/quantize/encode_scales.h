// The encode scale of each row, from the host, a tensor or a maximum, and the decode scales stored
// from it.
#pragma once

#include <functional>
#include <vector>

#include "ops/quantize/quantize_problem.h"

namespace narrowfloat {

class EncodeScales {
 public:
  // Maximum of |y| over the valid rows of some batches.
  using AmaxOfBatches = std::function<float(int64_t first_batch, int64_t batches)>;

  // Calls `amax` only where the problem asks for computed scales.
  EncodeScales(const QuantizeProblem& problem, const QuantizeArgs& args, const AmaxOfBatches& amax);

  // The encode scale of a row; `row` counts within the batch.
  [[nodiscard]] float encode(int64_t batch, int64_t row) const;
  // Writes the decode scales to args.global_scale; does nothing for formats without them.
  void store_decode_scales() const;

 private:
  const QuantizeProblem& problem_;
  const QuantizeArgs& args_;
  std::vector<float> computed_;  // One scale, or one per batch.
};

// The number of valid rows of a batch.
int64_t valid_rows(const QuantizeProblem& problem, const QuantizeArgs& args, int64_t batch);

}  // namespace narrowfloat
