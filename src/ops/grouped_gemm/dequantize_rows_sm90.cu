// Quantized activation rows to bf16 in the workspace, once per row however many experts read it:
// rows that what coded them has not left there already (moe_shared/dequantized_rows.h).
// E4M3 codes, E4M3 x UE8M0 and E2M1 x E4M3 are exact in bf16; scales of 1x128 stay out, they are
// factors of sums (moe spec 11.1).
//
// UE8M0 scales of a row that bf16 has not exactly and as normal numbers with E4M3 codes (bytes
// below 10, above 246: moe spec 11.2) are moved by a power of two, which becomes the row's factor.
//
// A thread makes 8 elements, 16 bytes. Bytes: 1.06 (0.56 for NVFP4) read and 2 written an element,
// beside 2 bytes an element and row tile that the GEMM reads.
#include <algorithm>
#include <cuda_runtime.h>

#include "base/float_ops.h"
#include "base/int_math.h"
#include "device/decode_codes.cuh"
#include "device/ptx/grid_dependency.cuh"
#include "device/reduce.cuh"
#include "device/vector_io.cuh"
#include "formats/minifloat.h"
#include "formats/ue8m0.h"
#include "ops/grouped_gemm/sm90/gemm_params.h"
#include "runtime/cuda/launch.h"

namespace narrowfloat {

namespace {

constexpr int kThreads = 128;
constexpr int kElements = 8;

// Codes 2i and 2i + 1 of eight.
__device__ uint32_t two_codes(const uint2& codes, int i) {
  return (i < 2 ? codes.x : codes.y) >> (i % 2 * 16);
}

__device__ uint8_t load_scale(const RowDecodeParams& params, int64_t row, int64_t block) {
  return params.scales[row * params.scale_row_stride + block * params.scale_block_stride];
}

// Subtracted from the bytes of a row's scales. Called by a warp.
__device__ int find_shift(const RowDecodeParams& params, int64_t row) {
  uint32_t least = kMostExactScale;
  uint32_t most = 0;
  for (int64_t block = threadIdx.x % 32; block < params.cols / 32; block += 32) {
    const uint32_t scale = load_scale(params, row, block);
    if (scale == UE8M0::kNanCode) continue;
    least = min(least, scale);
    most = max(most, scale);
  }
  least = __reduce_min_sync(kFullWarp, least);
  most = __reduce_max_sync(kFullWarp, most);
  return exact_scale_shift(static_cast<int>(least), static_cast<int>(most));
}

// Almost always 0, at the price of a look at the row's scales by the block together.
__device__ int row_shift(const RowDecodeParams& params, int64_t row) {
  bool is_outside = false;
  for (int64_t block = threadIdx.x; block < params.cols / 32; block += kThreads) {
    const int scale = load_scale(params, row, block);
    is_outside = is_outside || scale < kLeastExactScale || scale > kMostExactScale;
  }
  return __syncthreads_or(is_outside ? 1 : 0) != 0 ? find_shift(params, row) : 0;
}

__device__ uint4 decode_e4m3(const RowDecodeParams& params, int64_t row, int64_t col, int shift) {
  const auto codes = load_readonly<uint2>(params.codes + row * params.cols + col);
  uint32_t words[4];
  float scale = 1.0F;
  if (params.format == RowFormat::kMxfp8) {
    scale = mul_rn(UE8M0::decode(load_scale(params, row, col / 32)), power_of_two(-shift));
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = decode_e4m3x2(two_codes(codes, i), scale);
  return {words[0], words[1], words[2], words[3]};
}

__device__ uint4 decode_e2m1(const RowDecodeParams& params, int64_t row, int64_t col) {
  const auto codes = load_readonly<uint32_t>(params.codes + (row * params.cols + col) / 2);
  const float scale = E4M3::decode(load_scale(params, row, col / 16));
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = decode_e2m1x2(codes >> (8 * i), scale);
  return {words[0], words[1], words[2], words[3]};
}

__global__ void __launch_bounds__(kThreads)
    dequantize_rows_kernel(const __grid_constant__ RowDecodeParams params) {
  wait_for_previous_grids();
  trigger_dependent_launch();
  int64_t rows = params.rows;
  if (params.num_tiles != nullptr) {
    rows = min(rows, static_cast<int64_t>(*params.num_tiles) * params.token_tile);
  }
  const int64_t col = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kElements;
  const bool is_e2m1 =
      params.format == RowFormat::kNvfp4 || params.format == RowFormat::kNvfp4PerToken;
  for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
    const int shift = params.row_factors != nullptr ? row_shift(params, row) : 0;
    if (params.row_factors != nullptr && blockIdx.x == 0 && threadIdx.x == 0) {
      params.row_factors[row] = power_of_two(shift);
    }
    if (col >= params.cols) continue;
    store(params.output + row * params.cols + col,
          is_e2m1 ? decode_e2m1(params, row, col) : decode_e4m3(params, row, col, shift));
  }
}

}  // namespace

void launch_decode_rows(const RowDecodeParams& params, Stream stream) {
  constexpr int64_t kMaxRows = 8192;
  const auto blocks = static_cast<unsigned>(ceil_div(params.cols, kThreads * kElements));
  const auto rows = static_cast<unsigned>(std::min(params.rows, kMaxRows));
  launch(dequantize_rows_kernel, {dim3(blocks, rows), dim3(kThreads)}, stream, params);
}

}  // namespace narrowfloat
