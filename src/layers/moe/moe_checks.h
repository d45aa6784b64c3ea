// The checks of MoeLayer: everything about a configuration, its weights and a call that can be
// decided on the host. Each throws kInvalidArgument (kUnsupported for a missing capability of a
// device).
#pragma once

#include <array>
#include <string_view>

#include "layers/moe/plan.h"
#include "narrowfloat/moe.h"

namespace narrowfloat {

void check_moe_config(const MoeConfig& config);
void check_reference_options(const MoeReferenceOptions& reference, const MoeConfig& config);
// Waits for the stream if values per expert are on a device.
void check_moe_weights(const MoeWeights& weights, const MoeConfig& config, Device device,
                       Stream stream);

// Checks a view that a source of experts returned; shape: rows and columns.
void check_expert_weight(std::string_view argument, const WeightView& weight,
                         const std::array<int64_t, 2>& shape, Device device);

// F1: rows of w1.
int64_t fc1_rows(const MoeConfig& config);
// EL + S
int32_t weight_experts(const MoeConfig& config);
MoeExtents moe_extents(const MoeConfig& config, const MoeReferenceOptions& reference = {},
                       const std::optional<PerExpert>& input_multiplier = {});

struct MoeCall {
  const MoeInputs& inputs;
  const Routing& routing;
  const MoeOutputs& outputs;
  const TensorView& workspace;
  int64_t tokens;
};
// True for calls whose rows the layer quantizes itself.
bool quantizes_input(const MoeCall& call, const MoeConfig& config);

// has_input_multiplier: unquantized rows can be quantized with a static multiplier.
void check_moe_call(const MoeCall& call, const MoeConfig& config, const MoePlan& plan,
                    const MoeExtents& extents, bool has_input_multiplier, Device device);

}  // namespace narrowfloat
