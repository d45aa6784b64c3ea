// See input_rows.h. A row is widened and encoded in pieces, so nothing is allocated.
#include "layers/moe/input_rows.h"

#include <algorithm>

#include "base/float_ops.h"
#include "runtime/parallel.h"
#include "tensor/element_io.h"
#include "tensor/row_encoder.h"

namespace narrowfloat {
namespace {

constexpr int64_t kPiece = 4 * RowEncoder::kUnit;

// Elements [col, col + count) of a row, as fp32; F64 is what FC1 of a fp64 layer leaves.
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
  float piece[kPiece];
  const int64_t cols = rows.shape[1];
  for (int64_t col = 0; col < cols; col += kPiece) {
    const int64_t count = std::min(kPiece, cols - col);
    load(rows, row, col, count, piece);
    amax.add(piece, count);
  }
  return amax.or_zero();
}

// Row `to` of output from row `row`.
void code_row(const TensorView& rows, int64_t row, const RowRules& rules, const CodedRows& output,
              int64_t to) {
  const int64_t cols = rows.shape[1];
  const RowTarget target = row_target(output, rules.format, to, cols);
  RowEncoder encoder(rules);
  encoder.start_row(encoder.needs_row_amax() ? row_amax(rows, row) : 0.0F, target);
  float piece[kPiece];
  for (int64_t col = 0; col < cols; col += kPiece) {
    const int64_t count = std::min(kPiece, cols - col);
    load(rows, row, col, count, piece);
    encoder.encode(piece, col, count, target);
  }
}

// Rows that take tens of microseconds.
int64_t row_grain(int64_t cols) {
  return std::max<int64_t>(1, (1 << 15) / std::max<int64_t>(1, cols));
}

}  // namespace

void code_rows(const TensorView& rows, RowFormat format, float multiplier,
               const CodedRows& output) {
  const RowRules rules{
      .format = format, .multiplier = multiplier, .input_max = largest_finite(rows.dtype)};
  parallel_for(rows.shape[0], row_grain(rows.shape[1]), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) code_row(rows, row, rules, output, row);
  });
}

void code_slot_rows(const TensorView& tokens, const Permutation& permutation, RowFormat format,
                    const PerExpert& multiplier, const CodedRows& output) {
  const auto ints = [](const TensorView& view) { return static_cast<const int32_t*>(view.data); };
  const auto* rows = ints(permutation.slot_to_row);
  const auto* row_tokens = ints(permutation.row_to_token);
  const auto* experts = ints(permutation.tile_to_expert);
  const auto* multipliers = static_cast<const float*>(multiplier.values.data);
  parallel_for(permutation.slot_to_row.num_elements(), row_grain(tokens.shape[1]),
               [&](int64_t begin, int64_t end) {
                 for (int64_t slot = begin; slot < end; ++slot) {
                   const int64_t row = rows[slot];
                   if (row < 0) continue;
                   const RowRules rules{
                       .format = format,
                       .multiplier = multipliers[experts[row / permutation.token_tile]],
                       .input_max = largest_finite(tokens.dtype)};
                   code_row(tokens, row_tokens[row], rules, output, row);
                 }
               });
}

void code_listed_rows(const TensorView& rows, const TensorView& slot_to_row, RowFormat format,
                      const CodedRows& output) {
  const RowRules rules{.format = format};
  const auto* listed = static_cast<const int32_t*>(slot_to_row.data);
  parallel_for(slot_to_row.num_elements(), row_grain(rows.shape[1]),
               [&](int64_t begin, int64_t end) {
                 for (int64_t slot = begin; slot < end; ++slot) {
                   if (listed[slot] >= 0) code_row(rows, listed[slot], rules, output, listed[slot]);
                 }
               });
}

}  // namespace narrowfloat
