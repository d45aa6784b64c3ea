// Layers whose every intermediate is exact in every mode (moe spec 12.4): what any implementation
// must compute to the bit.
#pragma once

#include <memory>
#include <vector>

#include "support/moe_case.h"

namespace narrowfloat::testing {

// relu, F32 results, a precomputed routing with weights 0.5 and 1, small integers everywhere.
// Blocks of activation rows have a planted maximum that makes their scale 1.
class ExactMoe {
 public:
  ExactMoe(MoeMode mode, const MoeShape& shape, uint64_t seed);
  [[nodiscard]] MoeCase& layer_case() { return *case_; }

 private:
  void fill_weights(Random& random);
  void fill_inputs(Random& random);
  void fill_routing(Random& random);

  MoeMode mode_;
  std::unique_ptr<MoeCase> case_;
  std::vector<float> bias1_;
  std::vector<float> bias2_;
  std::vector<int32_t> ids_;
  std::vector<float> slot_weights_;
};

}  // namespace narrowfloat::testing
