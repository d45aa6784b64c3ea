// See grouped_gemm_checks.h.
#include "ops/grouped_gemm/grouped_gemm_checks.h"

#include <array>
#include <cmath>

#include "base/throw_error.h"
#include "ops/grouped_gemm/gemm_shape.h"
#include "tensor/row_checks.h"
#include "tensor/row_format.h"
#include "tensor/view_checks.h"

namespace narrowfloat {
namespace {

GemmRows lower_rows(const GroupedGemmArgs& args, const GemmShape& shape, Device device) {
  const CodedRows& a = args.a;
  require_view("a.values", a.values);
  RowFormat format = moe_mode_info(shape.mode.id).input;
  if (format == RowFormat::kBf16) {
    require_dtype("a.values", a.values, {DType::kBF16, DType::kF32});
    if (a.values.dtype == DType::kF32) format = RowFormat::kFp32;
    if (format == RowFormat::kFp32 && device.type == DeviceType::kCuda) {
      throw_error(ErrorKind::kUnsupported,
                  "a.values: fp32 rows run on the CPU only; convert to bf16");
    }
  }
  const int64_t count = a.values.rank == 0 ? 0 : a.values.shape[0];
  require_quantized_rows({.values = "a.values", .scales = "a.scales", .row_scale = "a.row_scale"},
                         a,
                         {.format = format, .rows = count, .cols = shape.cols, .device = device});
  require_cuda_alignment("a.values", a.values.data, device);
  return {.values = a.values.data,
          .dtype = a.values.dtype,
          .count = count,
          .scales = a.scales.data,
          .scale_row_stride = a.scales.strides[0],
          .scale_block_stride = a.scales.strides[1],
          .row_scale = static_cast<const float*>(a.row_scale.data)};
}

const int32_t* require_indexes(std::string_view argument, const TensorView& view, int64_t count,
                               Device device) {
  require_vector(argument, view, DType::kI32, count, device);
  return static_cast<const int32_t*>(view.data);
}

GemmFactor lower_factor(std::string_view argument, const PerExpert& factor, int64_t experts,
                        Device device) {
  GemmFactor lowered{.value = factor.value};
  if (factor.values.is_absent()) return lowered;
  require_vector(argument, factor.values, DType::kF32, experts, device);
  lowered.values = static_cast<const float*>(factor.values.data);
  return lowered;
}

GemmEpilogue lower_epilogue(const GroupedGemmArgs& args, const GemmShape& shape, Device device) {
  GemmEpilogue epilogue;
  epilogue.scale = lower_factor("scale", args.scale, shape.experts, device);
  epilogue.gate_scale = lower_factor("gate_scale", args.gate_scale, shape.experts, device);
  epilogue.gate_order = args.gate_order;
  const bool has_gate_scale =
      epilogue.gate_scale.values != nullptr || epilogue.gate_scale.value != 1.0F;
  if (has_gate_scale && !args.gate_order) {
    throw_invalid("gate_scale: it counts with gate_order only; set both or neither");
  }
  if (!args.slot_weights.is_absent()) {
    require_vector("slot_weights", args.slot_weights, DType::kF32, args.slot_weights.num_elements(),
                   device);
    epilogue.slot_weights = static_cast<const float*>(args.slot_weights.data);
    epilogue.num_slots = args.slot_weights.num_elements();
    const TensorView& slots = args.permutation.row_to_slot;
    epilogue.row_to_slot =
        require_indexes("permutation.row_to_slot", slots, slots.num_elements(), device);
    epilogue.num_mapped = slots.num_elements();
  }
  if (!args.bias.is_absent()) {
    require_tensor("bias", args.bias, {DType::kF32, DType::kBF16}, {shape.experts, shape.rows},
                   device);
    epilogue.bias = args.bias.data;
    epilogue.bias_dtype = args.bias.dtype;
  }
  return epilogue;
}

GemmFactor lower_multiplier(const GemmActivation& given, int64_t experts, Device device) {
  const PerExpert& multiplier = given.multiplier;
  const bool is_read = given.format == RowFormat::kFp8Static || given.format == RowFormat::kNvfp4;
  const bool is_one = multiplier.values.is_absent() && multiplier.value == 1.0F;
  if (!is_read && !is_one) {
    throw_invalid("activation.multiplier: {} rows take none; leave it 1", name(given.format));
  }
  if (multiplier.values.is_absent() &&
      !(std::isfinite(multiplier.value) && multiplier.value > 0.0F)) {
    throw_invalid("activation.multiplier: expected a finite value > 0, got {}", multiplier.value);
  }
  return lower_factor("activation.multiplier", multiplier, experts, device);
}

FusedActivation lower_activation(const GroupedGemmArgs& args, const GemmActivation& given,
                                 const PackedWeights& weights) {
  const GroupedGemmProblem& problem = weights.problem;
  const Activation& activation = given.activation;
  check_activation(activation);
  const Support support = weights.impl->supports_activation(problem, activation.kind, given.format,
                                                            args.permutation.token_tile);
  if (!support.ok()) {
    throw_error(ErrorKind::kUnsupported, "activation: {} {}; call activate()", weights.impl->name,
                support.reason());
  }
  if (args.gate_order != problem.gate_order) {
    throw_invalid("gate_order: with an activation, expected the weights' own");
  }
  require_view("activation.output.values", given.output.values);
  const int64_t rows = given.output.values.rank == 2 ? given.output.values.shape[0] : 0;
  const int64_t inter = problem.rows / 2;
  const Device device = problem.device;
  require_quantized_rows(
      {.values = "activation.output.values",
       .scales = "activation.output.scales",
       .row_scale = "activation.output.row_scale"},
      given.output,
      {.format = given.format, .rows = rows, .cols = inter, .device = device, .is_written = true});
  require_cuda_alignment("activation.output.values", given.output.values.data, device);
  const auto factor = [&](std::string_view argument, const PerExpert& value) {
    return lower_factor(argument, value, problem.experts, device);
  };
  return {.is_there = true,
          .format = given.format,
          .alpha = factor("activation.alpha", activation.alpha),
          .beta = factor("activation.beta", activation.beta),
          .limit_gate = factor("activation.limit_gate", activation.limit_gate),
          .limit_up = factor("activation.limit_up", activation.limit_up),
          .multiplier = lower_multiplier(given, problem.experts, device),
          .values = static_cast<uint8_t*>(given.output.values.data),
          .row_bytes = row_bytes(given.format, inter),
          .scales = given.output.scales.data,
          .scale_row_stride = given.output.scales.strides[0],
          .scale_block_stride = given.output.scales.strides[1]};
}

// Lowers the tiles' buffers; only the device knows how many are in use.
GemmTiles lower_tiles(const Permutation& permutation, Device device) {
  if (permutation.token_tile < 1) {
    throw_invalid("permutation.token_tile: expected at least 1, got {}", permutation.token_tile);
  }
  const int64_t count = permutation.tile_to_expert.num_elements();
  return {.token_tile = permutation.token_tile,
          .count = count,
          .experts = require_indexes("permutation.tile_to_expert", permutation.tile_to_expert,
                                     count, device),
          .row_ends =
              require_indexes("permutation.tile_row_end", permutation.tile_row_end, count, device)};
}

void check_output(const GroupedGemmArgs& args, const GemmShape& shape, Device device) {
  const bool sums_in_fp64 = args.accumulation == Accumulation::kFp64;
  if (sums_in_fp64 && device.type == DeviceType::kCuda) {
    throw_error(ErrorKind::kUnsupported,
                "accumulation: fp64 is the CPU's reference; expected fp32 on {}",
                to_string(device));
  }
  if (args.accumulation == Accumulation::kFast && args.a.values.dtype == DType::kF32) {
    throw_error(ErrorKind::kUnsupported,
                "accumulation: fast takes bf16 rows; convert a.values, or take fp32 sums");
  }
  if (args.activation) {
    if (args.output.is_absent()) return;
    throw_invalid("output: not written with an activation; leave it unset");
  }
  require_view("output", args.output);
  if (sums_in_fp64) {
    require_dtype("output", args.output, {DType::kF32, DType::kBF16, DType::kF64});
  } else {
    require_dtype("output", args.output, {DType::kF32, DType::kBF16});
  }
  if (args.output.rank != 2 || args.output.shape[1] != shape.rows) {
    throw_invalid("output: expected [max rows, {}], got {}", shape.rows, to_string(args.output));
  }
  require_dense("output", args.output);
  require_data("output", args.output);
  require_cuda_alignment("output", args.output.data, device);
  require_device("output", args.output.device, device);
}

void check_workspace(const TensorView& workspace, int64_t needed, Device device) {
  if (workspace.is_absent() && needed == 0) return;
  require_view("workspace", workspace);
  require_dtype("workspace", workspace, {DType::kU8});
  require_device("workspace", workspace.device, device);
  require_dense("workspace", workspace);
  const int64_t size = workspace.is_absent() ? 0 : workspace.num_elements();
  if (size < needed) {
    throw_invalid("workspace: expected at least {} bytes (grouped_gemm_workspace), got {}", needed,
                  size);
  }
  if (needed == 0) return;
  require_data("workspace", workspace);
  const auto address = reinterpret_cast<uintptr_t>(workspace.data);
  if (address % static_cast<uintptr_t>(kGemmAlignment) != 0) {
    throw_invalid("workspace: expected an address aligned to {} bytes, got {:#x}", kGemmAlignment,
                  address);
  }
}

void check_disjoint(const GroupedGemmArgs& args, const TensorView& workspace) {
  const Permutation& permutation = args.permutation;
  const GemmActivation& activation = args.activation ? *args.activation : GemmActivation{};
  const std::array outputs{byte_range("output", args.output), byte_range("workspace", workspace),
                           byte_range("activation.output.values", activation.output.values),
                           byte_range("activation.output.scales", activation.output.scales),
                           byte_range("activation.output.row_scale", activation.output.row_scale)};
  const Activation& function = activation.activation;
  const std::array inputs{byte_range("a.values", args.a.values),
                          byte_range("a.scales", args.a.scales),
                          byte_range("a.row_scale", args.a.row_scale),
                          byte_range("permutation.row_to_token", permutation.row_to_token),
                          byte_range("permutation.row_to_slot", permutation.row_to_slot),
                          byte_range("permutation.tile_to_expert", permutation.tile_to_expert),
                          byte_range("permutation.tile_row_end", permutation.tile_row_end),
                          byte_range("permutation.num_tiles", permutation.num_tiles),
                          byte_range("slot_weights", args.slot_weights),
                          byte_range("scale", args.scale.values),
                          byte_range("gate_scale", args.gate_scale.values),
                          byte_range("bias", args.bias),
                          byte_range("activation.multiplier", activation.multiplier.values),
                          byte_range("activation.alpha", function.alpha.values),
                          byte_range("activation.beta", function.beta.values),
                          byte_range("activation.limit_gate", function.limit_gate.values),
                          byte_range("activation.limit_up", function.limit_up.values)};
  require_disjoint(outputs, inputs);
}

// Requires that the rows of a tile lie in every buffer that row numbers index.
void check_tile(const GroupedGemmArgs& args, const GemmCall& call, int64_t experts, int64_t tile) {
  const int64_t expert = call.tiles.experts[tile];
  const int64_t previous = tile == 0 ? 0 : call.tiles.experts[tile - 1];
  if (expert < previous || expert >= experts) {
    throw_invalid(
        "permutation.tile_to_expert: expected experts in ascending order below {}, got {} after {} "
        "at tile {}",
        experts, expert, previous, tile);
  }
  const int64_t begin = tile * call.tiles.token_tile;
  const int64_t end = call.tiles.row_ends[tile];
  if (end < begin || end > begin + call.tiles.token_tile) {
    throw_invalid("permutation.tile_row_end: expected {} to {} for tile {}, got {}", begin,
                  begin + call.tiles.token_tile, tile, end);
  }
  const auto require_row = [&](std::string_view argument, int64_t rows) {
    if (end > rows) {
      throw_invalid("{}: expected at least {} rows (tile {} ends there), got {}", argument, end,
                    tile, rows);
    }
  };
  require_row("output", args.output.shape[0]);
  if (args.gather_tokens) {
    require_row("permutation.row_to_token", args.permutation.row_to_token.num_elements());
  } else {
    require_row("a.values", call.rows.count);
  }
  if (call.epilogue.slot_weights != nullptr) {
    require_row("permutation.row_to_slot", args.permutation.row_to_slot.num_elements());
  }
}

void check_row(const GroupedGemmArgs& args, const GemmCall& call, int64_t row) {
  if (args.gather_tokens) {
    const int64_t token = call.rows.row_to_token[row];
    if (token < 0 || token >= call.rows.count) {
      throw_invalid("permutation.row_to_token: expected 0 to {} (rows of a), got {} at row {}",
                    call.rows.count - 1, token, row);
    }
  }
  if (call.epilogue.slot_weights == nullptr) return;
  const int64_t slot = call.epilogue.row_to_slot[row];
  const int64_t slots = args.slot_weights.num_elements();
  if (slot < 0 || slot >= slots) {
    throw_invalid("permutation.row_to_slot: expected 0 to {} (slot_weights), got {} at row {}",
                  slots - 1, slot, row);
  }
}

// Checks the contents of the permutation, which is on the CPU.
void check_contents(const GroupedGemmArgs& args, int64_t experts, GemmCall& call) {
  const int64_t used = *static_cast<const int32_t*>(args.permutation.num_tiles.data);
  if (used < 0 || used > call.tiles.count) {
    throw_invalid("permutation.num_tiles: expected 0 to {} (tile_to_expert), got {}",
                  call.tiles.count, used);
  }
  call.tiles.count = used;
  for (int64_t tile = 0; tile < used; ++tile) {
    check_tile(args, call, experts, tile);
    const int64_t begin = tile * call.tiles.token_tile;
    for (int64_t row = begin; row < call.tiles.row_ends[tile]; ++row) check_row(args, call, row);
  }
}

}  // namespace

GemmCall checked_call(const GroupedGemmArgs& args, const GroupedWeights& weights,
                      const TensorView& workspace) {
  const PackedWeights& state = packed_weights(weights);
  const Device device = state.problem.device;
  const GemmShape shape(state.problem);
  const TensorView& rows = args.activation ? args.activation->output.values : args.output;
  GemmCall call{.weights = state.data.bytes.get(),
                .weight_encoding = state.data.encoding,
                .tables = state.data.tables,
                .accumulation = args.accumulation,
                .rows = lower_rows(args, shape, device),
                .tiles = lower_tiles(args.permutation, device),
                .epilogue = lower_epilogue(args, shape, device),
                .output = args.output.data,
                .output_dtype = args.output.dtype,
                .output_rows = rows.rank == 0 ? 0 : rows.shape[0],
                .workspace = static_cast<uint8_t*>(workspace.data)};
  if (args.gather_tokens) {
    const TensorView& tokens = args.permutation.row_to_token;
    call.rows.row_to_token =
        require_indexes("permutation.row_to_token", tokens, tokens.num_elements(), device);
    call.rows.num_mapped = tokens.num_elements();
  }
  require_vector("permutation.num_tiles", args.permutation.num_tiles, DType::kI32, 1, device);
  call.tiles.num_tiles = static_cast<const int32_t*>(args.permutation.num_tiles.data);
  if (args.activation) call.activation = lower_activation(args, *args.activation, state);
  check_output(args, shape, device);
  check_workspace(workspace, grouped_gemm_workspace(weights, call.rows.count, args.accumulation),
                  device);
  check_disjoint(args, workspace);
  if (device.type == DeviceType::kCpu) check_contents(args, shape.experts, call);
  return call;
}

}  // namespace narrowfloat
