// As finish.cuh, for sums whose threads have four neighbouring columns of a token (token_loop.cuh).
#pragma once

#include "ops/grouped_gemm/sm90/finish.cuh"

namespace narrowfloat {

// Four neighbouring columns from `col` on.
struct FourColumns {
  ColumnFactor factors[4];

  __device__ FourColumns(const ColumnFactors& columns, int col)
      : factors{columns.of(col), columns.of(col + 1), columns.of(col + 2), columns.of(col + 3)} {}
};

__device__ inline void store_four(const GemmParams& params, int64_t index, const float4& values) {
  if (params.output_is_bf16) {
    store(static_cast<uint16_t*>(params.output) + index,
          uint2{to_bf16x2(values.x, values.y), to_bf16x2(values.z, values.w)});
  } else {
    store(static_cast<float*>(params.output) + index,
          float4{canonical_nan(values.x), canonical_nan(values.y), canonical_nan(values.z),
                 canonical_nan(values.w)});
  }
}

// sums: of two blocks of weight rows, `first_block` and the next, and 64 tokens each. The panels'
// order of rows makes 16g + 4c to 16g + 4c + 3 of sums 8g + 2h + {0, 4, 1, 5}.
template <int kTokenBlocks>
__device__ inline void finish_token_blocks(const GemmParams& params, const WorkItem& item,
                                           int first_block, const float (&sums)[kTokenBlocks][64],
                                           const TokenFactor* shared_factors) {
  const int thread = static_cast<int>(threadIdx.x) % 128;
  const int first_token = thread / 32 * 16 + thread % 32 / 4;
  const ColumnFactors columns(params, item.expert);
#pragma unroll
  for (int group = 0; group < 8; ++group) {
    const int col = first_block * kUnitRows + group * 16 + thread % 4 * 4;
    if (col >= params.rows) return;
    const FourColumns four(columns, col);
#pragma unroll
    for (int i = 0; i < 2 * kTokenBlocks; ++i) {
      const int token = i / 2 * 64 + i % 2 * 8 + first_token;
      if (token >= item.num_rows) continue;
      const TokenFactor factor = shared_factors[token];
      const float* own = sums[i / 2] + 8 * group + i % 2 * 2;
      store_four(params, (item.first_row + token) * params.rows + col,
                 float4{finished(own[0], factor, four.factors[0]),
                        finished(own[4], factor, four.factors[1]),
                        finished(own[1], factor, four.factors[2]),
                        finished(own[5], factor, four.factors[3])});
    }
  }
}

}  // namespace narrowfloat
