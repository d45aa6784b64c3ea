// The public layer: checks, then the stages of MoeRun.
#include <algorithm>

#include "base/throw_error.h"
#include "layers/moe/moe_run.h"
#include "layers/moe/tuned_tiles.h"

namespace narrowfloat {

struct MoeLayer::State : PreparedMoe {
  using PreparedMoe::PreparedMoe;
};

MoeLayer MoeLayer::prepare(const MoeWeights& weights, const MoeConfig& config, Device device,
                           Stream stream) {
  check_moe_config(config, device);
  require_usable_device(device);
  check_moe_weights(weights, config, device, stream);
  MoeLayer layer;
  layer.state_ = std::make_shared<const State>(weights, config, device, stream);
  return layer;
}

const MoeLayer::State& MoeLayer::state() const {
  if (state_ == nullptr) throw_invalid("layer: empty; make it with MoeLayer::prepare");
  return *state_;
}

const MoeConfig& MoeLayer::config() const { return state().config; }

int64_t MoeLayer::weight_bytes() const { return state().w1.bytes() + state().w2.bytes(); }

MoeLayer MoeLayer::with_tuning(const MoeTuning& tuning) const {
  MoeLayer tuned = *this;
  const MoeTuningKey key = moe_tuning_key(state().config, state().device);
  tuned.tiles_ = std::make_shared<const TunedTiles>(tuning, key);
  return tuned;
}

int64_t MoeLayer::required_workspace(int64_t tokens) const {
  int64_t largest = state().workspace(tokens, token_tile(tokens)).total;
  if (tiles_ == nullptr) return largest;
  for (const int64_t fewer : tiles_->largest_up_to(tokens)) {
    largest = std::max(largest, state().workspace(fewer, token_tile(fewer)).total);
  }
  return largest;
}

int32_t MoeLayer::token_tile(int64_t tokens) const {
  if (tiles_ != nullptr && !state().config.token_tile) {
    if (const std::optional<int32_t> tile = tiles_->find(tokens)) return *tile;
  }
  return state().token_tile(tokens);
}

int64_t MoeLayer::max_rows(int64_t tokens) const {
  const MoeExtents& extents = state().extents;
  return permutation_layout(tokens, extents.slots, extents.local_experts, token_tile(tokens))
      .max_rows;
}

void MoeLayer::run(const MoeInputs& inputs, const Routing& routing, const MoeOutputs& outputs,
                   const TensorView& workspace, Stream stream, MoeStage last) const {
  if (inputs.values.rank != 2) {
    throw_invalid("inputs.values: expected [tokens, {}], got {}", state().config.hidden,
                  to_string(inputs.values));
  }
  const MoeCall call{inputs, routing, outputs, workspace, inputs.values.shape[0]};
  const MoeWorkspace plan = state().workspace(call.tokens, token_tile(call.tokens));
  static_cast<void>(name(last));  // Throws for what is no stage.
  check_moe_call(call, state().config, plan, state().input_multiplier.has_value(), state().device);
  MoeRun(state(), plan, call, stream).run(last);
}

}  // namespace narrowfloat
