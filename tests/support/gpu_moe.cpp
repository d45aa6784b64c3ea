// See gpu_moe.h.
#include "support/gpu_moe.h"

#include <cstring>

namespace narrowfloat::testing {
namespace {

// Strided tensors too: everything up to the last element.
int64_t extent_bytes(const TensorView& view) {
  if (view.is_absent() || view.num_elements() == 0) return 0;
  int64_t last = 0;
  for (int axis = 0; axis < view.rank; ++axis) {
    last += (view.shape[static_cast<size_t>(axis)] - 1) * view.strides[static_cast<size_t>(axis)];
  }
  return (last + 1) * bits(view.dtype) / 8;
}

// A buffer with the bytes of a view, and the view of it.
DeviceBuffer mirrored(const TensorView& host, Device device, TensorView& view) {
  view = host;
  if (host.is_absent()) return {};
  const int64_t bytes = extent_bytes(host);
  DeviceBuffer buffer(bytes, {.device = device});
  if (bytes > 0) buffer.write(host.data, bytes);
  view.data = buffer.data();
  view.device = device;
  return buffer;
}

void resend(const DeviceBuffer& buffer, const TensorView& host) {
  if (const int64_t bytes = extent_bytes(host); bytes > 0) buffer.write(host.data, bytes);
}

DeviceBuffer output(TensorView& view, DType dtype, std::initializer_list<int64_t> shape,
                    Device device) {
  view = TensorView::contiguous(nullptr, dtype, shape, device);
  DeviceBuffer buffer(view.num_elements() * bits(dtype) / 8, {.device = device});
  view.data = buffer.data();
  return buffer;
}

}  // namespace

uint8_t* DeviceTensors::memory(const void* host, int64_t bytes) {
  DeviceBuffer buffer(bytes, {.device = device_});
  if (bytes > 0) buffer.write(host, bytes);
  buffers_.push_back(std::move(buffer));
  return buffers_.back().data();
}

TensorView DeviceTensors::copy(const TensorView& host) {
  TensorView view = host;
  if (host.is_absent()) return view;
  view.data = memory(host.data, extent_bytes(host));
  view.device = device_;
  return view;
}

ScaleView DeviceTensors::copy(const ScaleView& host) {
  ScaleView view = host;
  if (host.data == nullptr) return view;
  view.data = memory(host.data, host.capacity * bytes(host.type));
  view.device = device_;
  return view;
}

PerExpert DeviceTensors::copy(const PerExpert& host) {
  return host.values.is_absent() ? host : PerExpert(copy(host.values));
}

void DeviceTensors::fill(uint8_t byte) const {
  for (const DeviceBuffer& buffer : buffers_) buffer.fill(byte);
}

MoeLayer prepare_on_gpu(const MoeWeights& weights, const MoeConfig& config, Device device) {
  DeviceTensors tensors(device);
  MoeWeights there = weights;
  for (WeightView* weight : {&there.w1, &there.w2}) {
    weight->values = tensors.copy(weight->values);
    weight->scales = tensors.copy(weight->scales);
  }
  for (PerExpert* factor :
       {&there.up_scale, &there.gate_scale, &there.down_scale, &there.inter_multiplier}) {
    *factor = tensors.copy(*factor);
  }
  if (there.input_multiplier) there.input_multiplier = tensors.copy(*there.input_multiplier);
  there.bias1 = tensors.copy(there.bias1);
  there.bias2 = tensors.copy(there.bias2);
  MoeConfig moved = config;
  Activation& activation = moved.activation;
  for (PerExpert* parameter :
       {&activation.alpha, &activation.beta, &activation.limit_gate, &activation.limit_up}) {
    *parameter = tensors.copy(*parameter);
  }
  const CudaStream stream(device);
  MoeLayer layer = MoeLayer::prepare(there, moved, device, stream.get());
  tensors.fill(0xFF);
  return layer;
}

GpuMoeRun::GpuMoeRun(const MoeLayer& layer, const MoeInputs& inputs, const Routing& routing,
                     Device device)
    : layer_(layer), device_(device), tokens_(inputs.values.shape[0]) {
  const MoeConfig& config = layer.config();
  const int64_t slots = config.routing.top_k + config.routing.shared_experts;
  x_ = mirrored(inputs.values, device, inputs_.values);
  scales_ = mirrored(inputs.scales, device, inputs_.scales);
  row_scale_ = mirrored(inputs.row_scale, device, inputs_.row_scale);
  logits_ = mirrored(routing.logits, device, routing_.logits);
  router_bias_ = mirrored(routing.bias, device, routing_.bias);
  packed_ = mirrored(routing.packed, device, routing_.packed);
  ids_in_ = mirrored(routing.ids, device, routing_.ids);
  weights_in_ = mirrored(routing.weights, device, routing_.weights);
  out_ = output(outputs_.out, config.out_dtype, {tokens_, config.hidden}, device);
  slot_out_ = output(outputs_.slot_out, config.slot_dtype, {layer.max_rows(tokens_), config.hidden},
                     device);
  weights_ = output(outputs_.expert_weights, DType::kF32, {tokens_, slots}, device);
  ids_ = output(outputs_.topk_ids, DType::kI32, {tokens_, slots}, device);
  slot_to_row_ = output(outputs_.slot_to_row, DType::kI32, {tokens_ * slots}, device);
  errors_ = DeviceBuffer(sizeof(DeviceErrors), {.device = device});
  outputs_.errors = reinterpret_cast<DeviceErrors*>(errors_.data());
  workspace_ = output(workspace_view_, DType::kU8, {layer.required_workspace(tokens_)}, device);
}

void GpuMoeRun::queue(Stream stream) const {
  layer_.run(inputs_, routing_, outputs_, workspace_view_, stream);
}

void GpuMoeRun::queue_slots(Stream stream) const {
  MoeOutputs outputs = outputs_;
  outputs.out = {};
  layer_.run(inputs_, routing_, outputs, workspace_view_, stream);
}

void GpuMoeRun::queue_first_cols(int64_t cols, Stream stream) const {
  MoeOutputs outputs = outputs_;
  outputs.out.shape[1] = outputs.out.strides[0] = cols;
  layer_.run(inputs_, routing_, outputs, workspace_view_, stream);
}

void GpuMoeRun::queue_first_tokens(int64_t tokens, Stream stream) const {
  const MoeConfig& config = layer_.config();
  MoeInputs inputs = inputs_;
  Routing routing = routing_;
  MoeOutputs outputs = outputs_;
  for (TensorView* view :
       {&inputs.values, &inputs.scales, &inputs.row_scale, &routing.logits, &routing.packed,
        &routing.ids, &routing.weights, &outputs.out, &outputs.expert_weights, &outputs.topk_ids}) {
    if (!view->is_absent()) view->shape[0] = tokens;
  }
  outputs.slot_out.shape[0] = layer_.max_rows(tokens);
  outputs.slot_to_row.shape[0] = tokens * (config.routing.top_k + config.routing.shared_experts);
  layer_.run(inputs, routing, outputs, workspace_view_, stream);
}

void GpuMoeRun::queue_in_workspace(int64_t bytes, Stream stream) const {
  TensorView workspace = workspace_view_;
  workspace.shape[0] = bytes;
  layer_.run(inputs_, routing_, outputs_, workspace, stream);
}

void GpuMoeRun::move_workspace(int64_t offset) {
  const int64_t bytes = workspace_view_.num_elements();
  workspace_ = DeviceBuffer(offset + bytes, {.device = device_});
  workspace_view_.data = workspace_.data() + offset;
}

void GpuMoeRun::queue_combine(Stream stream) const {
  combine(outputs_.slot_out, outputs_.slot_to_row, outputs_.expert_weights, outputs_.out, stream);
}

void GpuMoeRun::send(const MoeInputs& inputs, const Routing& routing) const {
  resend(x_, inputs.values);
  resend(scales_, inputs.scales);
  resend(row_scale_, inputs.row_scale);
  resend(logits_, routing.logits);
  resend(router_bias_, routing.bias);
  resend(packed_, routing.packed);
  resend(ids_in_, routing.ids);
  resend(weights_in_, routing.weights);
}

void GpuMoeRun::poison(uint8_t byte) const {
  for (const DeviceBuffer* buffer :
       {&out_, &slot_out_, &weights_, &ids_, &slot_to_row_, &errors_, &workspace_}) {
    buffer->fill(byte);
  }
}

MoeResult GpuMoeRun::take() const {
  for (const DeviceBuffer* buffer :
       {&x_, &logits_, &out_, &slot_out_, &weights_, &ids_, &slot_to_row_, &errors_, &workspace_}) {
    EXPECT_TRUE(buffer->data() == nullptr || buffer->intact());
  }
  MoeResult result{out_.copy(), {}, weights_.copy(), ids_.copy(), slot_to_row_.copy()};
  const std::vector<uint8_t> rows = slot_out_.copy();
  const size_t row_bytes = static_cast<size_t>(outputs_.slot_out.shape[1]) *
                           static_cast<size_t>(bits(outputs_.slot_out.dtype) / 8);
  result.slot_rows.resize(result.slot_to_row.size() / 4 * row_bytes);
  for (size_t slot = 0; slot < result.slot_to_row.size() / 4; ++slot) {
    int32_t row = 0;
    std::memcpy(&row, &result.slot_to_row[4 * slot], 4);
    const bool exists = row >= 0 && row < outputs_.slot_out.shape[0];
    EXPECT_TRUE(row == -1 || exists) << "slot " << slot << " row " << row;
    if (!exists) continue;
    std::memcpy(&result.slot_rows[slot * row_bytes], &rows[static_cast<size_t>(row) * row_bytes],
                row_bytes);
  }
  return result;
}

DeviceErrors GpuMoeRun::errors() const {
  DeviceErrors errors;
  errors_.read(&errors, sizeof(errors));
  return errors;
}

std::vector<float> GpuMoeRun::output_of(int64_t begin, int64_t count) const {
  const int64_t row_bytes = outputs_.out.shape[1] * bits(outputs_.out.dtype) / 8;
  std::vector<uint8_t> bytes(static_cast<size_t>(count * row_bytes));
  out_.read(bytes.data(), count * row_bytes, begin * row_bytes);
  return as_floats(bytes, outputs_.out.dtype);
}

MoeResult run_on_gpu(const MoeLayer& layer, MoeCase& layer_case, const GpuMoeStyle& style) {
  const GpuMoeRun run(layer, layer_case);
  run.poison(style.poison);
  const CudaStream stream;
  run.queue(stream.get(style.programmatic_launch));
  stream.synchronize();
  return run.take();
}

}  // namespace narrowfloat::testing
