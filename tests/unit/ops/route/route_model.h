// Routing written a second time, from the formulas: a stable sort by IEEE's total order, library
// functions in double, a switch over the methods. Slow, with heap memory, and nothing in common
// with src/ops/route but the enumerators.
#pragma once

#include <cstdint>
#include <vector>

#include "narrowfloat/route.h"

namespace narrowfloat::testing {

struct ModelRow {
  std::vector<int32_t> ids;
  std::vector<double> weights;
};

// bias: E values.
ModelRow model_row(const std::vector<float>& logits, const std::vector<float>& bias,
                   const RoutingConfig& config);

// Whether a weight of the method equals its model: to the bit but for softmaxes, whose rounding
// errors are bounded by the number of terms.
bool weight_matches(const RoutingConfig& config, float actual, double expected);

}  // namespace narrowfloat::testing
