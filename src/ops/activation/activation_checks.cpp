// See activation_checks.h.
#include "ops/activation/activation_checks.h"

#include <array>
#include <cmath>

#include "base/int_math.h"
#include "base/throw_error.h"
#include "tensor/row_checks.h"
#include "tensor/row_format.h"
#include "tensor/view_checks.h"

namespace narrowfloat {
namespace {

// The five values that may be given per expert, with their names in messages.
struct Parameter {
  std::string_view argument;
  const PerExpert& given;
};

auto parameters(const ActivateArgs& call) {
  const Activation& activation = call.activation;
  return std::array{Parameter{"activation.alpha", activation.alpha},
                    Parameter{"activation.beta", activation.beta},
                    Parameter{"activation.limit_gate", activation.limit_gate},
                    Parameter{"activation.limit_up", activation.limit_up},
                    Parameter{"multiplier", call.multiplier}};
}

void check_multiplier(const ActivateArgs& call) {
  const bool is_read = call.format == RowFormat::kFp8Static || call.format == RowFormat::kNvfp4;
  if (!call.multiplier.values.is_absent()) {
    if (!is_read) {
      throw_invalid("multiplier: {} rows take none; leave it unset", name(call.format));
    }
    return;
  }
  const float value = call.multiplier.value;
  if (!is_read && value != 1.0F) {
    throw_invalid("multiplier: {} rows take none; leave it at 1, got {}", name(call.format), value);
  }
  if (!std::isfinite(value) || value <= 0.0F) {
    throw_invalid("multiplier: expected a finite value > 0, got {}", value);
  }
}

// The number of experts that have values of their own; 0 without any.
int64_t lower_experts(const ActivateArgs& call, Device device) {
  int64_t experts = 0;
  for (const auto& [argument, given] : parameters(call)) {
    if (given.values.is_absent()) continue;
    const int64_t count = given.values.num_elements();
    if (experts == 0) experts = count;
    require_vector(argument, given.values, DType::kF32, experts, device);
  }
  return experts;
}

void lower_tiles(const ActivateArgs& call, int64_t rows, Device device) {
  if (call.tile_to_expert.is_absent()) {
    throw_invalid("tile_to_expert: a parameter has a value per expert; give the tiles' experts");
  }
  if (call.token_tile <= 0) {
    throw_invalid("token_tile: expected the rows of a tile, > 0, got {}", call.token_tile);
  }
  const int64_t tiles = call.tile_to_expert.num_elements();
  require_vector("tile_to_expert", call.tile_to_expert, DType::kI32, tiles, device);
  if (tiles < ceil_div(rows, call.token_tile)) {
    throw_invalid("tile_to_expert: expected at least {} tiles for {} rows, got {}",
                  ceil_div(rows, call.token_tile), rows, tiles);
  }
}

void check_num_rows(const ActivateArgs& call, Device device) {
  if (call.num_rows.is_absent()) return;
  const bool has_1x128_scales =
      call.format == RowFormat::kFp8Group ||
      (call.input.values.dtype == DType::kF8E4M3 && scale_blocks(call.format, 128) == 0);
  if (!has_1x128_scales) {
    throw_invalid("num_rows: only for 1x128 scales, of F8_E4M3 input and fp8_1x128 rows");
  }
  require_vector("num_rows", call.num_rows, DType::kI32, 1, device);
}

void check_input(const ActivateArgs& call, const ActivationProblem& problem) {
  const TensorView& values = call.input.values;
  if (values.shape[1] != problem.input_cols) {
    const bool gated = activation_info(problem.kind).is_gated;
    throw_invalid("input.values: {} of {} columns reads {} (u{}), got {}", name(problem.kind),
                  problem.inter, problem.input_cols, gated ? " and g" : "", to_string(values));
  }
  require_dense("input.values", values);
  require_data("input.values", values);
  const bool has_scales = values.dtype == DType::kF8E4M3;
  if (!has_scales && !call.input.scales.is_absent()) {
    throw_invalid("input.scales: {} input has none; leave it unset", name(values.dtype));
  }
  if (!call.input.row_scale.is_absent()) {
    throw_invalid("input.row_scale: not read; leave it unset");
  }
  if (has_scales) {
    require_row_scales("input.scales", call.input.scales,
                       {.format = RowFormat::kFp8Group,
                        .rows = problem.rows,
                        .cols = problem.input_cols,
                        .device = problem.device,
                        .reads_scale_strides = !problem.has_num_rows});
  }
}

// If the number of rows is on the device, strides are not read.
bool has_wide_strides(const ActivateArgs& call) {
  const auto is_wide = [](const TensorView& scales) {
    constexpr int64_t kLimit = int64_t{1} << 32;
    const auto is_wide_on = [&](size_t axis) {
      return scales.shape[axis] > 1 && scales.strides[axis] >= kLimit;
    };
    return scales.rank == 2 && (is_wide_on(0) || is_wide_on(1));
  };
  return call.num_rows.is_absent() && (is_wide(call.input.scales) || is_wide(call.output.scales));
}

ActivationProblem lower_problem(const ActivateArgs& call) {
  const TensorView& input = call.input.values;
  const TensorView& output = call.output.values;
  require_view("input.values", input);
  require_dtype("input.values", input, {DType::kF32, DType::kF64, DType::kBF16, DType::kF8E4M3});
  require_view("output.values", output);
  for (const auto& [argument, view] :
       {std::pair{"input.values", &input}, std::pair{"output.values", &output}}) {
    if (view->rank != 2) {
      throw_invalid("{}: expected [rows, columns], got {}", argument, to_string(*view));
    }
  }
  const ActivationInfo& info = activation_info(call.activation.kind);
  const int64_t inter = output.shape[1] * (value_cols(call.format, 2) == 1 ? 2 : 1);
  const auto gated_cols = checked_mul(inter, 2);
  if (!gated_cols) throw_invalid("output.values: too many columns, {}", to_string(output));
  return {.kind = call.activation.kind,
          .gate_order = call.gate_order,
          .input = input.dtype,
          .format = call.format,
          .device = input.device,
          .slots = call.slot_to_row.num_elements(),
          .rows = input.shape[0],
          .inter = inter,
          .input_cols = info.is_gated ? *gated_cols : inter,
          .has_num_rows = !call.num_rows.is_absent(),
          .has_row_to_slot = !call.row_to_slot.is_absent(),
          .has_wide_strides = has_wide_strides(call)};
}

// Scales are [blocks, P]: the place of (row, block) is row + P * block.
void resolve_strides(int64_t scale_rows, LoweredActivation& lowered) {
  for (TensorView* scales : {&lowered.args.input.scales, &lowered.args.output.scales}) {
    if (scales->is_absent()) continue;
    scales->strides[0] = 1;
    scales->strides[1] = scale_rows;
  }
}

void check_inverse_map(const ActivationProblem& problem, const ActivationArgs& args) {
  int64_t named = 0;
  for (int64_t slot = 0; slot < problem.slots; ++slot) {
    const int32_t row = args.slot_to_row[slot];
    if (row < 0) continue;
    ++named;
    if (args.row_to_slot[row] != slot) {
      throw_invalid("row_to_slot: expected slot {} at row {}, as slot_to_row says, got {}", slot,
                    row, args.row_to_slot[row]);
    }
  }
  int64_t in_use = 0;
  for (int64_t row = 0; row < problem.rows; ++row) in_use += args.row_to_slot[row] >= 0 ? 1 : 0;
  if (in_use != named) {
    throw_invalid("row_to_slot: expected {} rows with a slot, as slot_to_row names, got {}", named,
                  in_use);
  }
}

// Checks the contents of maps, where the host can read them.
void check_data(LoweredActivation& lowered) {
  const ActivationProblem& problem = lowered.problem;
  const ActivationArgs& args = lowered.args;
  const int64_t experts = args.experts;
  int64_t rows = problem.rows;
  if (problem.has_num_rows) {
    rows = *args.num_rows;
    if (rows < 0 || rows > problem.rows) {
      throw_invalid("num_rows: expected 0 to {} (rows of the input), got {}", problem.rows, rows);
    }
    resolve_strides(rows, lowered);
  }
  for (int64_t slot = 0; slot < problem.slots; ++slot) {
    const int32_t row = args.slot_to_row[slot];
    if (row < 0) continue;
    if (row >= rows) {
      throw_invalid("slot_to_row: expected rows below {}, got {} at {}", rows, row, slot);
    }
    if (experts == 0) continue;
    const int64_t tile = row / args.token_tile;
    const int32_t expert = args.tile_to_expert[tile];
    if (expert < 0 || expert >= experts) {
      throw_invalid("tile_to_expert: expected experts below {}, got {} at {}", experts, expert,
                    tile);
    }
  }
  if (problem.has_row_to_slot) check_inverse_map(problem, args);
}

// On CUDA values are accessed in vectors of up to 16 bytes, 4-bit codes in vectors of two bytes;
// scales and maps are accessed one by one.
void check_alignment(const ActivateArgs& call, const ActivationProblem& problem) {
  if (problem.rows == 0 || problem.inter == 0) return;
  require_cuda_rows("input.values", call.input.values.data,
                    problem.input_cols * bits(problem.input) / 8, problem.device);
  if (value_dtype(problem.format) == DType::kU8) {
    return require_cuda_alignment("output.values", call.output.values.data, problem.device);
  }
  require_cuda_rows("output.values", call.output.values.data,
                    row_bytes(problem.format, problem.inter), problem.device);
}

void check_overlap(const ActivateArgs& call, bool has_num_rows) {
  ByteRange scales = byte_range("output.scales", call.output.scales);
  ByteRange input_scales = byte_range("input.scales", call.input.scales);
  if (has_num_rows) {
    // The scales are at most rows * blocks, whatever the strides are.
    scales.size_bytes = call.output.scales.is_absent() ? 0 : call.output.scales.num_elements() * 4;
    input_scales.size_bytes =
        call.input.scales.is_absent() ? 0 : call.input.scales.num_elements() * 4;
  }
  const auto given = parameters(call);
  const std::array outputs{byte_range("output.values", call.output.values), scales,
                           byte_range("output.row_scale", call.output.row_scale)};
  const std::array inputs{byte_range("input.values", call.input.values),
                          input_scales,
                          byte_range("slot_to_row", call.slot_to_row),
                          byte_range("tile_to_expert", call.tile_to_expert),
                          byte_range("num_rows", call.num_rows),
                          byte_range("row_to_slot", call.row_to_slot),
                          byte_range(given[0].argument, given[0].given.values),
                          byte_range(given[1].argument, given[1].given.values),
                          byte_range(given[2].argument, given[2].given.values),
                          byte_range(given[3].argument, given[3].given.values),
                          byte_range(given[4].argument, given[4].given.values)};
  require_disjoint(outputs, inputs);
}

}  // namespace

LoweredActivation lower(const ActivateArgs& call) {
  check_activation(call.activation);
  // Both throw for an invalid enumerator.
  name(call.gate_order);
  name(call.format);
  check_multiplier(call);
  LoweredActivation lowered{.problem = lower_problem(call)};
  ActivationProblem& problem = lowered.problem;
  const Device device = problem.device;
  check_num_rows(call, device);
  check_input(call, problem);
  require_quantized_rows({"output.values", "output.scales", "output.row_scale"}, call.output,
                         {.format = problem.format,
                          .rows = problem.rows,
                          .cols = problem.inter,
                          .device = device,
                          .reads_scale_strides = !problem.has_num_rows,
                          .is_written = true});
  require_vector("slot_to_row", call.slot_to_row, DType::kI32, problem.slots, device);
  const int64_t experts = lower_experts(call, device);
  problem.per_expert = experts > 0;
  if (problem.per_expert) lower_tiles(call, problem.rows, device);
  if (problem.has_row_to_slot) {
    require_vector("row_to_slot", call.row_to_slot, DType::kI32, problem.rows, device);
  }
  check_overlap(call, problem.has_num_rows);
  check_alignment(call, problem);
  lowered.args = {.input = call.input,
                  .output = call.output,
                  .activation = call.activation,
                  .multiplier = call.multiplier,
                  .slot_to_row = static_cast<const int32_t*>(call.slot_to_row.data),
                  .tile_to_expert = static_cast<const int32_t*>(call.tile_to_expert.data),
                  .token_tile = call.token_tile,
                  .num_rows = static_cast<const int32_t*>(call.num_rows.data),
                  .row_to_slot = static_cast<const int32_t*>(call.row_to_slot.data),
                  .experts = experts};
  if (device.type == DeviceType::kCpu) check_data(lowered);
  return lowered;
}

}  // namespace narrowfloat
