// The public layer: checks, then the stages of MoeRun.
#include <algorithm>

#include "base/throw_error.h"
#include "layers/moe/moe_run.h"
#include "layers/moe/tuned_tiles.h"

namespace narrowfloat {

struct MoeLayer::State : PreparedMoe {
  using PreparedMoe::PreparedMoe;

  // Throws for an empty layer.
  static const State& of(const MoeLayer& layer);
};

MoeLayer MoeLayer::prepare(const MoeWeights& weights, const MoeConfig& config, Device device,
                           Stream stream) {
  check_moe_config(config);
  require_usable_device(device);
  check_moe_weights(weights, config, device, stream);
  const MoeReferenceOptions options{.accumulation = config.fast_sums ? Accumulation::kFast
                                                                     : Accumulation::kFp32};
  MoeLayer layer;
  layer.state_ = std::make_shared<const State>(weights, config, options, device, stream);
  return layer;
}

MoeLayer MoeLayer::prepare_reference(const MoeWeights& weights, const MoeConfig& config,
                                     const MoeReferenceOptions& options) {
  check_moe_config(config);
  check_reference_options(options, config);
  check_moe_weights(weights, config, Device{}, Stream{});
  MoeLayer layer;
  layer.state_ = std::make_shared<const State>(weights, config, options, Device{}, Stream{});
  return layer;
}

const MoeLayer::State& MoeLayer::State::of(const MoeLayer& layer) {
  if (layer.state_ == nullptr) throw_invalid("layer: empty; make it with MoeLayer::prepare");
  return *layer.state_;
}

const MoeConfig& MoeLayer::config() const { return State::of(*this).config; }

int64_t MoeLayer::weight_bytes() const {
  const State& state = State::of(*this);
  return state.w1.bytes() + state.w2.bytes();
}

MoeLayer MoeLayer::with_tuning(const MoeTuning& tuning) const {
  MoeLayer tuned = *this;
  const State& state = State::of(*this);
  tuned.tiles_ =
      std::make_shared<const TunedTiles>(tuning, moe_tuning_key(state.config, state.device));
  return tuned;
}

int64_t MoeLayer::required_workspace(int64_t tokens) const {
  const State& state = State::of(*this);
  int64_t largest = state.plan(tokens, token_tile(tokens)).workspace_bytes();
  if (tiles_ == nullptr) return largest;
  for (const int64_t fewer : tiles_->largest_up_to(tokens)) {
    largest = std::max(largest, state.plan(fewer, token_tile(fewer)).workspace_bytes());
  }
  return largest;
}

int32_t MoeLayer::token_tile(int64_t tokens) const {
  const State& state = State::of(*this);
  if (tiles_ != nullptr && !state.config.token_tile) {
    if (const std::optional<int32_t> tile = tiles_->find(tokens)) return *tile;
  }
  return state.token_tile(tokens);
}

int64_t MoeLayer::max_rows(int64_t tokens) const {
  const MoeExtents& extents = State::of(*this).extents;
  return permutation_layout(tokens, extents.slots, extents.local_experts, token_tile(tokens))
      .max_rows;
}

void MoeLayer::run(const MoeInputs& inputs, const Routing& routing, const MoeOutputs& outputs,
                   const TensorView& workspace, Stream stream) const {
  run_up_to(MoeStage::kCombine, inputs, routing, outputs, workspace, stream);
}

void MoeLayer::run_up_to(MoeStage last, const MoeInputs& inputs, const Routing& routing,
                         const MoeOutputs& outputs, const TensorView& workspace,
                         Stream stream) const {
  const State& state = State::of(*this);
  if (inputs.values.rank != 2) {
    throw_invalid("inputs.values: expected [tokens, {}], got {}", state.config.hidden,
                  to_string(inputs.values));
  }
  static_cast<void>(name(last));  // Throws for an invalid stage.
  const MoeCall call{inputs, routing, outputs, workspace, inputs.values.shape[0]};
  const MoePlan plan = state.plan(call.tokens, token_tile(call.tokens));
  check_moe_call(call, state.config, plan, state.extents, state.input_multiplier.has_value(),
                 state.device);
  MoeRun(state, plan, call, stream).run(last);
}

}  // namespace narrowfloat
