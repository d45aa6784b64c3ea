// Shapes of MoE layers that `narrowfloat moe bench` knows by name (moe spec 16), and ones given by
// their numbers.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "narrowfloat/moe.h"

namespace narrowfloat::cli {

struct MoeShape {
  std::string name;
  int64_t hidden = 0;
  int64_t inter = 0;
  RoutingConfig routing;  // experts and top_k are among it. No shared experts: models compute them
                          // beside the routed ones.
  Activation activation;
  GateOrder gate_order = GateOrder::kGateUp;
  bool has_bias = false;  // Of the experts. No router bias: models are routed without their own.
  bool weight_on_input = false;
  MoeMode mode = MoeMode::kBf16;  // That of the published checkpoint.
};

// "deepseek-v3", ...: for help and messages.
std::string moe_shape_names();

// A name, or "H,I,E,k" with SwiGLU and renormalised softmax. Throws kInvalidArgument.
MoeShape parse_moe_shape(std::string_view text);

}  // namespace narrowfloat::cli
