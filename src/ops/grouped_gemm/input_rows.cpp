// See input_rows.h.
#include "ops/grouped_gemm/input_rows.h"

#include "formats/float16.h"
#include "formats/ue8m0.h"
#include "ops/grouped_gemm/decode_tables.h"
#include "ops/grouped_gemm/int8_rows.h"
#include "runtime/parallel.h"

namespace narrowfloat {
namespace {

constexpr int64_t kInputRowsTask = 16384;

template <typename Real>
void decode_codes(const GemmRows& rows, int64_t row, int64_t cols, Real* out) {
  const auto* bytes8 = static_cast<const uint8_t*>(rows.values);
  switch (rows.dtype) {
    case DType::kBF16: {
      const uint16_t* codes = static_cast<const uint16_t*>(rows.values) + row * cols;
      for (int64_t k = 0; k < cols; ++k) out[k] = bf16_to_float(codes[k]);
      return;
    }
    case DType::kF32: {
      const float* codes = static_cast<const float*>(rows.values) + row * cols;
      for (int64_t k = 0; k < cols; ++k) out[k] = codes[k];
      return;
    }
    case DType::kF8E4M3:
      for (int64_t k = 0; k < cols; ++k) out[k] = kE4M3Values<Real>[bytes8[row * cols + k]];
      return;
    default:
      for (int64_t k = 0; k < cols; k += 2) {
        const CodePair<Real>& pair = kE2M1Pairs<Real>[bytes8[(row * cols + k) / 2]];
        out[k] = pair.low;
        out[k + 1] = pair.high;
      }
  }
}

float block_scale(const GemmRows& rows, ScaleType type, int64_t row, int64_t block) {
  const int64_t index = row * rows.scale_row_stride + block * rows.scale_block_stride;
  if (type == ScaleType::kF32) return static_cast<const float*>(rows.scales)[index];
  const uint8_t code = static_cast<const uint8_t*>(rows.scales)[index];
  return type == ScaleType::kUE8M0 ? UE8M0::decode(code) : E4M3::decode(code);
}

// Doubles the codes, since the kernels do not double weights.
template <typename Real>
void round_to_int8(const GemmShape& shape, Real* values, Real* factors) {
  for (int64_t first = 0; first < shape.cols; first += kInt8BlockCols) {
    const int64_t end = std::min(first + kInt8BlockCols, shape.cols);
    const Int8Block block = int8_block(values + first, end - first);
    for (int64_t k = first; k < end; ++k) {
      values[k] = 2 * int8_code(static_cast<float>(values[k]), block);
    }
    for (int64_t k = first; k < end; k += shape.group_cols) {
      factors[k / shape.group_cols] = block.half_scale;
    }
  }
}

template <typename Real>
void mark_gathered_rows(const GemmCall& call, const InputRows<Real>& out) {
  const GemmTiles& tiles = call.tiles;
  for (int64_t row = 0; row < call.rows.count; ++row) *out.values(row) = 0;
  for (int64_t tile = 0; tile < tiles.count; ++tile) {
    for (int64_t row = tile * tiles.token_tile; row < tiles.row_ends[tile]; ++row) {
      *out.values(call.rows.row_to_token[row]) = 1;
    }
  }
}

}  // namespace

template <typename Real>
void dequantize_row(const GemmShape& shape, const GemmRows& rows, int64_t row,
                    const InputRows<Real>& out) {
  Real* values = out.values(row);
  decode_codes(rows, row, shape.cols, values);
  if (shape.mode.has_int8_rows) return round_to_int8(shape, values, out.factors(row));
  if (shape.mode.row_scale == ScaleUse::kNone) return;
  const ScaleGrid& grid = shape.input_scales;
  for (int64_t block = 0; block < grid.blocks; ++block) {
    const Real scale = block_scale(rows, grid.type, row, block);
    if (shape.mode.row_scale == ScaleUse::kGroup) {
      out.factors(row)[block] = scale;
      continue;
    }
    const int64_t end = std::min((block + 1) * grid.block_cols, shape.cols);
    for (int64_t k = block * grid.block_cols; k < end; ++k) values[k] *= scale;
  }
}

template <typename Real>
void dequantize_input_rows(const GemmShape& shape, const GemmCall& call,
                           const InputRows<Real>& out) {
  for_each_input_row<Real>(shape, call, out,
                           [&](int64_t row) { dequantize_row(shape, call.rows, row, out); });
}

template <typename Real>
void for_each_input_row(const GemmShape& shape, const GemmCall& call, const InputRows<Real>& out,
                        FunctionRef<void(int64_t row)> body) {
  const GemmTiles& tiles = call.tiles;
  const bool gathers = call.rows.row_to_token != nullptr;
  const int64_t count = gathers ? call.rows.count : tiles.count * tiles.token_tile;
  const int64_t grain = row_grain(kInputRowsTask, shape.cols);
  if (gathers && tiles.count > 0) mark_gathered_rows(call, out);
  parallel_for(tiles.count == 0 ? 0 : count, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      // Padding rows may hold anything and are skipped.
      const bool is_read =
          gathers ? *out.values(row) != 0 : row < tiles.row_ends[row / tiles.token_tile];
      if (is_read) body(row);
    }
  });
}

template void dequantize_row(const GemmShape& shape, const GemmRows& rows, int64_t row,
                             const InputRows<float>& out);
template void for_each_input_row(const GemmShape& shape, const GemmCall& call,
                                 const InputRows<float>& out, FunctionRef<void(int64_t row)> body);
template void dequantize_input_rows(const GemmShape& shape, const GemmCall& call,
                                    const InputRows<float>& out);
template void dequantize_input_rows(const GemmShape& shape, const GemmCall& call,
                                    const InputRows<double>& out);

}  // namespace narrowfloat
