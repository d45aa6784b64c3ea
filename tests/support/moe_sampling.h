// Random layers for tests over the axes of moe spec 13: mode, activation, routing method and gate
// order are given, everything else is drawn.
#pragma once

#include <memory>
#include <string>

#include "support/moe_case.h"

namespace narrowfloat::testing {

struct LayerAxes {
  MoeMode mode = MoeMode::kBf16;
  ActivationKind activation = ActivationKind::kSwiglu;
  RoutingMethod method = RoutingMethod::kRenormalize;
  GateOrder order = GateOrder::kUpGate;
};
std::string to_string(const LayerAxes& axes);

// With parameters where the kind reads them.
Activation activation_of(ActivationKind kind);
// Sizes that the mode allows and, where it does, that are no multiples of 128; 8 experts.
MoeShape sample_moe_shape(MoeMode mode, Random& random);
// Draws options of the router, types, biases, values per expert, and a shared expert now and then.
// shape: its top_k is 1 in the end where the method wants that.
std::unique_ptr<MoeCase> sample_moe_case(const LayerAxes& axes, MoeShape shape, Random& random,
                                         uint64_t seed);

}  // namespace narrowfloat::testing
