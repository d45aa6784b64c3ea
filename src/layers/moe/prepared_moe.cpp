// See prepared_moe.h.
#include "layers/moe/prepared_moe.h"

#include <algorithm>

#include "layers/moe/moe_checks.h"
#include "layers/moe/stage_problems.h"
#include "runtime/dispatch.h"

namespace narrowfloat {
namespace {

std::optional<GateOrder> order_of_rows(const MoeConfig& config) {
  if (!activation_info(config.activation.kind).is_gated) return {};
  return config.gate_order;
}

// Packs the weights of a layer.
struct Preparation {
  const MoeConfig& config;
  Device device;
  Stream stream;

  [[nodiscard]] GroupedWeights weights(std::string_view argument, const WeightView& whole,
                                       const ExpertSource& source,
                                       const std::array<int64_t, 2>& shape,
                                       std::optional<GateOrder> order) const {
    if (!source) return GroupedWeights::prepare(whole, config.mode, device, stream, order);
    const auto checked = [&](int64_t expert) {
      WeightView weight = source(expert);
      check_expert_weight(argument, weight, shape, device);
      return weight;
    };
    return GroupedWeights::prepare(checked, weight_experts(config), config.mode, device, stream,
                                   order);
  }
  [[nodiscard]] GroupedWeights first(const MoeWeights& weights_of) const {
    return weights("weights.w1_source", weights_of.w1, weights_of.w1_source,
                   {fc1_rows(config), config.hidden}, order_of_rows(config));
  }
  [[nodiscard]] GroupedWeights second(const MoeWeights& weights_of) const {
    return weights("weights.w2_source", weights_of.w2, weights_of.w2_source,
                   {config.hidden, config.inter}, {});
  }
};

}  // namespace

PreparedMoe::PreparedMoe(const MoeWeights& weights, const MoeConfig& source,
                         const MoeReferenceOptions& reference, Device where, Stream stream)
    : device(where),
      extents(moe_extents(source, reference, weights.input_multiplier)),
      alpha(source.activation.alpha, stream),
      beta(source.activation.beta, stream),
      limit_gate(source.activation.limit_gate, stream),
      limit_up(source.activation.limit_up, stream),
      config(source),
      up_scale(weights.up_scale, stream),
      gate_scale(weights.gate_scale, stream),
      down_scale(weights.down_scale, stream),
      inter_multiplier(weights.inter_multiplier, stream),
      bias1(weights.bias1, stream),
      bias2(source.add_fc2_bias ? weights.bias2 : TensorView{}, stream),
      w1(Preparation{source, where, stream}.first(weights)),
      w2(Preparation{source, where, stream}.second(weights)) {
  if (weights.input_multiplier) input_multiplier.emplace(*weights.input_multiplier, stream);
  config.activation.alpha = alpha.view();
  config.activation.beta = beta.view();
  config.activation.limit_gate = limit_gate.view();
  config.activation.limit_up = limit_up.view();
  // The caller may free its tensors now.
  wait_for_copies(device, stream);
}

// Refuses shapes that a stage refuses, before anything is queued.
void PreparedMoe::check_stages(const PermutationLayout& permutation,
                               const MoeExtents& of_call) const {
  for (const GroupedWeights* weights : {&w1, &w2}) {
    require_tiles(*weights, permutation.max_tiles, permutation.token_tile);
  }
  const StageProblems stages(config, of_call, permutation, device);
  if (!of_call.fuses_activation) {
    static_cast<void>(select("activation", activation_impls(), stages.activation()));
  } else if (quantizes_fused_rows(of_call)) {
    static_cast<void>(select("quantize_activations", quantize_activations_impls(),
                             stages.quantize_intermediate()));
  }
  if (extents.input == RowFormat::kBf16) return;
  static_cast<void>(
      select("quantize_activations", quantize_activations_impls(), stages.quantize_input()));
}

int32_t PreparedMoe::token_tile(int64_t tokens) const {
  if (config.token_tile) return *config.token_tile;
  return default_token_tile(tokens, extents.slots, extents.local_experts);
}

MoePlan PreparedMoe::plan(int64_t tokens, int32_t token_tile) const {
  const PermutationLayout permutation =
      permutation_layout(tokens, extents.slots, extents.local_experts, token_tile);
  MoeExtents of_call = extents;
  of_call.fuses_activation = StageProblems(config, extents, permutation, device).fuses_activation();
  check_stages(permutation, of_call);
  const int64_t max_rows = permutation.max_rows;
  const int64_t input_rows = extents.input_per_expert ? max_rows : tokens;
  return {of_call,
          tokens,
          token_tile,
          {.first = grouped_gemm_workspace(w1, input_rows, extents.accumulation),
           .second = grouped_gemm_workspace(w2, max_rows, extents.accumulation)}};
}

}  // namespace narrowfloat
