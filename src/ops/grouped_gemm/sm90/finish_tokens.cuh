// As finish.cuh, for sums whose threads have four neighbouring columns of a token (token_loop.cuh).
#pragma once

#include "ops/grouped_gemm/sm90/finish.cuh"

namespace narrowfloat {

// Four neighbouring rows of a block from `row` on.
struct OutputColumns {
  int first;
  int stride;  // Of two where u and g are interleaved.
  ColumnFactor factors[4];

  __device__ OutputColumns(const ColumnFactors& columns, const ImageRows& rows, int block, int row)
      : first(static_cast<int>(rows.source(block, row))),
        stride(static_cast<int>(rows.source(block, row + 1)) - first) {
    if (first >= rows.rows) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) factors[i] = columns.of(first + i * stride);
  }
};

__device__ inline void store_four(const GemmParams& params, int64_t index, int stride,
                                  const float4& values) {
  if (stride != 1) {
    store_apart(params, index, stride, {values.x, values.y});
    store_apart(params, index + 2 * stride, stride, {values.z, values.w});
  } else if (params.output_is_bf16) {
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
    const OutputColumns four(columns, params.image_rows, first_block + group / 4,
                             group % 4 * 16 + thread % 4 * 4);
    if (four.first >= params.rows) continue;
#pragma unroll
    for (int i = 0; i < 2 * kTokenBlocks; ++i) {
      const int token = i / 2 * 64 + i % 2 * 8 + first_token;
      if (token >= item.num_rows) continue;
      const TokenFactor factor = shared_factors[token];
      const float* own = sums[i / 2] + 8 * group + i % 2 * 2;
      store_four(params, (item.first_row + token) * params.rows + four.first, four.stride,
                 float4{finished(own[0], factor, four.factors[0]),
                        finished(own[4], factor, four.factors[1]),
                        finished(own[1], factor, four.factors[2]),
                        finished(own[5], factor, four.factors[3])});
    }
  }
}

}  // namespace narrowfloat
