// See moe_sampling.h.
#include "support/moe_sampling.h"

#include <fmt/format.h>

namespace narrowfloat::testing {
namespace {

void set_routing(MoeCase& layer_case, RoutingMethod method, Random& random) {
  RoutingConfig& routing = layer_case.config().routing;
  routing.method = method;
  if (method == RoutingMethod::kDeepSeekV3) {
    routing.n_group = random.pick({1, 4});
    routing.topk_group = routing.n_group == 4 ? 3 : 1;
  }
  if (method == RoutingMethod::kDeepSeekV3 || method == RoutingMethod::kMiniMax2) {
    routing.routed_scale = 2.5F;
    if (random.chance(70)) layer_case.add_router_bias();
  }
  if (method == RoutingMethod::kSigmoidRenorm) routing.norm_topk = random.chance(50);
  routing.options.weights_bf16 = random.chance(25);
}

}  // namespace

std::string to_string(const LayerAxes& axes) {
  return fmt::format("{}/{}/{}/{}", name(axes.mode), name(axes.activation), name(axes.method),
                     name(axes.order));
}

Activation activation_of(ActivationKind kind) {
  switch (kind) {
    case ActivationKind::kSwiglu:
      return Activation::swiglu_oai(1.702F, 1.0F, 1.5F);
    case ActivationKind::kSwigluStep:
      return Activation::swiglu_step(1.25F);
    case ActivationKind::kSituGlu:
      return Activation::situ(1.5F, 2.5F);
    default:
      return Activation::plain(kind);
  }
}

MoeShape sample_moe_shape(MoeMode mode, Random& random) {
  const int64_t unit = moe_mode_info(mode).multiple;
  MoeShape shape;
  shape.tokens = random.pick({1, 3, 7, 17});
  shape.hidden = unit * random.range(1, unit == 128 ? 3 : 11);
  shape.inter = unit * random.range(1, unit == 128 ? 2 : 9);
  shape.experts = 8;
  shape.top_k = static_cast<int32_t>(random.range(1, 4));
  return shape;
}

std::unique_ptr<MoeCase> sample_moe_case(const LayerAxes& axes, MoeShape shape, Random& random,
                                         uint64_t seed) {
  if (axes.method == RoutingMethod::kLlama4) shape.top_k = 1;
  if (random.chance(20)) shape.shared_experts = static_cast<int32_t>(random.range(1, 2));
  auto result = std::make_unique<MoeCase>(axes.mode, shape, activation_of(axes.activation), seed);
  MoeConfig& config = result->config();
  config.gate_order = axes.order;
  set_routing(*result, axes.method, random);
  config.weight_on_input = shape.top_k == 1 && random.chance(50);
  config.slot_dtype = random.pick({DType::kBF16, DType::kF32});
  config.out_dtype = random.pick({DType::kBF16, DType::kF16, DType::kF32});
  if (random.chance(50)) result->add_biases();
  if (random.chance(50)) result->add_per_expert_parameters();
  return result;
}

}  // namespace narrowfloat::testing
