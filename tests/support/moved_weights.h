// The same weights in other places: what metamorphic tests of a layer change (moe spec 13.4).
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "narrowfloat/moe.h"

namespace narrowfloat::testing {

struct WeightRow {
  int64_t expert;
  int64_t row;
};
// Which row of the original lies in a place.
using RowSource = std::function<WeightRow(WeightRow)>;

class MovedWeights {
 public:
  explicit MovedWeights(const MoeWeights& original) : weights_(original) {}
  MovedWeights(const MovedWeights&) = delete;  // Its views point into itself.
  MovedWeights& operator=(const MovedWeights&) = delete;

  MoeWeights& weights() { return weights_; }
  // Rows, their scales and biases. Where scales are of 128 rows, whole blocks must move.
  void move_first(const RowSource& source) { move(weights_.w1, weights_.bias1, source); }
  void move_second(const RowSource& source) { move(weights_.w2, weights_.bias2, source); }
  // From up rows before gate rows. 128x128 blocks cannot be interleaved.
  void reorder_gate(GateOrder to);
  // Expert `i` is the original's `experts[i]`, with all factors.
  void rename_experts(const std::vector<int32_t>& experts);
  // The same, of parameters of the activation.
  void rename_experts(const std::vector<int32_t>& experts, PerExpert& parameter);

 private:
  void move(WeightView& weight, TensorView& bias, const RowSource& source);
  // A copy of [experts, rows] rows, from their sources.
  void* moved(const void* data, WeightRow extents, int64_t row_bytes, const RowSource& source);

  MoeWeights weights_;
  std::vector<std::vector<uint8_t>> storage_;
};

}  // namespace narrowfloat::testing
