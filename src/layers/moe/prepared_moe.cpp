// See prepared_moe.h.
#include "layers/moe/prepared_moe.h"

#include <algorithm>
#include <cstring>

#include "layers/moe/moe_checks.h"

namespace narrowfloat {

OwnedPerExpert::OwnedPerExpert(const PerExpert& source) : one_(source.value) {
  if (source.values.is_absent()) return;
  const auto* first = static_cast<const float*>(source.values.data);
  each_.assign(first, first + source.values.num_elements());
}

PerExpert OwnedPerExpert::view() const {
  if (each_.empty()) return one_;
  return PerExpert(
      TensorView::contiguous(each_.data(), DType::kF32, {static_cast<int64_t>(each_.size())}));
}

OwnedTensor::OwnedTensor(const TensorView& source) : view_(source) {
  if (source.is_absent()) return;
  bytes_.resize(static_cast<size_t>(source.num_elements() * bits(source.dtype) / 8));
  if (!bytes_.empty()) std::memcpy(bytes_.data(), source.data, bytes_.size());
}

TensorView OwnedTensor::view() const {
  TensorView view = view_;
  // Operations never write through the views of their inputs.
  if (!view.is_absent()) view.data = const_cast<std::byte*>(bytes_.data());
  return view;
}

PreparedMoe::PreparedMoe(const MoeWeights& weights, const MoeConfig& source, Device where,
                         Stream stream)
    : device(where),
      extents(moe_extents(source, weights.input_multiplier)),
      alpha(source.activation.alpha),
      beta(source.activation.beta),
      limit_gate(source.activation.limit_gate),
      limit_up(source.activation.limit_up),
      config(source),
      up_scale(weights.up_scale),
      gate_scale(weights.gate_scale),
      down_scale(weights.down_scale),
      inter_multiplier(weights.inter_multiplier),
      input_multiplier(weights.input_multiplier),
      bias1(weights.bias1),
      bias2(source.add_fc2_bias ? weights.bias2 : TensorView{}),
      w1(GroupedWeights::prepare(weights.w1, source.mode, where, stream)),
      w2(GroupedWeights::prepare(weights.w2, source.mode, where, stream)) {
  config.activation.alpha = alpha.view();
  config.activation.beta = beta.view();
  config.activation.limit_gate = limit_gate.view();
  config.activation.limit_up = limit_up.view();
}

int32_t PreparedMoe::token_tile(int64_t tokens) const {
  if (config.token_tile) return *config.token_tile;
  return default_token_tile(tokens, extents.slots, extents.local_experts);
}

MoeWorkspace PreparedMoe::workspace(int64_t tokens) const {
  const int32_t tile = token_tile(tokens);
  const int64_t max_rows =
      permutation_layout(tokens, extents.slots, extents.local_experts, tile).max_rows;
  const int64_t input_rows = extents.input_per_expert ? max_rows : tokens;
  const int64_t gemm_bytes = std::max(grouped_gemm_workspace(w1, input_rows, config.accumulation),
                                      grouped_gemm_workspace(w2, max_rows, config.accumulation));
  return moe_workspace(extents, tokens, tile, gemm_bytes);
}

}  // namespace narrowfloat
