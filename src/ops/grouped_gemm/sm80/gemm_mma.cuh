// The portable grouped GEMM: a CTA multiplies up to kTokens rows of a tile with 128 weight rows, a
// warp with 16 of them.
//
//   rows, bf16:  global -> shared memory, two stages of 128 columns (cp.async)
//   weights:     global -> registers of the lanes that decode them, a chunk ahead
//   sums:        per block of 32 columns where UE8M0 scales are their factors, else per chunk where
//                rows have scales of 1x128, else of all columns; fp32
//
// Both operands have the order of columns of mma_image.h: a lane reads 16 bytes of a token a block.
// Rows in shared memory are 64 bytes further than their length apart, so that eight lanes read all
// banks.
#pragma once

#include "device/ptx/async_copy.cuh"
#include "device/ptx/grid_dependency.cuh"
#include "device/ptx/mma.cuh"
#include "device/ptx/shared_memory.cuh"
#include "ops/grouped_gemm/sm80/gemm_mma.h"
#include "ops/grouped_gemm/sm80/mma_weights.cuh"
#include "ops/grouped_gemm/sm90/finish.cuh"
#include "runtime/cuda/launch.h"

namespace narrowfloat {

inline constexpr int kMmaWarps = 8;
inline constexpr int kMmaThreads = 32 * kMmaWarps;

template <MmaCoding kCodingOf, bool kGroups, int kRows>
struct MmaConfig {
  static constexpr MmaCoding kCoding = kCodingOf;
  static constexpr bool kHasGroups = kGroups;  // Rows have scales of 1x128.
  static constexpr int kTokens = kRows;
  static constexpr int kCtasPerSm = kRows <= 16 ? 2 : 0;  // At least; 0: what the compiler finds.
  static constexpr bool kHasBlockFactors =
      kCoding == MmaCoding::kMxfp8 || kCoding == MmaCoding::kMxfp4;
};

inline constexpr int kMmaRowBytes = 2 * kMmaChunkCols + 64;

template <int kTokens>
struct MmaShared {
  alignas(16) uint8_t rows[2][kTokens][kMmaRowBytes];
  float scales[2][kTokens];
  int64_t sources[kTokens];  // Rows of the input; -1: none.
};

// The rows of a tile that a CTA takes.
struct MmaTile {
  int expert = 0;
  int64_t first_row = 0;
  int num_rows = 0;  // 0: nothing to do.

  template <int kTokens>
  __device__ static MmaTile of(const GemmParams& params) {
    const int tile = static_cast<int>(blockIdx.x) / params.splits;
    if (tile >= min(*params.num_tiles, params.max_tiles)) return {};
    const int64_t first = int64_t{tile} * params.token_tile;
    MmaTile result{.expert = params.tile_experts[tile],
                   .first_row = first + static_cast<int>(blockIdx.x) % params.splits * kTokens};
    const int64_t end =
        min(min(int64_t{params.row_ends[tile]}, first + params.token_tile), params.row_limit);
    if (result.expert < 0 || result.expert >= params.experts) return {};
    result.num_rows =
        static_cast<int>(max(int64_t{0}, min(int64_t{kTokens}, end - result.first_row)));
    return result;
  }
};

template <int kTokens>
class MmaRows {
 public:
  __device__ MmaRows(const GemmParams& params, const MmaTile& tile, MmaShared<kTokens>& shared)
      : params_(params), shared_(shared) {
    for (int i = static_cast<int>(threadIdx.x); i < kTokens; i += kMmaThreads) {
      int64_t source = -1;
      if (i < tile.num_rows) {
        const int64_t row = tile.first_row + i;
        source = params.row_to_token == nullptr ? row : params.row_to_token[row];
        if (source < 0 || source >= params.input_rows) source = -1;
      }
      shared.sources[i] = source;
    }
    __syncthreads();
  }

  // Starts the copy of a chunk; zeros where there is no row or column.
  __device__ void copy(int chunk, bool has_scales) const {
    constexpr int kPieces = 2 * kMmaChunkCols / 16;  // A row has so many.
    for (int i = static_cast<int>(threadIdx.x); i < kTokens * kPieces; i += kMmaThreads) {
      const int token = i / kPieces;
      const int col = chunk * kMmaChunkCols + i % kPieces * 8;
      const int64_t source = shared_.sources[token];
      const bool is_there = source >= 0 && col < params_.cols;
      const uint8_t* from = is_there
                                ? params_.values + source * params_.row_bytes + 2 * int64_t{col}
                                : params_.values;
      copy_16(shared_address(&shared_.rows[chunk % 2][token][i % kPieces * 16]), from,
              is_there ? 16 : 0);
    }
    if (!has_scales) return;
    for (int i = static_cast<int>(threadIdx.x); i < kTokens; i += kMmaThreads) {
      const int64_t source = shared_.sources[i];
      const int64_t at = source * params_.group_row_stride + chunk * params_.group_stride;
      copy_4(shared_address(&shared_.scales[chunk % 2][i]),
             params_.group_scales + max(at, int64_t{0}), source >= 0 ? 4 : 0);
    }
  }

 private:
  const GemmParams& params_;
  MmaShared<kTokens>& shared_;
};

// The sums of a warp: of 8 tokens each, as multiply_add_bf16() has them.
template <class Config>
struct MmaSums {
  static constexpr int kTiles = Config::kTokens / 8;
  using Shared = MmaShared<Config::kTokens>;

  float sums[kTiles][4] = {};
  float totals[Config::kHasGroups ? kTiles : 1][4] = {};

  // Adds a chunk of 128 columns.
  __device__ void add(const MmaWeights<Config::kCoding>& weights, const Shared& shared, int stage,
                      int lane) {
    const uint32_t rows =
        shared_address(shared.rows[stage][lane / 4]) + static_cast<uint32_t>(lane % 4) * 16;
#pragma unroll
    for (int block = 0; block < kMmaChunkCols / 32; ++block) {
      uint32_t a[2][4];
      weights.decode(block, lane, a);
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        const uint4 b =
            load_shared_16(rows + static_cast<uint32_t>(i * 8 * kMmaRowBytes + block * 64));
        if constexpr (Config::kHasBlockFactors) {
          float inner[4] = {};
          multiply_add_bf16(inner, a[0], b.x, b.y);
          multiply_add_bf16(inner, a[1], b.z, b.w);
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            sums[i][k] = __fmaf_rn(weights.factor(k / 2, block), inner[k], sums[i][k]);
          }
        } else {
          multiply_add_bf16(sums[i], a[0], b.x, b.y);
          multiply_add_bf16(sums[i], a[1], b.z, b.w);
        }
      }
    }
    if constexpr (Config::kHasGroups) add_to_totals(weights, shared.scales[stage], lane);
  }

  [[nodiscard]] __device__ float result(int tile, int index) const {
    if constexpr (Config::kHasGroups) return totals[tile][index];
    return sums[tile][index];
  }

 private:
  __device__ void add_to_totals(const MmaWeights<Config::kCoding>& weights,
                                const float* shared_scales, int lane) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        float factor = shared_scales[8 * i + lane % 4 * 2 + k % 2];
        if constexpr (Config::kCoding == MmaCoding::kE4m3Scaled) {
          factor = __fmul_rn(factor, weights.factor(k / 2, 0));
        }
        totals[i][k] = __fmaf_rn(factor, sums[i][k], totals[i][k]);
        sums[i][k] = 0.0F;
      }
    }
  }
};

template <class Config>
__device__ void store_mma_sums(const GemmParams& params, const MmaTile& tile, int strip,
                               const MmaSums<Config>& sums) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int col = strip * kMmaStripRows + lane / 4 * 2;
  const ColumnFactors columns(params, tile.expert);
  const ColumnFactor low = columns.of(col);
  const ColumnFactor high = columns.of(col + 1);
#pragma unroll
  for (int i = 0; i < MmaSums<Config>::kTiles; ++i) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int token = 8 * i + lane % 4 * 2 + k;
      if (token >= tile.num_rows) continue;
      const int64_t row = tile.first_row + token;
      const TokenFactor factor = load_factor(params, row);
      store_neighbours(params, row * params.rows + col, finished(sums.result(i, k), factor, low),
                       finished(sums.result(i, k + 2), factor, high));
    }
  }
}

template <class Config>
__global__ void __launch_bounds__(kMmaThreads, Config::kCtasPerSm)
    multiply_tiles_kernel(const __grid_constant__ GemmParams params) {
  NF_DYNAMIC_SHARED(uint8_t, shared_bytes, 16);
  auto& shared = *reinterpret_cast<MmaShared<Config::kTokens>*>(shared_bytes);
  wait_for_previous_grids();
  trigger_dependent_launch();
  const MmaTile tile = MmaTile::of<Config::kTokens>(params);
  if (tile.num_rows == 0) return;
  const MmaRows<Config::kTokens> rows(params, tile, shared);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int strip = static_cast<int>(blockIdx.y * kMmaWarps + threadIdx.x / 32);
  const bool has_strip = strip < params.blocks;
  const uint8_t* chunk = params.image + tile.expert * params.expert_bytes +
                         (has_strip ? strip : 0) * params.block_bytes;
  constexpr int kChunkBytes = mma_chunk_bytes(Config::kCoding);
  MmaWeights<Config::kCoding> weights;
  MmaWeights<Config::kCoding> next;
  MmaSums<Config> sums;
  rows.copy(0, Config::kHasGroups);
  next.load(chunk, lane);
#pragma unroll 1
  for (int i = 0; i < params.units; ++i) {
    wait_for_async_copies();
    // The chunk is there, and nobody reads the other stage any more.
    __syncthreads();
    weights = next;
    if (i + 1 < params.units) {
      rows.copy(i + 1, Config::kHasGroups);
      chunk += kChunkBytes;
      next.load(chunk, lane);
    }
    sums.add(weights, shared, i % 2, lane);
  }
  if (has_strip) store_mma_sums(params, tile, strip, sums);
}

template <class Config>
void launch_multiply_tiles(const GemmParams& params, Stream stream) {
  const auto ctas = static_cast<unsigned>(params.max_tiles) * static_cast<unsigned>(params.splits);
  const auto strips = static_cast<unsigned>(ceil_div(params.blocks, kMmaWarps));
  constexpr size_t kSharedBytes = sizeof(MmaShared<Config::kTokens>);
  static_assert(kSharedBytes <= 48 * 1024);
  launch(multiply_tiles_kernel<Config>, {dim3(ctas, strips), dim3(kMmaThreads), kSharedBytes},
         stream, params);
}

// `tokens` chooses between tiles of few rows and of many.
template <MmaCoding kCoding, bool kHasGroups>
void launch_mma(const GemmParams& params, int tokens, Stream stream) {
  if (tokens == kFewMmaTokens) {
    return launch_multiply_tiles<MmaConfig<kCoding, kHasGroups, kFewMmaTokens>>(params, stream);
  }
  launch_multiply_tiles<MmaConfig<kCoding, kHasGroups, kManyMmaTokens>>(params, stream);
}

}  // namespace narrowfloat
