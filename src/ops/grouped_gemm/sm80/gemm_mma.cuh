// The portable grouped GEMM: a CTA multiplies up to kTokens rows of a tile with 64 or 128 weight
// rows, a warp up to 64 of them with 16 or 32.
//
//   rows, bf16, and weights:  global -> shared memory, kStages chunks of 128 columns (cp.async)
//   operands:                 shared memory -> registers, where weights are decoded
//   sums:                     per block of 32 columns where UE8M0 scales are their factors, else
//                             per chunk where rows have scales of 1x128, else of all columns; fp32
//
// Both operands have the order of columns of mma_image.h: a lane reads 16 bytes of a token a block.
// A token has 256 bytes of a stage; those of odd tokens have their halves of 128 bytes swapped in
// pieces of 64, so that eight lanes read all banks. The order of additions is the same in every
// tile, and so are the bits of a row.
#pragma once

#include <algorithm>

#include "device/ptx/async_copy.cuh"
#include "device/ptx/grid_dependency.cuh"
#include "device/ptx/mma.cuh"
#include "device/swiglu.cuh"
#include "ops/grouped_gemm/sm80/gemm_mma.h"
#include "ops/grouped_gemm/sm80/mma_weights.cuh"
#include "ops/grouped_gemm/sm90/epilogue.cuh"
#include "runtime/cuda/launch.h"
#include "runtime/cuda/shared_memory_opt_in.h"

namespace narrowfloat {

template <MmaCoding kCodingOf, bool kGroups, int kRows>
struct MmaConfig {
  static constexpr MmaCoding kCoding = kCodingOf;
  static constexpr bool kHasGroups = kGroups;  // Rows have scales of 1x128.
  static constexpr bool kHasBlockFactors = kCoding == MmaCoding::kMxfp8;
  static constexpr int kTokens = kRows;

  // A warp has kWarpTokens and kStrips of 16 weight rows. Sums of chunks take registers.
  static constexpr int kStrips = kRows < 64 ? 1 : 2;
  static constexpr int kWarpTokens = std::min(kRows, kGroups ? 32 : 64);
  static constexpr int kTokenWarps = kRows / kWarpTokens;
  static constexpr int kRowWarps = kGroups && kRows == 64 ? 2 : 4;
  static constexpr int kThreads = 32 * kTokenWarps * kRowWarps;
  static constexpr int kCtaStrips = kRowWarps * kStrips;
  // At least. As Hopper's own code, which seldom runs, spills registers otherwise.
  static constexpr int kManyCtas = kHasHopperInstructions ? 2 : 3;
  static constexpr int kCtasPerSm = kRows <= 16 ? 5 : kRows == 32 ? 4 : kManyCtas;

  // A stage: rows, strips of weights, scales of rows.
  static constexpr int kRowBytes = 2 * kMmaChunkCols;
  static constexpr int kWeightsAt = kTokens * kRowBytes;
  static constexpr int kScalesAt = kWeightsAt + kCtaStrips * mma_chunk_bytes(kCoding);
  static constexpr int kStageBytes = kScalesAt + (kGroups ? 4 * kTokens : 0);
  // As many as leave room for several CTAs.
  static constexpr int kStages =
      std::clamp(44 * 1024 / kStageBytes, mma_code_bits(kCoding) == 16 && kRows <= 16 ? 3 : 2, 6);
  static constexpr int kSourcesAt = kStages * kStageBytes;
  static constexpr int kSharedBytes = kSourcesAt + 8 * kTokens;
  static_assert(kSharedBytes <= kMmaSharedBytes);
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

// Copies of chunks into stages, by all threads of the CTA.
template <class Config>
class MmaCopies {
 public:
  // Writes the rows of the input to shared memory; the CTA must meet before the first copy().
  __device__ MmaCopies(const GemmParams& params, const MmaTile& tile, uint8_t* shared)
      : params_(params),
        shared_(shared_address(shared)),
        sources_(reinterpret_cast<int64_t*>(shared + Config::kSourcesAt)),
        weights_(params.image + tile.expert * params.expert_bytes) {
    for (int i = thread(); i < Config::kTokens; i += Config::kThreads) {
      int64_t source = -1;
      if (i < tile.num_rows) {
        const int64_t row = tile.first_row + i;
        source = params.row_to_token == nullptr ? row : params.row_to_token[row];
        if (source < 0 || source >= params.input_rows) source = -1;
      }
      sources_[i] = source;
    }
  }

  // Starts the copy of a chunk.
  __device__ void copy(int chunk, int stage) const {
    const uint32_t to = shared_ + static_cast<uint32_t>(stage * Config::kStageBytes);
    copy_weights(chunk, to + Config::kWeightsAt);
    copy_rows(chunk, to);
    if constexpr (Config::kHasGroups) copy_scales(chunk, to + Config::kScalesAt);
  }

 private:
  __device__ static int thread() { return static_cast<int>(threadIdx.x); }

  // A warp copies whole strips. Beyond the last one it reads that one again.
  __device__ void copy_weights(int chunk, uint32_t to) const {
    constexpr int kChunkBytes = mma_chunk_bytes(Config::kCoding);
    constexpr int kWarpStrips = Config::kStrips / Config::kTokenWarps;
    static_assert(kWarpStrips * Config::kTokenWarps == Config::kStrips);
#pragma unroll
    for (int i = 0; i < kWarpStrips; ++i) {
      const int own = thread() / 32 * kWarpStrips + i;
      const int strip =
          min(static_cast<int>(blockIdx.y) * Config::kCtaStrips + own, params_.blocks - 1);
      const uint8_t* from = weights_ + strip * params_.block_bytes + int64_t{chunk} * kChunkBytes;
#pragma unroll
      for (int at = 0; at < kChunkBytes; at += 512) {
        const int byte = at + thread() % 32 * 16;
        if (byte < kChunkBytes) {
          copy_16(to + static_cast<uint32_t>(own * kChunkBytes + byte), from + byte);
        }
      }
    }
  }

  // Zeros where there is no row or column.
  __device__ void copy_rows(int chunk, uint32_t to) const {
    constexpr int kPieces = Config::kRowBytes / 16;
    constexpr int kTokensAtOnce = Config::kThreads / kPieces;
    static_assert(kTokensAtOnce % 2 == 0 && Config::kTokens % kTokensAtOnce == 0);
    const int piece = thread() % kPieces;
    const int first = thread() / kPieces;
    const int col = chunk * kMmaChunkCols + piece * 8;
    const uint32_t place = static_cast<uint32_t>(piece ^ first % 2 * 4) * 16;
#pragma unroll(Config::kTokens < 64 ? 4 : 1)
    for (int token = first; token < Config::kTokens; token += kTokensAtOnce) {
      const int64_t source = sources_[token];
      const bool is_there = source >= 0 && col < params_.cols;
      const uint8_t* from = is_there
                                ? params_.values + source * params_.row_bytes + 2 * int64_t{col}
                                : params_.values;
      copy_16(to + static_cast<uint32_t>(token * Config::kRowBytes) + place, from,
              is_there ? 16 : 0);
    }
  }

  __device__ void copy_scales(int chunk, uint32_t to) const {
    for (int i = thread(); i < Config::kTokens; i += Config::kThreads) {
      const int64_t source = sources_[i];
      const int64_t at = source * params_.group_row_stride + chunk * params_.group_stride;
      copy_4(to + static_cast<uint32_t>(4 * i), params_.group_scales + max(at, int64_t{0}),
             source >= 0 ? 4 : 0);
    }
  }

  const GemmParams& params_;
  uint32_t shared_;
  int64_t* sources_;  // -1: no row.
  const uint8_t* weights_;
};

// The place of a warp in its CTA, and of a lane in its warp.
template <class Config>
struct MmaPlace {
  int lane = static_cast<int>(threadIdx.x) % 32;
  int first_token = static_cast<int>(threadIdx.x) / 32 / Config::kRowWarps * Config::kWarpTokens;
  int first_strip = static_cast<int>(threadIdx.x) / 32 % Config::kRowWarps * Config::kStrips;
};

// The sums of a warp: of 8 tokens each, as multiply_add_bf16() has them.
template <class Config>
struct MmaSums {
  static constexpr int kTiles = Config::kWarpTokens / 8;
  static constexpr int kStrips = Config::kStrips;
  using Weights = MmaWeights<Config::kCoding>;

  float sums[kTiles][kStrips][4] = {};
  float totals[Config::kHasGroups ? kTiles : 1][kStrips][4] = {};

  // Adds the chunk of 128 columns of a stage, for the first `num_rows` tokens at least.
  __device__ void add(uint32_t stage, const MmaPlace<Config>& place, int num_rows) {
    if constexpr (kTiles == 8) {
      if (num_rows <= 32) return add_tiles<4>(stage, place);
    }
    add_tiles<kTiles>(stage, place);
  }

  [[nodiscard]] __device__ float result(int tile, int strip, int index) const {
    float sum = 0.0F;
    if constexpr (Config::kHasGroups) {
      sum = totals[tile][strip][index];
    } else {
      sum = sums[tile][strip][index];
    }
    if constexpr (Weights::kSumFactor == 1.0F) return sum;
    return __fmul_rn(sum, Weights::kSumFactor);
  }

 private:
  template <int kUsed>
  __device__ void add_tiles(uint32_t stage, const MmaPlace<Config>& place) {
    constexpr int kChunkBytes = mma_chunk_bytes(Config::kCoding);
    const uint32_t strips =
        stage + Config::kWeightsAt + static_cast<uint32_t>(place.first_strip * kChunkBytes);
    if constexpr (kStrips == 1) {
      Weights weights[1] = {{strips, place.lane}};
      add_tiles<kUsed>(weights, stage, place);
    } else {
      Weights weights[2] = {{strips, place.lane}, {strips + kChunkBytes, place.lane}};
      add_tiles<kUsed>(weights, stage, place);
    }
  }

  template <int kUsed>
  __device__ void add_tiles(Weights (&weights)[kStrips], uint32_t stage,
                            const MmaPlace<Config>& place) {
    const int token = place.first_token + place.lane / 4;
    const uint32_t rows = stage + static_cast<uint32_t>(token * Config::kRowBytes) +
                          static_cast<uint32_t>(place.lane % 4) * 16;
    // Even blocks of 32 columns begin at the first, odd ones at the second.
    const uint32_t starts[2] = {rows + static_cast<uint32_t>(token % 2) * 64,
                                rows + static_cast<uint32_t>(1 - token % 2) * 64};
#pragma unroll(Config::kHasBlockFactors ? 1 : 4)
    for (int block = 0; block < kMmaChunkCols / 32; ++block) {
      uint32_t a[kStrips][2][4];
#pragma unroll
      for (int strip = 0; strip < kStrips; ++strip) weights[strip].decode(block, a[strip]);
#pragma unroll
      for (int i = 0; i < kUsed; ++i) {
        const uint4 b = load_shared_16(
            starts[block % 2] + static_cast<uint32_t>(i * 8 * Config::kRowBytes + block / 2 * 128));
#pragma unroll
        for (int strip = 0; strip < kStrips; ++strip) {
          add_block(weights[strip], block, a[strip], b, sums[i][strip]);
        }
      }
    }
    if constexpr (Config::kHasGroups) {
      add_to_totals<kUsed>(weights, stage + Config::kScalesAt, place);
    }
  }

  __device__ static void add_block(const Weights& weights, int block, const uint32_t (&a)[2][4],
                                   const uint4& b, float (&to)[4]) {
    if constexpr (Config::kHasBlockFactors) {
      float inner[4] = {};
      multiply_add_bf16(inner, a[0], b.x, b.y);
      multiply_add_bf16(inner, a[1], b.z, b.w);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        to[k] = __fmaf_rn(weights.factor(k / 2, block), inner[k], to[k]);
      }
    } else {
      multiply_add_bf16(to, a[0], b.x, b.y);
      multiply_add_bf16(to, a[1], b.z, b.w);
    }
  }

  template <int kUsed>
  __device__ void add_to_totals(const Weights (&weights)[kStrips], uint32_t scales,
                                const MmaPlace<Config>& place) {
    const uint32_t own =
        scales + static_cast<uint32_t>(4 * (place.first_token + place.lane % 4 * 2));
#pragma unroll
    for (int i = 0; i < kUsed; ++i) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const float scale = bits_float(load_shared(own + static_cast<uint32_t>(4 * (8 * i + k))));
#pragma unroll
        for (int at = 0; at < 2 * kStrips; ++at) {
          const int strip = at / 2;
          const int row = at % 2;
          float factor = scale;
          if constexpr (Config::kCoding == MmaCoding::kE4m3Scaled) {
            factor = __fmul_rn(factor, weights[strip].factor(row, 0));
          }
          float& sum = sums[i][strip][2 * row + k];
          float& total = totals[i][strip][2 * row + k];
          total = __fmaf_rn(factor, sum, total);
          sum = 0.0F;
        }
      }
    }
  }
};

// Stores the results of a warp: sums, or of neighbours u and g the activation.
template <class Config>
class MmaResults {
 public:
  __device__ MmaResults(const GemmParams& params, const MmaTile& tile,
                        const MmaPlace<Config>& place)
      : params_(params), tile_(tile), place_(place) {}

  __device__ void store(const MmaSums<Config>& sums) const {
    const ColumnFactors columns(params_, tile_.expert);
#pragma unroll
    for (int strip = 0; strip < Config::kStrips; ++strip) {
      const int index =
          static_cast<int>(blockIdx.y) * Config::kCtaStrips + place_.first_strip + strip;
      if (index >= params_.blocks) return;
      const int row = index * kMmaStripRows + place_.lane / 4 * 2;
      const int low_col = static_cast<int>(mma_source_row(params_.image_rows, row));
      const int high_col = static_cast<int>(mma_source_row(params_.image_rows, row + 1));
      const ColumnFactor low = columns.of(low_col);
      const ColumnFactor high = columns.of(high_col);
      for_tokens([&](int64_t to, int tile, int k) {
        const TokenFactor factor = load_factor(params_, to);
        const float2 values = {finished(sums.result(tile, strip, k), factor, low),
                               finished(sums.result(tile, strip, k + 2), factor, high)};
        if (params_.activation.is_there) return store_activated(to, row / 2, values);
        const int64_t at = to * params_.rows + low_col;
        params_.image_rows.is_paired ? store_apart(params_, at, high_col - low_col, values)
                                     : store_neighbours(params_, at, values.x, values.y);
      });
    }
  }

 private:
  // Calls store(row, tile, k) for the lane's tokens, whose sums are k and k + 2 of a tile.
  template <class Store>
  __device__ void for_tokens(Store&& store) const {
#pragma unroll
    for (int i = 0; i < MmaSums<Config>::kTiles; ++i) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int token = place_.first_token + 8 * i + place_.lane % 4 * 2 + k;
        if (token < tile_.num_rows) store(tile_.first_row + token, i, k);
      }
    }
  }

  __device__ void store_activated(int64_t row, int col, float2 values) const {
    const FusedActivation& activation = params_.activation;
    const SwigluParameters parameters(activation, tile_.expert);
    const uint32_t h = to_bf16x2(fast_swiglu(values.x, values.y, parameters), 0.0F);
    narrowfloat::store(activation.values + row * activation.row_bytes + int64_t{2} * col,
                       static_cast<uint16_t>(h));
  }

  const GemmParams& params_;
  const MmaTile& tile_;
  const MmaPlace<Config>& place_;
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kCtasPerSm)
    multiply_tiles_kernel(const __grid_constant__ GemmParams params) {
  NF_DYNAMIC_SHARED(uint8_t, shared, 16);
  wait_for_previous_grids();
  trigger_dependent_launch();
  const MmaTile tile = MmaTile::of<Config::kTokens>(params);
  if (tile.num_rows == 0) return;
  const MmaCopies<Config> copies(params, tile, shared);
  const MmaPlace<Config> place;
  // Warps of rows beyond the last one only copy.
  const int num_rows = tile.num_rows - place.first_token;
  MmaSums<Config> sums;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < Config::kStages - 1; ++i) {
    if (i < params.k_tiles) copies.copy(i, i);
    end_copy_group();
  }
  int stage = 0;
  int free_stage = Config::kStages - 1;
#pragma unroll 1
  for (int i = 0; i < params.k_tiles; ++i) {
    wait_for_copy_groups<Config::kStages - 2>();
    // The chunk is there, and nobody reads the stage before it any more.
    __syncthreads();
    if (i + Config::kStages - 1 < params.k_tiles) {
      copies.copy(i + Config::kStages - 1, free_stage);
    }
    end_copy_group();
    if (num_rows > 0) {
      sums.add(shared_address(shared) + static_cast<uint32_t>(stage * Config::kStageBytes), place,
               num_rows);
    }
    free_stage = stage;
    stage = stage + 1 == Config::kStages ? 0 : stage + 1;
  }
  if (num_rows > 0) MmaResults<Config>(params, tile, place).store(sums);
}

template <class Config>
void launch_multiply_tiles(const GemmParams& params, Stream stream, int device) {
  const auto ctas = static_cast<unsigned>(params.max_tiles) * static_cast<unsigned>(params.splits);
  const auto strips = static_cast<unsigned>(ceil_div(params.blocks, Config::kCtaStrips));
  constexpr auto kKernel = multiply_tiles_kernel<Config>;
  static SharedMemoryOptIn opt_in;
  opt_in.allow(reinterpret_cast<const void*>(kKernel), Config::kSharedBytes, device);
  launch(kKernel, {dim3(ctas, strips), dim3(Config::kThreads), Config::kSharedBytes}, stream,
         params);
}

template <MmaCoding kCoding, bool kHasGroups>
void launch_mma(const GemmParams& params, const MmaLaunch& shape, Stream stream) {
  const auto launch_for = [&]<int kTokens>() {
    launch_multiply_tiles<MmaConfig<kCoding, kHasGroups, kTokens>>(params, stream, shape.device);
  };
  switch (shape.tokens) {
    case 8:
      return launch_for.template operator()<8>();
    case 16:
      return launch_for.template operator()<16>();
    case 32:
      return launch_for.template operator()<32>();
    default:
      return launch_for.template operator()<64>();
  }
}

}  // namespace narrowfloat
