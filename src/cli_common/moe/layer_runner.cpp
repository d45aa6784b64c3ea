// The machine has one range of memory. It holds the weights as they were made first, then, once the
// layer has its own packed weights, what runs need.
#include "cli_common/moe/layer_runner.h"

namespace narrowfloat::cli {
namespace {

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

uint64_t output_bytes(const MoeConfig& config, int64_t tokens) {
  return static_cast<uint64_t>(tokens * config.hidden * bits(config.out_dtype) / 8);
}

uint64_t id_bytes(const MoeConfig& config, int64_t tokens) {
  return static_cast<uint64_t>(tokens * slots_of(config)) * sizeof(int32_t);
}

// Rows of a dense matrix.
TensorView rows_of(TensorView matrix, TokenRange range) {
  if (matrix.is_absent()) return matrix;
  const int64_t row_bytes = matrix.strides[0] * bits(matrix.dtype) / 8;
  matrix.data = static_cast<std::byte*>(matrix.data) + range.begin * row_bytes;
  matrix.shape[0] = range.count;
  return matrix;
}

}  // namespace

LayerRunner::LayerRunner(Machine& machine, const MoeWeights& weights, const MoeConfig& config)
    : machine_(machine), layer_(prepare_on(machine, weights, config, {})) {}

LayerRunner::LayerRunner(Machine& machine, const RandomWeights& weights, const MoeConfig& config)
    : machine_(machine),
      layer_(prepare_on(machine, weights.weights(), config, weights.tensors())) {}

void LayerRunner::load(const TensorView& rows, const Routing& routing, int64_t max_tokens) {
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
  transfer.add_buffer(out_, output_bytes(config(), max_tokens));
  transfer.add_buffer(ids_, id_bytes(config(), max_tokens));
  transfer.add_buffer(workspace, static_cast<uint64_t>(workspace_bytes));
  transfer.send();
  workspace_ = TensorView::contiguous(workspace, DType::kU8, {workspace_bytes}, machine_.device());
}

void LayerRunner::take(const MoeTuning& tuning) {
  layer_ = layer_.with_tuning(tuning);
  if (max_tokens_ == 0) return;
  const bool fits = layer_.required_workspace(max_tokens_) <= workspace_.shape[0];
  if (!fits) load(host_rows_, host_routing_, max_tokens_);
}

void LayerRunner::queue(TokenRange range, Stream stream, MoeStage last) const {
  MoeInputs inputs;
  inputs.values = rows_of(rows_, range);
  Routing routing = routing_;
  for (TensorView* view : {&routing.logits, &routing.packed, &routing.ids, &routing.weights}) {
    *view = rows_of(*view, range);
  }
  const Device device = machine_.device();
  MoeOutputs outputs;
  outputs.out =
      TensorView::contiguous(out_, config().out_dtype, {range.count, config().hidden}, device);
  outputs.topk_ids =
      TensorView::contiguous(ids_, DType::kI32, {range.count, slots_of(config())}, device);
  layer_.run_up_to(last, inputs, routing, outputs, workspace_, stream);
}

double LayerRunner::run(TokenRange range) {
  tokens_ = range.count;
  return machine_.run_once(
      [&](int64_t /*call*/, Stream stream) { queue(range, stream, MoeStage::kCombine); });
}

std::vector<float> LayerRunner::output() const {
  std::vector<std::byte> stored(output_bytes(config(), tokens_));
  machine_.read(stored.data(), out_, stored.size());
  return to_floats(stored, config().out_dtype);
}

std::vector<int32_t> LayerRunner::ids() const {
  std::vector<int32_t> ids(static_cast<size_t>(tokens_ * slots_of(config())));
  machine_.read(reinterpret_cast<std::byte*>(ids.data()), ids_, id_bytes(config(), tokens_));
  return ids;
}

CallTime LayerRunner::time_runs(const std::vector<TokenRange>& ranges, double min_seconds,
                                MoeStage last) {
  const auto count = static_cast<int64_t>(ranges.size());
  double all_us = 0;
  if (!machine_.is_host()) {
    run(ranges.front());  // Loads code.
    for (const TokenRange range : ranges) all_us += run(range);
  }
  tokens_ = ranges.back().count;
  machine_.fill_bytes(out_, kPoison, output_bytes(config(), tokens_));
  machine_.fill_bytes(ids_, kPoison, id_bytes(config(), tokens_));
  return machine_.time_calls(
      [&](int64_t call, Stream stream) {
        queue(ranges[static_cast<size_t>(call % count)], stream, last);
      },
      machine_.plan_for(min_seconds, machine_.is_host() ? 1 : count, all_us));
}

int64_t LayerRunner::count_launches(TokenRange range, MoeStage last) {
  return machine_.count_launches(
      [&](int64_t /*call*/, Stream stream) { queue(range, stream, last); });
}

std::vector<float> run_reference(const MoeWeights& weights, const MoeConfig& config,
                                 const MoeReferenceOptions& options, const TensorView& rows,
                                 const Routing& routing) {
  const std::unique_ptr<Machine> host = open_host();
  const int64_t tokens = rows.shape[0];
  LayerRunner runner(*host, MoeLayer::prepare_reference(weights, config, options));
  runner.load(rows, routing, tokens);
  runner.run({0, tokens});
  return runner.output();
}

}  // namespace narrowfloat::cli
