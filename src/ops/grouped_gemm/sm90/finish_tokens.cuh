// As finish.cuh, for sums whose threads have four neighbouring columns of a token (token_loop.cuh).
#pragma once

#include "device/ptx/keep.cuh"
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
// Where u and g are interleaved.
struct EveryOtherColumn {
  static constexpr bool kIsFull = false;
  static constexpr int kStride = 2;
  __device__ static void store_four(const GemmParams& params, int64_t index, const float4& values) {
    store_apart(params, index, 2, {values.x, values.y});
    store_apart(params, index + 4, 2, {values.z, values.w});
  }
};

// By the threads of a warpgroup, of which `thread` is one: factors of the columns of its two
// blocks, of which `first_block` is the first.
__device__ inline void load_column_factors(const GemmParams& params, const WorkItem& item,
                                           int first_block, int thread,
                                           ColumnFactor* shared_columns) {
  const int64_t col =
      params.image_rows.source(first_block + thread / kUnitRows, thread % kUnitRows);
  if (col >= params.rows) return;
  shared_columns[thread] = ColumnFactors(params, item.expert).of(static_cast<int>(col));
}

// The output columns of a block's rows: `first`, and from one to the next 1 or, interleaved, 2.
struct BlockColumns {
  int first;
  int rows;  // In front of padding.

  __device__ BlockColumns(const ImageRows& image, int block)
      : first(static_cast<int>(image.source(block, 0))),
        rows(static_cast<int>(image.is_paired ? image.rows / 2 - block / 2 * kUnitRows
                                              : image.rows - block * kUnitRows)) {}
};

// Where the results of a warpgroup's threads go, and their factors.
struct TokenOutput {
  int64_t first_row;
  int num_rows;
  int first_block;
  const TokenFactor* shared_tokens;
  const ColumnFactor* shared_columns;
};

// sums: of two blocks of weight rows and 64 tokens each. The panels' order of rows makes 16g + 4c
// to 16g + 4c + 3 of sums 8g + 2h + {0, 4, 1, 5}.
template <class Columns, int kTokenBlocks>
__device__ inline void store_token_blocks(const GemmParams& params, const TokenOutput& output,
                                          const float (&sums)[kTokenBlocks][64]) {
  const int thread = static_cast<int>(keep_in_register(threadIdx.x)) % 128;
  const int first_token = thread / 32 * 16 + thread % 32 / 4;
  const ColumnFactor* shared_columns = output.shared_columns + thread % 4 * 4;
  const int row = thread % 4 * 4;  // Of a block; and 16, 32, 48 further.
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
      const ColumnFactor* four = shared_columns + group / 4 * kUnitRows + group_row;
      const float* own = sums[i / 2] + 8 * group + i % 2 * 2;
      Columns::store_four(
          params, first_index + block.first + group_row * Columns::kStride,
          float4{finished(own[0], factor, four[0]), finished(own[4], factor, four[1]),
                 finished(own[1], factor, four[2]), finished(own[5], factor, four[3])});
    }
  }
}

template <int kTokenBlocks>
__device__ inline void finish_token_blocks(const GemmParams& params, const TokenOutput& output,
                                           const float (&sums)[kTokenBlocks][64]) {
  const auto store_as = [&]<class Columns>() { store_token_blocks<Columns>(params, output, sums); };
  if (params.image_rows.are_interleaved()) {
    store_as.template operator()<EveryOtherColumn>();
  } else if (!params.output_is_bf16) {
    store_as.template operator()<F32Neighbours>();
  } else if (BlockColumns(params.image_rows, output.first_block + 1).rows >= kUnitRows) {
    store_as.template operator()<Bf16Neighbours<true>>();
  } else {
    store_as.template operator()<Bf16Neighbours<false>>();
  }
}

}  // namespace narrowfloat
