// From a tile's sums in registers to the output: slot weight, scales, bias, one rounding.
//
//   out[p, n] = (scale[e] * row_scale[r]) * (w[slot] * sum) + bias[e, n]
//
// The columns of one thread are neighbours unless weights are interleaved. Factors of a token are
// loaded into shared memory while the first weights arrive.
#pragma once

#include "base/float_ops.h"
#include "device/ptx/convert.cuh"
#include "device/vector_io.cuh"
#include "ops/grouped_gemm/gemm_output.h"
#include "ops/grouped_gemm/sm90/weight_units.h"
#include "ops/grouped_gemm/sm90/work_list.cuh"

namespace narrowfloat {

struct TokenFactor {
  float weight;  // Of its slot.
  float scale;   // Of its row.
};

__device__ inline TokenFactor load_factor(const GemmParams& params, int64_t row) {
  TokenFactor factor{1.0F, 1.0F};
  if (params.epilogue.slot_weights != nullptr) {
    const int slot = params.epilogue.row_to_slot[row];
    if (slot >= 0 && slot < params.epilogue.num_slots)
      factor.weight = params.epilogue.slot_weights[slot];
  }
  if (params.row_scale != nullptr) {
    const int64_t source = params.row_to_token == nullptr ? row : params.row_to_token[row];
    if (source >= 0 && source < params.input_rows) factor.scale = params.row_scale[source];
  }
  return factor;
}

// Of up to kTokens, by the threads of a warpgroup, of which `thread` is one.
template <int kTokens>
__device__ inline void load_factors(const GemmParams& params, const WorkItem& item, int thread,
                                    TokenFactor* shared_factors) {
#pragma unroll
  for (int token = thread; token < thread + kTokens; token += 128) {
    if (token < item.num_rows) shared_factors[token] = load_factor(params, item.first_row + token);
  }
}

// Factor and bias of an output column; absent bias is the neutral element of addition, -0.
struct ColumnFactor {
  float scale;
  float bias;
};

// Those of an expert.
class ColumnFactors {
 public:
  __device__ ColumnFactors(const GemmParams& params, int expert)
      : params_(params),
        expert_(expert),
        scale_(params.epilogue.scale.of(expert)),
        gate_scale_(params.has_gate ? params.epilogue.gate_scale.of(expert) : scale_) {}

  [[nodiscard]] __device__ ColumnFactor of(int col) const {
    const bool is_gate = params_.has_gate && is_gate_row(params_.gate_order, col, params_.rows);
    return {scale(is_gate), bias_of(col)};
  }
  [[nodiscard]] __device__ float scale(bool is_gate) const {
    return is_gate ? gate_scale_ : scale_;
  }
  [[nodiscard]] __device__ float bias_of(int col) const {
    const GemmEpilogue& epilogue = params_.epilogue;
    if (epilogue.bias == nullptr) return -0.0F;
    const int64_t index = static_cast<int64_t>(expert_) * params_.rows + col;
    if (epilogue.bias_dtype == DType::kF32) return static_cast<const float*>(epilogue.bias)[index];
    const uint32_t bits = static_cast<const uint16_t*>(epilogue.bias)[index];
    return bits_float(bits << 16);
  }

 private:
  const GemmParams& params_;
  int expert_;
  float scale_;
  float gate_scale_;
};

// The activation's, of an expert.
struct SwigluParameters {
  float alpha;
  float beta;
  float limit_gate;
  float limit_up;

  __device__ SwigluParameters(const FusedActivation& activation, int expert)
      : alpha(activation.alpha.of(expert)),
        beta(activation.beta.of(expert)),
        limit_gate(activation.limit_gate.of(expert)),
        limit_up(activation.limit_up.of(expert)) {}
};

__device__ inline float finished(float sum, const TokenFactor& token, const ColumnFactor& column) {
  const float weighted = mul_rn(token.weight, sum);
  return add_rn(mul_rn(mul_rn(column.scale, token.scale), weighted), column.bias);
}

__device__ inline void store_neighbours(const GemmParams& params, int64_t index, float low,
                                        float high) {
  if (params.output_is_bf16) {
    store(static_cast<uint16_t*>(params.output) + index, to_bf16x2(low, high));
  } else {
    store(static_cast<float*>(params.output) + index,
          float2{canonical_nan(low), canonical_nan(high)});
  }
}

__device__ inline void store_apart(const GemmParams& params, int64_t index, int distance,
                                   float2 values) {
  if (params.output_is_bf16) {
    const uint32_t words = to_bf16x2(values.x, values.y);
    store(static_cast<uint16_t*>(params.output) + index, static_cast<uint16_t>(words));
    store(static_cast<uint16_t*>(params.output) + index + distance,
          static_cast<uint16_t>(words >> 16));
  } else {
    store(static_cast<float*>(params.output) + index, canonical_nan(values.x));
    store(static_cast<float*>(params.output) + index + distance, canonical_nan(values.y));
  }
}

// The two columns of a thread of a warpgroup in a block of 64 weight rows.
struct ThreadColumns {
  int col;
  int distance;  // To the other one.
  ColumnFactor factors[2];

  __device__ ThreadColumns(const GemmParams& params, int expert, int block, int thread) {
    const int row = thread / 32 * 16 + thread % 32 / 4 * 2;
    col = static_cast<int>(params.image_rows.source(block, row));
    distance = static_cast<int>(params.image_rows.source(block, row + 1)) - col;
    if (col >= params.rows) return;
    const ColumnFactors all(params, expert);
    factors[0] = all.of(col);
    factors[1] = all.of(col + distance);
  }
};

// Results of one token, whose row of the output is `row`.
__device__ inline void store_columns(const GemmParams& params, int64_t row,
                                     const ThreadColumns& columns, const TokenFactor& token,
                                     float2 sums) {
  const float low = finished(sums.x, token, columns.factors[0]);
  const float high = finished(sums.y, token, columns.factors[1]);
  const int64_t index = row * params.rows + columns.col;
  columns.distance == 1 ? store_neighbours(params, index, low, high)
                        : store_apart(params, index, columns.distance, {low, high});
}

}  // namespace narrowfloat
