// cpu_baseline: all cores through oneTBB, one row at a time. A row is widened and encoded in chunks
// of columns, so nothing is allocated.
#include <algorithm>

#include "base/float_ops.h"
#include "moe_shared/quantize_activations_problem.h"
#include "runtime/parallel.h"
#include "tensor/element_io.h"
#include "tensor/row_encoder.h"

namespace narrowfloat {
namespace {

constexpr int64_t kQuantizedCols = 4 * RowEncoder::kUnit;

// Loads elements [col, col + count) of a row as fp32; F64 is the result of FC1 in a fp64 layer.
void load(const TensorView& rows, int64_t row, int64_t col, int64_t count, float* out) {
  const int64_t first = row * rows.shape[1] + col;
  if (rows.dtype != DType::kF64) {
    return widen(rows.dtype, element_pointer(rows.data, rows.dtype, first), count, out);
  }
  const double* in = static_cast<const double*>(rows.data) + first;
  for (int64_t i = 0; i < count; ++i) out[i] = static_cast<float>(in[i]);
}

float row_amax(const TensorView& rows, int64_t row) {
  AbsMax amax;
  float piece[kQuantizedCols];
  const int64_t cols = rows.shape[1];
  for (int64_t col = 0; col < cols; col += kQuantizedCols) {
    const int64_t count = std::min(kQuantizedCols, cols - col);
    load(rows, row, col, count, piece);
    amax.add(piece, count);
  }
  return amax.or_zero();
}

// Quantizes row `row` to row `to` of output.
void quantize_row(const TensorView& rows, int64_t row, const RowRules& rules,
                  const CodedRows& output, int64_t to) {
  const int64_t cols = rows.shape[1];
  const RowTarget target = row_target(output, rules.format, to, cols);
  RowEncoder encoder(rules);
  encoder.start_row(encoder.needs_row_amax() ? row_amax(rows, row) : 0.0F, target);
  float piece[kQuantizedCols];
  for (int64_t col = 0; col < cols; col += kQuantizedCols) {
    const int64_t count = std::min(kQuantizedCols, cols - col);
    load(rows, row, col, count, piece);
    encoder.encode(piece, col, count, target);
  }
}

// The row that the i-th row of the output is made from, or the i-th of the list; -1 for none.
int64_t source_of(const QuantizeActivationsArgs& args, int64_t i) {
  return args.choice == RowChoice::kAll ? i : static_cast<const int32_t*>(args.map.data)[i];
}

RowRules rules_of(const QuantizeActivationsArgs& args, int64_t row) {
  RowRules rules{.format = args.format,
                 .multiplier = args.multiplier.value,
                 .input_max = largest_finite(args.rows.dtype)};
  if (!args.multiplier.values.is_absent()) {
    const auto* experts = static_cast<const int32_t*>(args.tile_to_expert.data);
    const auto* each = static_cast<const float*>(args.multiplier.values.data);
    rules.multiplier = each[experts[row / args.token_tile]];
  }
  return rules;
}

void run(const QuantizeActivationsProblem& problem, const QuantizeActivationsArgs& args,
         Stream /*stream*/) {
  constexpr int64_t kTaskElements = 1 << 15;  // A task takes tens of microseconds.
  const bool is_list = problem.choice == RowChoice::kListed;
  const int64_t count = is_list ? args.map.num_elements() : problem.rows;
  parallel_for(count, row_grain(kTaskElements, problem.cols), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t source = source_of(args, i);
      const int64_t row = is_list ? source : i;
      if (source >= 0) quantize_row(args.rows, source, rules_of(args, row), args.output, row);
    }
  });
}

Support supports(const QuantizeActivationsProblem& problem) { return cpu_only(problem.device); }

}  // namespace

const QuantizeActivationsImpl kQuantizeActivationsCpuBaseline{"cpu_baseline", supports, run};

}  // namespace narrowfloat
