// Buffers are made once for the largest batch; every run uses their beginnings.
#include "cli/moe/layer_runner.h"

#include <cstdint>

#include "cli/float_tensors.h"

namespace narrowfloat::cli {
namespace {

constexpr int64_t kWorkspaceAlignment = 256;

size_t slots(const MoeConfig& config, int64_t tokens) {
  const RoutingConfig& routing = config.routing;
  return static_cast<size_t>(tokens * (routing.top_k + routing.shared_experts));
}

size_t output_bytes(const MoeConfig& config, int64_t tokens) {
  return static_cast<size_t>(tokens * config.hidden * (bits(config.out_dtype) / 8));
}

}  // namespace

AlignedBytes::AlignedBytes(int64_t size_bytes)
    : size_(size_bytes), storage_(static_cast<size_t>(size_bytes + kWorkspaceAlignment)) {}

TensorView AlignedBytes::view() const {
  const auto address = reinterpret_cast<uintptr_t>(storage_.data());
  const uintptr_t skip =
      (kWorkspaceAlignment - address % kWorkspaceAlignment) % kWorkspaceAlignment;
  return TensorView::contiguous(storage_.data() + skip, DType::kU8, {size_});
}

LayerRunner::LayerRunner(const MoeWeights& weights, const MoeConfig& config, int64_t max_tokens)
    : layer_(MoeLayer::prepare(weights, config)),
      max_tokens_(max_tokens),
      workspace_(layer_.required_workspace(max_tokens)),
      out_(output_bytes(config, max_tokens)),
      ids_(slots(config, max_tokens)) {}

void LayerRunner::take(const MoeTuning& tuning) {
  layer_ = layer_.with_tuning(tuning);
  const int64_t wanted = layer_.required_workspace(max_tokens_);
  if (wanted > workspace_.view().shape[0]) workspace_ = AlignedBytes(wanted);
}

void LayerRunner::run(const TensorView& rows, const Routing& routing, MoeStage last) {
  tokens_ = rows.shape[0];
  MoeInputs inputs;
  inputs.values = rows;
  MoeOutputs outputs;
  outputs.out = TensorView::contiguous(out_.data(), config().out_dtype, {tokens_, config().hidden});
  const RoutingConfig& routing_config = config().routing;
  outputs.topk_ids = TensorView::contiguous(
      ids_.data(), DType::kI32, {tokens_, routing_config.top_k + routing_config.shared_experts});
  layer_.run(inputs, routing, outputs, workspace_.view(), {}, last);
}

std::vector<float> LayerRunner::output() const {
  return to_floats(std::span(out_).first(output_bytes(config(), tokens_)), config().out_dtype);
}

std::span<const int32_t> LayerRunner::ids() const {
  return std::span(ids_).first(slots(config(), tokens_));
}

TensorView matrix_view(std::span<const float> values, int64_t cols) {
  return TensorView::contiguous(values.data(), DType::kF32,
                                {static_cast<int64_t>(values.size()) / cols, cols});
}

TensorView matrix_view(std::span<const uint16_t> values, int64_t cols) {
  return TensorView::contiguous(values.data(), DType::kBF16,
                                {static_cast<int64_t>(values.size()) / cols, cols});
}

}  // namespace narrowfloat::cli
