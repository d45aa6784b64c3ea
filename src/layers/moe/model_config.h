// Routing and activation of a model's experts, from its config.json (Hugging Face's member names).
#pragma once

#include <optional>
#include <string>

#include "narrowfloat/moe.h"

namespace narrowfloat {

struct MoeModelConfig {
  RoutingConfig routing;  // experts too, as the config declares them.
  Activation activation;
  bool weight_on_input = false;
  // Order of rows of the first matrix where experts are stacked; empty if no known model of the
  // type stacks them.
  std::optional<GateOrder> stacked_order = {};
  bool has_logit_bias = false;  // The router is a linear layer with a bias, added to the logits.
};

// path: path of the checkpoint, for messages. Throws kUnsupported for model types and settings that
// are not known, naming those that are; kCorruptData for members of the wrong type.
MoeModelConfig read_moe_config(const std::string& config_text, const std::string& path);

}  // namespace narrowfloat
