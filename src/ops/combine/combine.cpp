// The public combine (FlashInfer's finalize): checks, selects an implementation, runs it.
#include <array>

#include <fmt/format.h>

#include "base/throw_error.h"
#include "ops/combine/combine_problem.h"
#include "runtime/dispatch.h"
#include "tensor/view_checks.h"

namespace narrowfloat {

std::span<const CombineImpl> combine_impls() {
  static const std::array kImpls {
#if defined(NARROWFLOAT_CUDA)
    kCombineSm90, kCombineSm80,
#endif
#if defined(NARROWFLOAT_VECTOR_LEVELS)
        kCombineCpuAvx512, kCombineCpuAvx2,
#endif
        kCombineCpuBaseline, kCombineCpuReference
  };
  return kImpls;
}

std::string to_string(const CombineProblem& problem) {
  return fmt::format("{}x{} slots of {} {}, weights {} -> {} {} on {}", problem.tokens,
                     problem.slots, problem.hidden, name(problem.slot_rows),
                     problem.has_weights ? name(problem.weights) : "absent", problem.cols,
                     name(problem.output), to_string(problem.device));
}

namespace {

void require_matrix(std::string_view argument, const TensorView& view) {
  require_view(argument, view);
  require_dtype(argument, view, {DType::kBF16, DType::kF16, DType::kF32});
  if (view.rank != 2) throw_invalid("{}: expected two axes, got {}", argument, to_string(view));
}

int64_t row_bytes(const TensorView& view, int64_t stride) { return stride * bits(view.dtype) / 8; }

// Slots per token.
int64_t require_slots(const TensorView& slot_to_row, int64_t tokens, Device device) {
  require_view("slot_to_row", slot_to_row);
  const int64_t count = slot_to_row.num_elements();
  require_vector("slot_to_row", slot_to_row, DType::kI32, count, device);
  const bool is_whole = tokens == 0 ? count == 0 : count > 0 && count % tokens == 0;
  if (!is_whole) {
    throw_invalid("slot_to_row: expected as many values for each of the {} tokens of out, got {}",
                  tokens, to_string(slot_to_row));
  }
  return tokens == 0 ? 0 : count / tokens;
}

void require_weights(const TensorView& weights, const CombineProblem& problem) {
  if (!problem.has_weights) return;
  require_dtype("weights", weights, {DType::kF32, DType::kBF16});
  require_vector("weights", weights, weights.dtype, problem.tokens * problem.slots, problem.device);
}

// On a device a row that does not exist counts as none.
void require_rows_exist(const TensorView& slot_to_row, int64_t rows) {
  if (slot_to_row.device.type != DeviceType::kCpu) return;
  const auto* values = static_cast<const int32_t*>(slot_to_row.data);
  const int64_t count = slot_to_row.num_elements();
  bool all_exist = true;
  for (int64_t i = 0; i < count; ++i) all_exist &= values[i] >= -1 && values[i] < rows;
  if (all_exist) return;
  for (int64_t i = 0; i < count; ++i) {
    if (values[i] < -1 || values[i] >= rows) {
      throw_invalid("slot_to_row: expected -1 or a row of slot_rows, 0 to {}, got {} at {}",
                    rows - 1, values[i], i);
    }
  }
}

void require_no_overlap(const TensorView& slot_rows, const TensorView& slot_to_row,
                        const TensorView& weights, const TensorView& out) {
  const std::array outputs{byte_range("out", out)};
  const std::array inputs{byte_range("slot_rows", slot_rows),
                          byte_range("slot_to_row", slot_to_row), byte_range("weights", weights)};
  require_disjoint(outputs, inputs);
}

}  // namespace

void combine(const TensorView& slot_rows, const TensorView& slot_to_row, const TensorView& weights,
             const TensorView& out, Stream stream) {
  combine_in_layer(slot_rows, slot_to_row, weights, out, false, stream);
}

void combine_in_layer(const TensorView& slot_rows, const TensorView& slot_to_row,
                      const TensorView& weights, const TensorView& out, bool maps_are_complete,
                      Stream stream) {
  require_matrix("slot_rows", slot_rows);
  require_dense("slot_rows", slot_rows);
  require_data("slot_rows", slot_rows);
  require_matrix("out", out);
  require_device("out", out.device, slot_rows.device);
  const RowMatrix out_rows = require_rows("out", out, out.shape[1]);
  if (out.shape[1] > slot_rows.shape[1]) {
    throw_invalid("out: expected at most {} columns as slot_rows has, got {}", slot_rows.shape[1],
                  out.shape[1]);
  }
  require_cuda_rows("slot_rows", slot_rows.data, row_bytes(slot_rows, slot_rows.shape[1]),
                    slot_rows.device);
  const int64_t tokens = out.shape[0];
  // A single token has no following row.
  require_cuda_rows("out", out.data, tokens > 1 ? row_bytes(out, out_rows.stride) : 0, out.device);
  const CombineProblem problem{.slot_rows = slot_rows.dtype,
                               .weights = weights.dtype,
                               .has_weights = !weights.is_absent(),
                               .output = out.dtype,
                               .device = slot_rows.device,
                               .tokens = tokens,
                               .rows = slot_rows.shape[0],
                               .slots = require_slots(slot_to_row, tokens, slot_rows.device),
                               .hidden = slot_rows.shape[1],
                               .cols = out.shape[1]};
  require_weights(weights, problem);
  require_no_overlap(slot_rows, slot_to_row, weights, out);
  require_rows_exist(slot_to_row, slot_rows.shape[0]);
  const CombineArgs args{.slot_rows = slot_rows.data,
                         .slot_to_row = static_cast<const int32_t*>(slot_to_row.data),
                         .weights = weights.data,
                         .output = out.data,
                         .output_stride = out_rows.stride,
                         .maps_are_complete = maps_are_complete};
  select("combine", combine_impls(), problem).run(problem, args, stream);
}

}  // namespace narrowfloat
