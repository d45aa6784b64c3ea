// The layers that commands make up: shapes of known models by their names (moe spec 16) and shapes
// given by their numbers, and the configuration of a layer with such a shape.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "cli_common/timing/machine.h"
#include "narrowfloat/moe.h"

namespace narrowfloat::cli {

struct MoeShape {
  std::string name;
  int64_t hidden = 0;
  int64_t inter = 0;
  // Has experts and top_k. There are no shared experts: models compute them beside the routed ones.
  RoutingConfig routing;
  Activation activation;
  GateOrder gate_order = GateOrder::kGateUp;
  bool has_bias = false;  // The experts have biases. The router has none in any shape.
  bool weight_on_input = false;
  MoeMode mode = MoeMode::kBf16;  // The mode of the published checkpoint.
};

// "deepseek-v3", ...: for help and messages.
std::string moe_shape_names();

// Reads a name, or "H,I,E,k" with SwiGLU and renormalised softmax. Throws kInvalidArgument.
MoeShape parse_moe_shape(std::string_view text);

// The part of the experts that one rank has: rank / num_ranks of all.
struct ExpertShard {
  int32_t rank = 0;
  int32_t num_ranks = 1;
};

// The options that name a layer.
struct LayerArguments {
  std::string shape;
  std::vector<MoeMode> modes;  // Empty: the shape's own.
  bool is_all_modes = false;
  ExpertShard shard;
};

// Each mode once, in the order of the table; the shape's own where none is named. A named mode that
// cannot have the shape stays: an error will say why. `notes` gets those that "all" leaves out.
std::vector<MoeMode> modes_of(const LayerArguments& layer, const MoeShape& shape, Device device,
                              std::vector<std::string>& notes);

// `asked_for`, or a part of the machine's memory where it is 0.
uint64_t memory_limit(uint64_t asked_for, const Machine& machine);

// The layer of `shape` in `mode`, with as many of its experts as `max_bytes` hold together with the
// packed weights and the buffers for `max_tokens`. Throws kInvalidArgument where the mode cannot
// have these extents, or not even the fewest experts fit.
MoeConfig layer_config(const MoeShape& shape, MoeMode mode, const ExpertShard& shard,
                       int64_t max_tokens, uint64_t max_bytes);

}  // namespace narrowfloat::cli
