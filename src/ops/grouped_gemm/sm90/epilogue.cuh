// The epilogue: from a tile's sums in registers to the output, with slot weight, scales, bias and
// one rounding.
//
//   out[p, n] = (scale[e] * row_scale[r]) * (w[slot] * sum) + bias[e, n]
//
// Neighbouring rows of a thread's sums are neighbouring columns of the output unless weights are
// interleaved. Factors of a token are loaded into shared memory while the first weights arrive.
#pragma once

#include "base/float_ops.h"
#include "device/ptx/async_copy.cuh"
#include "device/ptx/convert.cuh"
#include "device/ptx/keep.cuh"
#include "device/ptx/shared_memory.cuh"
#include "device/vector_io.cuh"
#include "ops/grouped_gemm/gemm_output.h"
#include "ops/grouped_gemm/packed/packed_weights.h"
#include "ops/grouped_gemm/sm90/tile_scheduler.cuh"

namespace narrowfloat {

struct TokenFactor {
  float weight;  // Its slot's.
  float scale;   // Its row's.
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

// Loads those of up to kTokens; a warpgroup calls it, of which `thread` is one.
template <int kTokens>
__device__ inline void load_factors(const GemmParams& params, const OutputTile& tile, int thread,
                                    TokenFactor* shared_factors) {
#pragma unroll
  for (int token = thread; token < thread + kTokens; token += 128) {
    if (token < tile.num_rows) shared_factors[token] = load_factor(params, tile.first_row + token);
  }
}

// Factor and bias of an output column; absent bias is the neutral element of addition, -0.
struct ColumnFactor {
  float scale;
  float bias;
};

// Factors and biases of an expert's columns.
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

// Factors of the columns of a warpgroup's one or two n sub-tiles, in its order of weight rows. They
// arrive while it multiplies: an epilogue that loads them waits for memory, since no other tile has
// read them. The warpgroup requests them before its main loop and calls wait_for_async_copies() and
// a barrier before it reads them.
struct SharedColumns {
  float powers[2 * kSubtileRows];     // They undo the shifts of weight rows by prepare().
  uint32_t biases[2 * kSubtileRows];  // fp32, or the word that has the bf16 of an even and odd row.
  float scales[2];                    // The first is for plain or up columns, the other for gates.

  // Called by threads of the warpgroup, one for each row of its n sub-tiles.
  __device__ void request(const GemmParams& params, int expert, int first_block, int thread) {
    if (thread < 2) {
      const bool is_gate = thread == 1 && params.has_gate;
      const GemmFactor& scale = is_gate ? params.epilogue.gate_scale : params.epilogue.scale;
      copy_or_store(scales[thread], scale.values, expert, scale.value);
    }
    const int64_t row =
        params.image_rows.source(first_block + thread / kSubtileRows, thread % kSubtileRows);
    if (row >= params.rows) return;
    const int64_t index = static_cast<int64_t>(expert) * params.rows + row;
    copy_or_store(powers[thread], params.row_powers, index, 1.0F);
    request_bias(params.epilogue, index, biases[thread]);
  }

  [[nodiscard]] __device__ float bias(const GemmParams& params, int place, int row) const {
    if (params.epilogue.bias == nullptr) return -0.0F;
    const uint32_t word = biases[place];
    if (params.epilogue.bias_dtype == DType::kF32) return bits_float(word);
    return bits_float(row % 2 == 0 ? word << 16 : word & 0xFFFF0000U);
  }

 private:
  __device__ static void copy_or_store(float& shared, const float* values, int64_t index,
                                       float value) {
    if (values == nullptr) {
      shared = value;
    } else {
      copy_4(shared_address(&shared), values + index, 4);
    }
  }
  __device__ static void request_bias(const GemmEpilogue& epilogue, int64_t index,
                                      uint32_t& shared) {
    if (epilogue.bias == nullptr) return;
    if (epilogue.bias_dtype == DType::kF32) {
      copy_4(shared_address(&shared), static_cast<const float*>(epilogue.bias) + index, 4);
      return;
    }
    // An expert has an even number of rows, so `index` is as even as its row.
    const auto* halves = static_cast<const uint16_t*>(epilogue.bias);
    if (reinterpret_cast<uintptr_t>(halves) % 4 == 0) {
      copy_4(shared_address(&shared), halves + index / 2 * 2, 4);
    } else {
      shared = uint32_t{halves[index]} << (index % 2 * 16);
    }
  }
};

// The activation's parameters of an expert.
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

// The two columns of a thread of a warpgroup in an n sub-tile.
struct ThreadColumns {
  int col;
  int distance;  // To the other one.
  ColumnFactor factors[2];

  __device__ ThreadColumns(int first, const ColumnFactor& low, const ColumnFactor& high)
      : col(first), distance(1), factors{low, high} {}
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

// Stores results of one token, whose row of the output is `row`.
__device__ inline void store_columns(const GemmParams& params, int64_t row,
                                     const ThreadColumns& columns, const TokenFactor& token,
                                     float2 sums) {
  const float low = finished(sums.x, token, columns.factors[0]);
  const float high = finished(sums.y, token, columns.factors[1]);
  const int64_t index = row * params.rows + columns.col;
  columns.distance == 1 ? store_neighbours(params, index, low, high)
                        : store_apart(params, index, columns.distance, {low, high});
}

// The rest is for sums whose threads have four neighbouring columns of a token (gemm_fp8_sm90.cuh).

// Four neighbouring rows of an n sub-tile from `row` on.
struct OutputColumns {
  int first;
  int stride;  // 2 where u and g are interleaved.
  ColumnFactor factors[4];

  __device__ OutputColumns(const ColumnFactors& columns, const ImageRows& rows, int block, int row)
      : first(static_cast<int>(rows.source(block, row))),
        stride(static_cast<int>(rows.source(block, row + 1)) - first) {
    if (first >= rows.rows) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) factors[i] = columns.of(first + i * stride);
  }
};

// Ways of storing four columns, one of which a call takes: code for all of them around each of a
// thread's 32 stores would not fit the instruction cache.
template <bool kBlocksAreFull>
struct Bf16Neighbours {
  static constexpr bool kIsFull = kBlocksAreFull;
  static constexpr int kStride = 1;
  __device__ static void store_four(const GemmParams& params, int64_t index, const float4& values) {
    store(static_cast<uint16_t*>(params.output) + index,
          uint2{to_bf16x2(values.x, values.y), to_bf16x2(values.z, values.w)});
  }
};
struct F32Neighbours {
  static constexpr bool kIsFull = false;
  static constexpr int kStride = 1;
  __device__ static void store_four(const GemmParams& params, int64_t index, const float4& values) {
    store(static_cast<float*>(params.output) + index,
          float4{canonical_nan(values.x), canonical_nan(values.y), canonical_nan(values.z),
                 canonical_nan(values.w)});
  }
};
// This one stores columns where u and g are interleaved.
struct EveryOtherColumn {
  static constexpr bool kIsFull = false;
  static constexpr int kStride = 2;
  __device__ static void store_four(const GemmParams& params, int64_t index, const float4& values) {
    store_apart(params, index, 2, {values.x, values.y});
    store_apart(params, index + 4, 2, {values.z, values.w});
  }
};

// Loads factors of the columns of a warpgroup's two n sub-tiles, of which `first_block` is the
// first; the warpgroup calls it, of which `thread` is one.
__device__ inline void load_column_factors(const GemmParams& params, const OutputTile& tile,
                                           int first_block, int thread,
                                           ColumnFactor* shared_columns) {
  const int64_t col =
      params.image_rows.source(first_block + thread / kSubtileRows, thread % kSubtileRows);
  if (col >= params.rows) return;
  shared_columns[thread] = ColumnFactors(params, tile.expert).of(static_cast<int>(col));
}

// The output columns of an n sub-tile's rows: `first`, and from one to the next 1 or,
// interleaved, 2.
struct BlockColumns {
  int first;
  int rows;  // Without padding.

  __device__ BlockColumns(const ImageRows& image, int block)
      : first(static_cast<int>(image.source(block, 0))),
        rows(static_cast<int>(image.is_paired ? image.rows / 2 - block / 2 * kSubtileRows
                                              : image.rows - block * kSubtileRows)) {}
};

// It says where the results of a warpgroup's threads go, and has their factors.
struct TokenOutput {
  int64_t first_row;
  int num_rows;
  int first_block;
  const TokenFactor* shared_tokens;
  const ColumnFactor* shared_columns;
};

// sums: for two n sub-tiles and 64 tokens each. The packed order of rows makes 16g + 4c to 16g + 4c
// + 3 of sums 8g + 2h + {0, 4, 1, 5}.
template <class Columns, int kTokenBlocks>
__device__ inline void store_token_blocks(const GemmParams& params, const TokenOutput& output,
                                          const float (&sums)[kTokenBlocks][64]) {
  const int thread = static_cast<int>(keep_in_register(threadIdx.x)) % 128;
  const int first_token = thread / 32 * 16 + thread % 32 / 4;
  const ColumnFactor* shared_columns = output.shared_columns + thread % 4 * 4;
  const int row = thread % 4 * 4;  // In an n sub-tile; and 16, 32, 48 further.
  const BlockColumns blocks[2] = {BlockColumns(params.image_rows, output.first_block),
                                  BlockColumns(params.image_rows, output.first_block + 1)};
#pragma unroll
  for (int i = 0; i < 2 * kTokenBlocks; ++i) {
    const int token = first_token + i / 2 * 64 + i % 2 * 8;
    if (token >= output.num_rows) continue;
    const TokenFactor factor = output.shared_tokens[token];
    const int64_t first_index = (output.first_row + token) * params.rows + row * Columns::kStride;
#pragma unroll
    for (int group = 0; group < 8; ++group) {
      const BlockColumns& block = blocks[group / 4];
      const int group_row = group % 4 * 16;
      if (!Columns::kIsFull && row + group_row >= block.rows) continue;
      const ColumnFactor* four = shared_columns + group / 4 * kSubtileRows + group_row;
      const float* own = sums[i / 2] + 8 * group + i % 2 * 2;
      Columns::store_four(
          params, first_index + block.first + group_row * Columns::kStride,
          float4{finished(own[0], factor, four[0]), finished(own[4], factor, four[1]),
                 finished(own[1], factor, four[2]), finished(own[5], factor, four[3])});
    }
  }
}

template <int kTokenBlocks>
__device__ inline void store_token_blocks_as(const GemmParams& params, const TokenOutput& output,
                                             const float (&sums)[kTokenBlocks][64]) {
  const auto store_as = [&]<class Columns>() { store_token_blocks<Columns>(params, output, sums); };
  if (params.image_rows.are_interleaved()) {
    store_as.template operator()<EveryOtherColumn>();
  } else if (!params.output_is_bf16) {
    store_as.template operator()<F32Neighbours>();
  } else if (BlockColumns(params.image_rows, output.first_block + 1).rows >= kSubtileRows) {
    store_as.template operator()<Bf16Neighbours<true>>();
  } else {
    store_as.template operator()<Bf16Neighbours<false>>();
  }
}

}  // namespace narrowfloat
