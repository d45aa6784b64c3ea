// See moe_checks.h. Shapes, dtypes and layouts of the weights themselves are checked where they are
// packed; this file has the checks that need the layer's configuration.
#include "layers/moe/moe_checks.h"

#include <array>
#include <bit>
#include <cmath>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "base/bad_enumerator.h"
#include "base/int_math.h"
#include "base/throw_error.h"
#include "layers/moe/owned_tensor.h"
#include "tensor/code_storage.h"
#include "tensor/row_checks.h"
#include "tensor/row_format.h"
#include "tensor/view_checks.h"

namespace narrowfloat {
namespace {

// Far above every model. Times the rows of the workspace, fewer than 2^32, and the bytes of an
// element it stays below 2^63.
constexpr int64_t kMaxExtent = int64_t{1} << 24;

void check_extent(std::string_view argument, int64_t extent, const MoeModeInfo& mode) {
  if (extent > kMaxExtent) throw_invalid("{}: expected at most 2^24, got {}", argument, extent);
  if (extent <= 0 || extent % mode.multiple != 0) {
    throw_invalid("{}: mode {} needs a positive multiple of {}, got {}", argument, mode.name,
                  mode.multiple, extent);
  }
}

void check_shard(const MoeConfig& config) {
  const int32_t experts = config.routing.experts;
  // The comparison avoids a sum that could overflow.
  if (config.expert_offset < 0 || config.local_experts < 1 ||
      config.expert_offset > experts - config.local_experts) {
    throw_invalid(
        "config.local_experts: the shard must lie within the {} experts, got experts {} to {}",
        experts, config.expert_offset, int64_t{config.expert_offset} + config.local_experts - 1);
  }
  if (config.routing.shared_experts > 0 && config.local_experts != experts) {
    throw_invalid(
        "config.routing.shared_experts: fused shared experts need all experts on one rank; got "
        "{} of {} local experts (run the shared experts as a layer of their own)",
        config.local_experts, experts);
  }
}

void check_types(const MoeConfig& config) {
  const DType out = config.out_dtype;
  if (out != DType::kBF16 && out != DType::kF16 && out != DType::kF32) {
    throw_invalid("config.out_dtype: expected BF16, F16 or F32, got {}", name(out));
  }
  if (config.slot_dtype != DType::kBF16 && config.slot_dtype != DType::kF32) {
    throw_invalid("config.slot_dtype: expected BF16 or F32, got {}", name(config.slot_dtype));
  }
  if (config.token_tile &&
      (*config.token_tile < 1 || !std::has_single_bit(static_cast<uint32_t>(*config.token_tile)))) {
    throw_invalid("config.token_tile: expected a power of two, got {}", *config.token_tile);
  }
}

void check_switches(const MoeConfig& config) {
  if (config.weight_on_input && config.routing.top_k != 1) {
    throw_invalid("config.weight_on_input: needs top_k 1, got {}", config.routing.top_k);
  }
}

// True for rows of an unquantized type, and for those of modes that quantize none.
bool is_plain_input(const MoeInputs& inputs, const MoeConfig& config) {
  const DType dtype = inputs.values.dtype;
  const bool is_wide = dtype == DType::kBF16 || dtype == DType::kF16 || dtype == DType::kF32;
  return is_wide || moe_mode_info(config.mode).input == RowFormat::kBf16;
}

void require_on_device(std::string_view argument, const void* data, Device from, Device device) {
  if (data == nullptr || from == device) return;
  if (from.type == DeviceType::kCpu && device.type == DeviceType::kCpu) return;
  throw_invalid("{}: expected a tensor on {}, the layer's device, got one on {}; copy it there",
                argument, to_string(device), to_string(from));
}

// Requires all tensors on the layer's device, checkpoints' tensors included.
void check_weight_devices(const MoeWeights& weights, const MoeConfig& config, Device device) {
  const Activation& activation = config.activation;
  const PerExpert input_multiplier = weights.input_multiplier.value_or(1.0F);
  const std::array tensors{std::pair{"weights.w1.values", &weights.w1.values},
                           std::pair{"weights.w2.values", &weights.w2.values},
                           std::pair{"weights.up_scale", &weights.up_scale.values},
                           std::pair{"weights.gate_scale", &weights.gate_scale.values},
                           std::pair{"weights.down_scale", &weights.down_scale.values},
                           std::pair{"weights.inter_multiplier", &weights.inter_multiplier.values},
                           std::pair{"weights.input_multiplier", &input_multiplier.values},
                           std::pair{"weights.bias1", &weights.bias1},
                           std::pair{"weights.bias2", &weights.bias2},
                           std::pair{"config.activation.alpha", &activation.alpha.values},
                           std::pair{"config.activation.beta", &activation.beta.values},
                           std::pair{"config.activation.limit_gate", &activation.limit_gate.values},
                           std::pair{"config.activation.limit_up", &activation.limit_up.values}};
  for (const auto& [argument, view] : tensors) {
    require_on_device(argument, view->data, view->device, device);
  }
  require_on_device("weights.w1.scales", weights.w1.scales.data, weights.w1.scales.device, device);
  require_on_device("weights.w2.scales", weights.w2.scales.data, weights.w2.scales.device, device);
}

void check_per_expert(std::string_view argument, const PerExpert& values, int32_t count,
                      Device device) {
  if (values.values.is_absent()) return;
  require_tensor(argument, values.values, {DType::kF32}, {count}, device);
}

bool is_one(const PerExpert& factor) { return factor.values.is_absent() && factor.value == 1.0F; }

void check_multiplier(std::string_view argument, const PerExpert& given, int32_t experts,
                      Device device, Stream stream) {
  check_per_expert(argument, given, experts, device);
  const std::vector<float> each = given.values.is_absent() ? std::vector<float>{given.value}
                                                           : floats_on_host(given.values, stream);
  for (const float value : each) {
    if (std::isfinite(value) && value > 0.0F) continue;
    throw_invalid("{}: expected finite values > 0, got {}", argument, value);
  }
}

void check_multipliers(const MoeWeights& weights, const MoeConfig& config, Device device,
                       Stream stream) {
  if (has_static_multiplier(moe_mode_info(config.mode).input)) {
    const int32_t experts = weight_experts(config);
    check_multiplier("weights.inter_multiplier", weights.inter_multiplier, experts, device, stream);
    return check_multiplier("weights.input_multiplier", weights.input_multiplier.value_or(1.0F),
                            experts, device, stream);
  }
  const std::string_view mode = name(config.mode);
  if (!is_one(weights.inter_multiplier)) {
    throw_invalid("weights.inter_multiplier: mode {} has no static multiplier; leave it 1", mode);
  }
  if (weights.input_multiplier) {
    throw_invalid("weights.input_multiplier: mode {} has no static multiplier; leave it out", mode);
  }
}

// Scales are checked against the mode where the weights are packed.
void check_weight_shape(std::string_view argument, const WeightView& weight,
                        std::initializer_list<int64_t> shape) {
  const TensorView& values = weight.values;
  const int64_t packed = values.dtype == DType::kU8 ? 2 : 1;
  const auto expected = shape.begin();
  if (values.rank != 3 || values.shape[0] != expected[0] || values.shape[1] != expected[1] ||
      checked_mul(values.shape[2], packed) != expected[2]) {
    throw_invalid("{}.values: expected [local experts, rows, cols] = [{}, {}, {}] elements, got {}",
                  argument, expected[0], expected[1], expected[2], to_string(values));
  }
}

// Checks a weight, or that only its source is given.
void check_weight(std::string_view argument, const WeightView& weight, const ExpertSource& source,
                  MoeMode mode, std::initializer_list<int64_t> shape) {
  if (!source) {
    check_weight_shape(argument, weight, shape);
    return require_dtype(fmt::format("{}.values", argument), weight.values,
                         {storage_of(moe_mode_info(mode).weights).dtype});
  }
  if (weight.values.is_absent() && weight.scales.data == nullptr) return;
  throw_invalid("{0}: expected {0} or {0}_source, got both", argument);
}

void check_bias(std::string_view argument, const TensorView& bias, int32_t experts, int64_t rows,
                Device device) {
  if (bias.is_absent()) return;
  require_tensor(argument, bias, {DType::kF32, DType::kBF16}, {experts, rows}, device);
}

// Checks types of rows that the layer quantizes, or uses unquantized.
void check_plain_input(const TensorView& x, const MoeConfig& config, bool takes_fp32,
                       bool has_input_multiplier) {
  const RowFormat format = moe_mode_info(config.mode).input;
  const bool is_bf16_mode = format == RowFormat::kBf16;
  if (is_bf16_mode && takes_fp32) {
    return require_dtype("inputs.values", x, {DType::kBF16, DType::kF32});
  }
  if (is_bf16_mode) return require_dtype("inputs.values", x, {DType::kBF16});
  require_dtype("inputs.values", x, {DType::kBF16, DType::kF16, DType::kF32});
  if (has_static_multiplier(format) && !has_input_multiplier) {
    throw_invalid(
        "inputs.values: mode {} quantizes rows with weights.input_multiplier, which the "
        "layer was prepared without; prepare it with one, or pass quantized rows",
        name(config.mode));
  }
}

void check_inputs(const MoeCall& call, const MoeConfig& config, bool takes_fp32,
                  bool has_input_multiplier, Device device) {
  const MoeInputs& inputs = call.inputs;
  const RowShape shape{.format = moe_mode_info(config.mode).input,
                       .rows = call.tokens,
                       .cols = config.hidden,
                       .device = device};
  if (!is_plain_input(inputs, config)) {
    require_quantized_rows({"inputs.values", "inputs.scales", "inputs.row_scale"}, inputs, shape);
    return require_cuda_alignment("inputs.values", inputs.values.data, device);
  }
  check_plain_input(inputs.values, config, takes_fp32, has_input_multiplier);
  require_tensor("inputs.values", inputs.values, {inputs.values.dtype},
                 {call.tokens, config.hidden}, device);
  require_cuda_alignment("inputs.values", inputs.values.data, device);
  if (!inputs.scales.is_absent() || !inputs.row_scale.is_absent()) {
    throw_invalid(
        "inputs.scales and inputs.row_scale: unquantized {} rows have none; leave them out",
        name(inputs.values.dtype));
  }
}

void check_routing_tokens(const Routing& routing, int64_t tokens) {
  const TensorView* view = &routing.ids;
  std::string_view argument = "routing.ids";
  if (!routing.logits.is_absent()) {
    view = &routing.logits;
    argument = "routing.logits";
  } else if (!routing.packed.is_absent()) {
    view = &routing.packed;
    argument = "routing.packed";
  }
  if (view->is_absent()) throw_invalid("routing: expected logits, packed or ids, got none");
  if (view->rank != 2 || view->shape[0] != tokens) {
    throw_invalid("{}: expected one row for each of the {} tokens of inputs, got {}", argument,
                  tokens, to_string(*view));
  }
}

void check_outputs(const MoeCall& call, const MoeConfig& config,
                   const PermutationLayout& permutation, Device device) {
  const MoeOutputs& outputs = call.outputs;
  const int64_t slots = permutation.slots;
  if (outputs.out.is_absent() && outputs.slot_out.is_absent()) {
    throw_invalid("outputs.out: give out, slot_out, or both");
  }
  if (!outputs.out.is_absent()) {
    require_view("outputs.out", outputs.out);
    const int64_t cols = outputs.out.rank == 2 ? outputs.out.shape[1] : -1;
    if (cols < 0 || cols > config.hidden) {
      throw_invalid("outputs.out: expected [{}, at most {}], got {}", call.tokens, config.hidden,
                    to_string(outputs.out));
    }
    require_tensor("outputs.out", outputs.out, {config.out_dtype}, {call.tokens, cols}, device);
    // A single token has no following row.
    const int64_t row_bytes = call.tokens > 1 ? cols * bits(config.out_dtype) / 8 : 0;
    require_cuda_rows("outputs.out", outputs.out.data, row_bytes, device);
  }
  if (!outputs.slot_out.is_absent()) {
    require_tensor("outputs.slot_out", outputs.slot_out, {config.slot_dtype},
                   {permutation.max_rows, config.hidden}, device);
    require_cuda_alignment("outputs.slot_out", outputs.slot_out.data, device);
  }
  if (!outputs.expert_weights.is_absent()) {
    require_tensor("outputs.expert_weights", outputs.expert_weights, {DType::kF32},
                   {call.tokens, slots}, device);
  }
  if (!outputs.topk_ids.is_absent()) {
    require_tensor("outputs.topk_ids", outputs.topk_ids, {DType::kI32}, {call.tokens, slots},
                   device);
  }
  if (!outputs.slot_to_row.is_absent()) {
    require_vector("outputs.slot_to_row", outputs.slot_to_row, DType::kI32, call.tokens * slots,
                   device);
  }
}

void check_workspace(const MoeCall& call, int64_t bytes, Device device) {
  const TensorView& workspace = call.workspace;
  require_view("workspace", workspace);
  if (bytes == 0) return;
  require_dtype("workspace", workspace, {DType::kU8});
  require_device("workspace", workspace.device, device);
  require_dense("workspace", workspace);
  if (workspace.num_elements() < bytes) {
    throw_invalid("workspace: {} tokens need {} bytes (required_workspace), got {}", call.tokens,
                  bytes, workspace.num_elements());
  }
  require_data("workspace", workspace);
  if (reinterpret_cast<uintptr_t>(workspace.data) % kWorkspaceAlignment != 0) {
    throw_invalid("workspace: expected an address aligned to {} bytes", kWorkspaceAlignment);
  }
}

void check_overlaps(const MoeCall& call) {
  const MoeOutputs& outputs = call.outputs;
  const std::array written{byte_range("outputs.out", outputs.out),
                           byte_range("outputs.slot_out", outputs.slot_out),
                           byte_range("outputs.expert_weights", outputs.expert_weights),
                           byte_range("outputs.slot_to_row", outputs.slot_to_row),
                           byte_range("outputs.topk_ids", outputs.topk_ids),
                           byte_range("outputs.routing_replay", outputs.routing_replay),
                           byte_range("workspace", call.workspace)};
  const std::array read{byte_range("inputs.values", call.inputs.values),
                        byte_range("inputs.scales", call.inputs.scales),
                        byte_range("inputs.row_scale", call.inputs.row_scale),
                        byte_range("routing.logits", call.routing.logits),
                        byte_range("routing.bias", call.routing.bias),
                        byte_range("routing.packed", call.routing.packed),
                        byte_range("routing.ids", call.routing.ids),
                        byte_range("routing.weights", call.routing.weights)};
  require_disjoint(written, read);
}

}  // namespace

int64_t fc1_rows(const MoeConfig& config) {
  return activation_info(config.activation.kind).is_gated ? 2 * config.inter : config.inter;
}

int32_t weight_experts(const MoeConfig& config) {
  return config.local_experts + config.routing.shared_experts;
}

MoeExtents moe_extents(const MoeConfig& config, const MoeReferenceOptions& reference,
                       const std::optional<PerExpert>& input_multiplier) {
  const MoeModeInfo& mode = moe_mode_info(config.mode);
  return {.hidden = config.hidden,
          .inter = config.inter,
          .fc1_rows = fc1_rows(config),
          .slots = config.routing.top_k + config.routing.shared_experts,
          .local_experts = weight_experts(config),
          .input = mode.input,
          .intermediate = reference.fp32_rows ? RowFormat::kFp32 : mode.intermediate,
          .accumulation = reference.accumulation,
          .slot_dtype = config.slot_dtype,
          .double_quantize_fc1 = reference.double_quantize_fc1,
          .weight_on_input = config.weight_on_input,
          .input_per_expert = input_multiplier && !input_multiplier->values.is_absent()};
}

void check_moe_config(const MoeConfig& config) {
  check_routing_config(config.routing);
  check_activation(config.activation);
  const MoeModeInfo& mode = moe_mode_info(config.mode);
  name(config.gate_order);  // Throws for an invalid enumerator.
  check_extent("config.hidden", config.hidden, mode);
  check_extent("config.inter", config.inter, mode);
  check_shard(config);
  check_types(config);
  check_switches(config);
}

void check_reference_options(const MoeReferenceOptions& reference, const MoeConfig& config) {
  const MoeModeInfo& mode = moe_mode_info(config.mode);
  if (reference.accumulation != Accumulation::kFp32 &&
      reference.accumulation != Accumulation::kFp64) {
    throw_bad_enumerator("accumulation", static_cast<int>(reference.accumulation));
  }
  if (reference.fp32_rows && mode.input != RowFormat::kBf16) {
    throw_invalid("reference.fp32_rows: only for modes with bf16 rows, got {}", mode.name);
  }
  if (reference.double_quantize_fc1 && config.mode != MoeMode::kFp8Block) {
    throw_invalid("reference.double_quantize_fc1: only for mode fp8_block, got {}", mode.name);
  }
}

void check_moe_weights(const MoeWeights& weights, const MoeConfig& config, Device device,
                       Stream stream) {
  const int32_t experts = weight_experts(config);
  check_weight_devices(weights, config, device);
  check_weight("weights.w1", weights.w1, weights.w1_source, config.mode,
               {experts, fc1_rows(config), config.hidden});
  check_weight("weights.w2", weights.w2, weights.w2_source, config.mode,
               {experts, config.hidden, config.inter});
  check_per_expert("weights.up_scale", weights.up_scale, experts, device);
  check_per_expert("weights.gate_scale", weights.gate_scale, experts, device);
  check_per_expert("weights.down_scale", weights.down_scale, experts, device);
  check_per_expert("config.activation.alpha", config.activation.alpha, experts, device);
  check_per_expert("config.activation.beta", config.activation.beta, experts, device);
  check_per_expert("config.activation.limit_gate", config.activation.limit_gate, experts, device);
  check_per_expert("config.activation.limit_up", config.activation.limit_up, experts, device);
  check_multipliers(weights, config, device, stream);
  if (!activation_info(config.activation.kind).is_gated && !is_one(weights.gate_scale)) {
    throw_invalid("weights.gate_scale: activation {} has no gate; leave it 1",
                  name(config.activation.kind));
  }
  check_bias("weights.bias1", weights.bias1, experts, fc1_rows(config), device);
  check_bias("weights.bias2", weights.bias2, experts, config.hidden, device);
}

void check_expert_weight(std::string_view argument, const WeightView& weight,
                         const std::array<int64_t, 2>& shape, Device device) {
  check_weight_shape(argument, weight, {1, shape[0], shape[1]});
  require_on_device(argument, weight.values.data, weight.values.device, device);
  require_on_device(argument, weight.scales.data, weight.scales.device, device);
}

bool quantizes_input(const MoeCall& call, const MoeConfig& config) {
  return moe_mode_info(config.mode).input != RowFormat::kBf16 &&
         is_plain_input(call.inputs, config);
}

void check_moe_call(const MoeCall& call, const MoeConfig& config, const MoePlan& plan,
                    const MoeExtents& extents, bool has_input_multiplier, Device device) {
  const bool takes_fp32 = extents.intermediate == RowFormat::kFp32;
  check_inputs(call, config, takes_fp32, has_input_multiplier, device);
  check_routing_tokens(call.routing, call.tokens);
  check_outputs(call, config, plan.permutation(), device);
  check_workspace(call, plan.workspace_bytes(), device);
  check_overlaps(call);
}

}  // namespace narrowfloat
