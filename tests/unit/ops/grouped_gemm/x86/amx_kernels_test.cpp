// The kernels for matrix tiles, with tiles in plain memory.
#include "unit/ops/grouped_gemm/x86/plain_tiles.h"

namespace narrowfloat {
namespace {

// Small integers, whose sums are exact.
ChunkData integers_of(const ChunkShape& shape) {
  Numbers numbers;
  ChunkData data;
  data.values = in_bf16(numbers.integers(shape.rows * shape.cols, -9, 9));
  for (int64_t strip = 0; strip < shape.strips; ++strip) {
    data.weights.push_back(in_bf16(numbers.integers(shape.cols * 16, -6, 6)));
    if (shape.block_cols != 0) {
      data.factors.push_back(numbers.integers(shape.blocks() * 16, 1, 4));
    }
  }
  if (shape.blocks_per_row_scale != 0) {
    const int64_t scales = ceil_div(shape.blocks(), shape.blocks_per_row_scale);
    data.row_scales = numbers.integers(shape.rows * scales, 1, 2);
  }
  data.sums = numbers.integers(shape.rows * shape.strips * 16, -100, 100);
  return data;
}

// The sums after the products were added to them.
std::vector<float> exact_sums(const ChunkShape& shape, const ChunkData& data) {
  std::vector<float> sums = data.sums;
  for (int64_t i = 0; i < shape.rows * shape.strips * 16; ++i) {
    const int64_t row = i / (shape.strips * 16);
    const size_t strip = to_index(i / 16 % shape.strips);
    for (int64_t k = 0; k < shape.cols; ++k) {
      const int64_t block = shape.block_cols == 0 ? 0 : k / shape.block_cols;
      float factor =
          data.factors.empty() ? 1.0F : data.factors[strip][to_index(block * 16 + i % 16)];
      if (!data.row_scales.empty()) {
        const int64_t scales = ceil_div(shape.blocks(), shape.blocks_per_row_scale);
        factor *= data.row_scales[to_index(row * scales + block / shape.blocks_per_row_scale)];
      }
      sums[to_index(i)] += bf16_to_float(data.values[to_index(row * shape.cols + k)]) *
                           bf16_to_float(data.weights[strip][to_index(k * 16 + i % 16)]) * factor;
    }
  }
  return sums;
}

TEST(TileKernels, AddTheProductsOfEveryRowAndBlock) {
  for (const int64_t strips : {1, 2}) {
    for (const int64_t rows : {1, 15, 16, 17, 33, 97, 128}) {
      for (const ChunkShape& shape : {ChunkShape{strips, 256, 0, 0, rows},       // scaled weights
                                      ChunkShape{strips, 80, 0, 0, rows},        // half a run
                                      ChunkShape{strips, 64, 32, 1, rows},       // MXFP4 x MXFP8
                                      ChunkShape{strips, 256, 32, 0, rows},      // unscaled weights
                                      ChunkShape{strips, 256, 32, 4, rows},      // and FP8 1x128
                                      ChunkShape{strips, 256, 128, 1, rows},     // FP8 1x128
                                      ChunkShape{strips, 144, 128, 1, rows}}) {  // a short block
        ChunkData data = integers_of(shape);
        const std::vector<float> expected = exact_sums(shape, data);
        multiply_plainly(shape, data);
        ASSERT_EQ(data.sums, expected) << strips << " strips, " << rows << " rows, " << shape.cols
                                       << " columns, blocks of " << shape.block_cols;
      }
    }
  }
}

}  // namespace
}  // namespace narrowfloat
