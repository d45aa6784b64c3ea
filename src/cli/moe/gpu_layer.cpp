// See gpu_layer.h. The machine has one piece of memory: first the canonical weights are in it,
// then, once the layer has its own image of them, what runs need.
#include "cli/moe/gpu_layer.h"

#include <algorithm>
#include <cmath>

#include "cli/float_tensors.h"
#include "cli/moe/layer_runner.h"
#include "cli/moe/transfer.h"

namespace narrowfloat::cli {
namespace {

constexpr int kMinLayerReplays = 5;
constexpr int kMaxLayerReplays = 1000;
constexpr uint8_t kLayerPoison = 0xFF;  // NaN in every type of output.

MoeLayer prepare_on(Machine& machine, MoeWeights weights, MoeConfig config,
                    const std::vector<RandomTensor>& tensors) {
  Transfer transfer(machine);
  for (const RandomTensor& tensor : tensors) transfer.add(tensor, weights);
  for (WeightView* weight : {&weights.w1, &weights.w2}) {
    transfer.add(weight->values);
    transfer.add(weight->scales);
  }
  for (PerExpert* factor :
       {&weights.up_scale, &weights.gate_scale, &weights.down_scale, &weights.inter_multiplier}) {
    transfer.add(*factor);
  }
  if (weights.input_multiplier) transfer.add(*weights.input_multiplier);
  transfer.add(weights.bias1);
  transfer.add(weights.bias2);
  Activation& activation = config.activation;
  for (PerExpert* parameter :
       {&activation.alpha, &activation.beta, &activation.limit_gate, &activation.limit_up}) {
    transfer.add(*parameter);
  }
  transfer.send();
  machine.wait();
  return MoeLayer::prepare(weights, config, machine.device());
}

int64_t slots_of(const MoeConfig& config) {
  return config.routing.top_k + config.routing.shared_experts;
}

// Rows [begin, begin + count) of a dense matrix.
TensorView rows_of(TensorView matrix, TokenRange range) {
  if (matrix.is_absent()) return matrix;
  const int64_t row_bytes = matrix.strides[0] * bits(matrix.dtype) / 8;
  matrix.data = static_cast<std::byte*>(matrix.data) + range.begin * row_bytes;
  matrix.shape[0] = range.count;
  return matrix;
}

}  // namespace

std::unique_ptr<Machine> open_layer_machine(Device device) {
  return device.type == DeviceType::kCpu ? nullptr : open_gpu(device.index);
}

GpuLayer::GpuLayer(Machine& machine, const MoeWeights& weights, const MoeConfig& config)
    : machine_(machine), layer_(prepare_on(machine, weights, config, {})) {}

GpuLayer::GpuLayer(Machine& machine, const RandomWeights& weights, const MoeConfig& config)
    : machine_(machine),
      layer_(prepare_on(machine, weights.weights(), config, weights.tensors())) {}

void GpuLayer::load(const TensorView& rows, const Routing& routing, int64_t max_tokens) {
  const MoeConfig& config = layer_.config();
  host_rows_ = rows_ = rows;
  host_routing_ = routing_ = routing;
  max_tokens_ = max_tokens;
  Transfer transfer(machine_);
  transfer.add(rows_);
  for (TensorView* view :
       {&routing_.logits, &routing_.bias, &routing_.packed, &routing_.ids, &routing_.weights}) {
    transfer.add(*view);
  }
  std::byte* workspace = nullptr;
  const int64_t workspace_bytes = layer_.required_workspace(max_tokens);
  transfer.add_buffer(
      out_, static_cast<uint64_t>(max_tokens * config.hidden * bits(config.out_dtype) / 8));
  transfer.add_buffer(ids_, static_cast<uint64_t>(max_tokens * slots_of(config) * 4));
  transfer.add_buffer(workspace, static_cast<uint64_t>(workspace_bytes));
  transfer.send();
  workspace_ = TensorView::contiguous(workspace, DType::kU8, {workspace_bytes}, machine_.device());
}

void GpuLayer::take(const MoeTuning& tuning) {
  layer_ = layer_.with_tuning(tuning);
  if (max_tokens_ == 0) return;
  const bool fits = layer_.required_workspace(max_tokens_) <= workspace_.shape[0];
  if (!fits) load(host_rows_, host_routing_, max_tokens_);
}

void GpuLayer::queue(TokenRange range, Stream stream, MoeStage last) const {
  const MoeConfig& config = layer_.config();
  MoeInputs inputs;
  inputs.values = rows_of(rows_, range);
  Routing routing = routing_;
  for (TensorView* view : {&routing.logits, &routing.packed, &routing.ids, &routing.weights}) {
    *view = rows_of(*view, range);
  }
  MoeOutputs outputs;
  outputs.out = TensorView::contiguous(out_, config.out_dtype, {range.count, config.hidden},
                                       machine_.device());
  outputs.topk_ids =
      TensorView::contiguous(ids_, DType::kI32, {range.count, slots_of(config)}, machine_.device());
  layer_.run(inputs, routing, outputs, workspace_, stream, last);
}

double GpuLayer::run(TokenRange range) {
  tokens_ = range.count;
  return machine_.run_once(
      [&](int64_t, Stream stream) { queue(range, stream, MoeStage::kCombine); });
}

std::vector<float> GpuLayer::output() const {
  const MoeConfig& config = layer_.config();
  std::vector<std::byte> stored(
      static_cast<size_t>(tokens_ * config.hidden * bits(config.out_dtype) / 8));
  machine_.read(stored.data(), out_, stored.size());
  return to_floats(stored, config.out_dtype);
}

std::vector<int32_t> GpuLayer::ids() const {
  std::vector<int32_t> ids(static_cast<size_t>(tokens_ * slots_of(layer_.config())));
  machine_.read(reinterpret_cast<std::byte*>(ids.data()), ids_, 4 * ids.size());
  return ids;
}

int64_t GpuLayer::count_launches(TokenRange range, MoeStage last) {
  return machine_.count_launches([&](int64_t, Stream stream) { queue(range, stream, last); });
}

Timing GpuLayer::time_runs(const std::vector<TokenRange>& ranges, double min_seconds,
                           MoeStage last) {
  const auto calls = static_cast<int64_t>(ranges.size());
  double once_us = 0;
  for (const TokenRange range : ranges) once_us += run(range);
  const double wanted = std::ceil(min_seconds * 1e6 / std::max(once_us, 1.0));
  const auto replays = static_cast<int>(std::clamp(wanted, static_cast<double>(kMinLayerReplays),
                                                   static_cast<double>(kMaxLayerReplays)));
  const MoeConfig& config = layer_.config();
  machine_.fill_bytes(out_, kLayerPoison,
                      static_cast<uint64_t>(tokens_ * config.hidden * bits(config.out_dtype) / 8));
  machine_.fill_bytes(ids_, kLayerPoison, static_cast<uint64_t>(tokens_ * slots_of(config) * 4));
  const CallTime time = machine_.time_calls(
      [&](int64_t call, Stream stream) { queue(ranges[static_cast<size_t>(call)], stream, last); },
      {.calls = calls,
       .replays = replays,
       .is_programmatic = machine_.facts().has_programmatic_launch});
  return {.num_runs = time.calls * time.replays,
          .total_seconds = time.total_us * 1e-6,
          .median_seconds = time.median_us * 1e-6,
          .lower_quartile_seconds = time.lower_quartile_us * 1e-6,
          .upper_quartile_seconds = time.upper_quartile_us * 1e-6,
          .p10_seconds = time.p10_us * 1e-6,
          .p90_seconds = time.p90_us * 1e-6};
}

}  // namespace narrowfloat::cli
