// Main loops for FP8 weights, which wgmma reads from shared memory as they are:
//
//   FewTokensLoop    tiles of up to 32 tokens; weights are wgmma's M
//   ManyTokensLoop   tiles of 64 and more; tokens are wgmma's M
//   RemainderLoop    many tokens, and a ragged remainder of up to 16
//
// In all of them sums start again with every k tile, 128 k, and are added to fp32 registers, times
// the factors of token and weights.
#pragma once

#include "base/float_ops.h"
#include "device/ptx/cluster.cuh"
#include "device/ptx/keep.cuh"
#include "device/ptx/wgmma.cuh"
#include "device/reduce.cuh"
#include "device/swiglu.cuh"
#include "ops/grouped_gemm/sm90/epilogue.cuh"
#include "ops/grouped_gemm/sm90/epilogue_quantize.cuh"
#include "ops/grouped_gemm/sm90/gemm_config.cuh"
#include "ops/grouped_gemm/sm90/tile_scheduler.cuh"
#include "ops/grouped_gemm/sm90/weight_decoder.cuh"

namespace narrowfloat {

// Few tokens. The weights are wgmma's A as they are (packed_weights.h).
template <class Shape>
class FewTokensLoop {
 public:
  using TheRing = Ring<Shape::kStages>;
  static_assert(Shape::kBlocks == 1 && Shape::kKTiles == 1 && Shape::kGroupKTiles == 1);

  __device__ FewTokensLoop(const GemmParams& params, GemmStorage<Shape>& shared,
                           const TheRing& ring)
      : params_(params),
        shared_(shared),
        ring_(ring),
        warpgroup_(static_cast<int>(threadIdx.x) / kWarpgroup - 1),
        thread_(static_cast<int>(threadIdx.x) % kWarpgroup) {}

  template <int kSums>
  __device__ void multiply(float (&sums)[1][kSums]) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[0][i] = 0;
#pragma unroll 1
    for (int k_tile = 0; k_tile < params_.k_tiles; ++k_tile) {
      ring_.wait_full(at_);
      fence_async_proxy();
      float group_sums[kSums];
      float scales[kSums / 2];
      issue(group_sums);
      wgmma_wait();
      load_scales(scales);
      promote(group_sums, scales, sums[0]);
      ring_.release_warp(at_, thread_ % 32);
      at_.advance();
    }
  }

 private:
  __device__ const uint8_t* weights() const { return shared_.weights[at_.stage][warpgroup_]; }

  template <int kSums>
  __device__ void issue(float (&group_sums)[kSums]) const {
    const uint64_t subtile = swizzled_descriptor(shared_address(weights()));
    const uint64_t rows = swizzled_descriptor(shared_address(shared_.rows[at_.stage][0]));
    wgmma_fence();
    multiply_k_tile(group_sums, subtile, rows);
    wgmma_commit();
  }

  // Loads those of the thread's tokens, 8j + 2c and 8j + 2c + 1.
  template <int kTokens>
  __device__ void load_scales(float (&scales)[kTokens]) const {
    const float* shared_scales = shared_.group_scales[at_.stage][0] + 2 * (thread_ % 4);
    const float weight_scale = Shape::Weights::scale(weights());
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      scales[i] = __fmul_rn(shared_scales[i / 2 * 8 + i % 2], weight_scale);
    }
  }

  template <int kSums>
  __device__ static void promote(const float (&group_sums)[kSums], const float (&scales)[kSums / 2],
                                 float (&sums)[kSums]) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      sums[i] = __fmaf_rn(scales[i / 4 * 2 + i % 2], group_sums[i], sums[i]);
    }
  }

  const GemmParams& params_;
  GemmStorage<Shape>& shared_;
  const TheRing& ring_;
  int warpgroup_;
  int thread_;
  RingPosition<Shape::kStages> at_;
};

// Many tokens. Both operands are in shared memory, so that either may be wgmma's A: here tokens are
// its 64 rows and the warpgroup's 128 weight rows its columns. A thread then has sums of two
// tokens, whose factors are two registers; with weights as A it would multiply by 32 of them.
//
// 64 tokens are multiplied at a time, into one temporary set of sums: while a warpgroup promotes
// its set, the other one's instructions keep the tensor cores busy.

// A thread's sums of 64 tokens and 128 weight rows: 4j + 2h + i is token 16w + q + 8h and row 8j +
// 2c + i of the n sub-tiles (packed_weights.h).
using TokenSums = float[64];

// Factors of a thread's two tokens and of two n sub-tiles.
struct TokenFactors {
  float of[2][2];  // [token][subtile]
};

__device__ inline void promote_tokens(const TokenSums& k_tile_sums, const TokenFactors& factors,
                                      TokenSums& sums) {
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    sums[i] = __fmaf_rn(factors.of[i / 2 % 2][i / 32], k_tile_sums[i], sums[i]);
  }
}

template <class Shape>
class ManyTokensLoop {
 public:
  using TheRing = Ring<Shape::kStages>;
  static_assert(Shape::kKTiles == 1 && Shape::kGroupKTiles == 1 && Shape::kBlocks == 2);

  __device__ ManyTokensLoop(const GemmParams& params, GemmStorage<Shape>& shared,
                            const TheRing& ring)
      : params_(params),
        shared_(shared),
        ring_(ring),
        // A shuffle tells the compiler that it is the same in all lanes.
        warpgroup_(__shfl_sync(0xFFFFFFFFU, static_cast<int>(threadIdx.x) / kWarpgroup - 1, 0)),
        thread_(static_cast<int>(threadIdx.x) % kWarpgroup) {}

  // Multiplies the first 64 * kTokenBlocks tokens.
  template <int kTokenBlocks>
  __device__ void multiply(TokenSums (&sums)[kTokenBlocks]) {
#pragma unroll
    for (int i = 0; i < kTokenBlocks * 64; ++i) sums[i / 64][i % 64] = 0;
#pragma unroll 1
    for (int k_tile = 0; k_tile < params_.k_tiles; ++k_tile) {
      ring_.wait_full(at_);
      fence_async_proxy();
      const Scales<kTokenBlocks> scales = load_scales<kTokenBlocks>();
#pragma unroll
      for (int block = 0; block < kTokenBlocks; ++block) {
        TokenSums group_sums;
        issue(block, group_sums);
        wgmma_wait();
        if (block + 1 == kTokenBlocks) release();
        promote_tokens(group_sums, factors_of(scales, block), sums[block]);
      }
    }
  }

  // Passes over the stages of a tile whose copies the cluster's other CTA needs.
  __device__ void pass() {
#pragma unroll 1
    for (int k_tile = 0; k_tile < params_.k_tiles; ++k_tile) {
      ring_.wait_full(at_);
      release();
    }
  }

 private:
  // The scales of a stage: those of a thread's two tokens of each 64, and of two n sub-tiles.
  template <int kTokenBlocks>
  struct Scales {
    float tokens[2 * kTokenBlocks];
    float weights[2];
  };

  __device__ void issue(int block, TokenSums& group_sums) const {
    const uint32_t first_token = shared_address(shared_.rows[at_.stage][0]) + block * 64 * 128;
    const uint32_t subtiles = shared_address(shared_.weights[at_.stage][2 * warpgroup_]);
    const uint64_t tokens = swizzled_descriptor(first_token);
    const uint64_t weights = swizzled_descriptor(subtiles);
    wgmma_fence();
    multiply_k_tile(group_sums, tokens, weights);
    wgmma_commit();
  }

  // Called before the first wgmma: a load among them would hold up the last of them.
  template <int kTokenBlocks>
  __device__ Scales<kTokenBlocks> load_scales() const {
    Scales<kTokenBlocks> scales;
    const uint32_t tokens = shared_address(shared_.group_scales[at_.stage][0]) +
                            static_cast<uint32_t>(thread_ / 32 * 64 + thread_ % 32 / 4 * 4);
    const uint32_t weights = shared_address(shared_.weight_scales[at_.stage][2 * warpgroup_]);
#pragma unroll
    for (int subtile = 0; subtile < 2; ++subtile) {
      scales.weights[subtile] = bits_float(load_shared(weights + subtile * 16));
    }
#pragma unroll
    for (int i = 0; i < 2 * kTokenBlocks; ++i) {
      scales.tokens[i] = bits_float(load_shared(tokens + i / 2 * 256 + i % 2 * 32));
    }
    return scales;
  }

  template <int kTokenBlocks>
  __device__ static TokenFactors factors_of(const Scales<kTokenBlocks>& scales, int block) {
    TokenFactors factors;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      factors.of[i / 2][i % 2] = __fmul_rn(scales.tokens[2 * block + i / 2], scales.weights[i % 2]);
    }
    return factors;
  }

  __device__ void release() {
    if constexpr (Shape::kMulticast == 1) {
      ring_.release_warp(at_, thread_ % 32);
    } else {
      // The other CTA's producer writes here, too.
      __syncwarp();
      if (thread_ % 32 < Shape::kMulticast) arrive_in_block(ring_.empty(at_), thread_ % 32);
    }
    at_.advance();
  }

  const GemmParams& params_;
  GemmStorage<Shape>& shared_;
  const TheRing& ring_;
  int warpgroup_;
  int thread_;
  RingPosition<Shape::kStages> at_;
};

// The epilogue of ManyTokensLoop, whose threads have four neighbouring columns of a token. A
// warpgroup's two n sub-tiles are u and g of the same 64 columns, and a thread has both: 16 columns
// of h for each of two or four tokens, the other 48 in three more lanes.

// Biases of rows `row` to `row` + 3 of an n sub-tile.
struct FourBiases {
  float of[4] = {-0.0F, -0.0F, -0.0F, -0.0F};

  __device__ FourBiases(const GemmParams& params, const ColumnFactors& columns, int block,
                        int row) {
    if (params.epilogue.bias == nullptr) return;
    const OutputColumns four(columns, params.image_rows, block, row);
    if (four.first >= params.rows) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) of[i] = four.factors[i].bias;
  }
};

// The epilogue of one output tile; all threads of a consumer warpgroup call it. kTokenBlocks:
// blocks of 64 tokens.
template <class Shape, int kTokenBlocks>
class TokenMajorEpilogue {
 public:
  using Sums = float[kTokenBlocks][64];

  __device__ TokenMajorEpilogue(const GemmParams& params, GemmStorage<Shape>& shared,
                                const OutputTile& tile)
      : params_(params),
        shared_(shared),
        tile_(tile),
        consumer_(consumer_thread()),
        warpgroup_(consumer_ / kWarpgroup),
        thread_(consumer_ % kWarpgroup) {}

  __device__ void finish(Sums& sums) const {
    // The factors of tokens are there, and later no longer needed.
    sync_threads(1 + warpgroup_, kWarpgroup);
    if (!params_.activation.is_there) {
      store_token_blocks_as(params_,
                            {.first_row = tile_.first_row,
                             .num_rows = tile_.num_rows,
                             .first_block = first_block(),
                             .shared_tokens = shared_.factors[warpgroup_],
                             .shared_columns = shared_.columns[warpgroup_]},
                            sums);
    } else if constexpr (Shape::writes(RowFormat::kFp8Group)) {
      params_.activation.format == RowFormat::kFp8Static ? store_static(sums) : store_groups(sums);
    }
    sync_threads(1 + warpgroup_, kWarpgroup);
  }

 private:
  static constexpr int kTokens = 2 * kTokenBlocks;  // A thread's.

  [[nodiscard]] __device__ int first_block() const { return tile_.block + 2 * warpgroup_; }
  [[nodiscard]] __device__ int token(int i) const {
    return i / 2 * 64 + i % 2 * 8 + thread_ / 32 * 16 + thread_ % 32 / 4;
  }
  [[nodiscard]] __device__ int col(int group) const {
    return first_block() / 2 * kSubtileRows + group * 16 + thread_ % 4 * 4;
  }
  [[nodiscard]] __device__ uint8_t* values(int i) const {
    return params_.activation.values + (tile_.first_row + token(i)) * params_.activation.row_bytes;
  }

  // Calls sink(i, group, h) for columns col(group) to col(group) + 3 of token(i).
  template <class Sink>
  __device__ void activate(const Sums& sums, Sink&& sink) const {
    const FusedActivation& activation = params_.activation;
    const SwigluParameters parameters(activation, tile_.expert);
    const ColumnFactors columns(params_, tile_.expert);
#pragma unroll
    for (int group = 0; group < 4; ++group) {
      const int row = group * 16 + thread_ % 4 * 4;
      const FourBiases up(params_, columns, first_block(), row);
      const FourBiases gate(params_, columns, first_block() + 1, row);
      const bool is_padding = col(group) >= params_.rows / 2;
#pragma unroll
      for (int i = 0; i < kTokens; ++i) {
        const TokenFactor factor = shared_.factors[warpgroup_][token(i)];
        const float* own = sums[i / 2] + 8 * group + i % 2 * 2;
        float h[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int at = j / 2 + j % 2 * 4;
          const float u = finished(own[at], factor, {columns.scale(false), up.of[j]});
          const float g = finished(own[32 + at], factor, {columns.scale(true), gate.of[j]});
          h[j] = is_padding ? 0.0F : fast_swiglu(u, g, parameters);
        }
        sink(i, group, float4{h[0], h[1], h[2], h[3]});
      }
    }
  }

  [[nodiscard]] __device__ bool has(int i, int group) const {
    return token(i) < tile_.num_rows && col(group) < params_.rows / 2;
  }

  __device__ void store_static(const Sums& sums) const {
    const float multiplier = params_.activation.multiplier.of(tile_.expert);
    activate(sums, [&](int i, int group, const float4& h) {
      if (has(i, group)) {
        store(values(i) + col(group), epilogue_detail::four_e4m3(h, multiplier));
      }
    });
  }

  // The largest magnitudes of a token's columns: here 16, with three more lanes 64, with the other
  // warpgroup's 128. The activation is made twice, which costs less than registers for it.
  __device__ void store_groups(Sums& sums) const {
    float largest[kTokens] = {};
    activate(sums, [&](int i, int /*group*/, const float4& h) {
      largest[i] =
          fmaxf(fmaxf(fmaxf(largest[i], fabsf(h.x)), fabsf(h.y)), fmaxf(fabsf(h.z), fabsf(h.w)));
    });
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      largest[i] = bits_float(group_max<4>(float_bits(largest[i])));
      if (thread_ % 4 == 0) shared_.maxima[warpgroup_ * Shape::kTokens + token(i)] = largest[i];
    }
    sync_consumers();
    float multipliers[kTokens];
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      const float other = shared_.maxima[(1 - warpgroup_) * Shape::kTokens + token(i)];
      const auto scale = epilogue_detail::scale_of_group(fmaxf(largest[i], other));
      multipliers[i] = scale.multiplier;
      const bool stores = thread_ % 4 == 0 && warpgroup_ == 0 && token(i) < tile_.num_rows;
      if (stores) store_scale(token(i), scale.stored);
    }
#pragma unroll
    for (int i = 0; i < kTokenBlocks * 64; ++i) keep_apart(sums[i / 64][i % 64]);
    activate(sums, [&](int i, int group, const float4& h) {
      if (has(i, group)) {
        store(values(i) + col(group), epilogue_detail::four_e4m3(h, multipliers[i]));
      }
    });
    // Before the next tile's maxima.
    sync_consumers();
  }

  __device__ void store_scale(int token, float scale) const {
    const FusedActivation& activation = params_.activation;
    static_cast<float*>(activation.scales)[(tile_.first_row + token) * activation.scale_row_stride +
                                           tile_.block / 4 * activation.scale_block_stride] =
        canonical_nan(scale);
  }

  const GemmParams& params_;
  GemmStorage<Shape>& shared_;
  OutputTile tile_;
  int consumer_;
  int warpgroup_;
  int thread_;
};

// Many tokens and a remainder: up to 16 tokens after blocks of 64, which are multiplied the other
// way round, as the columns of a wgmma for each of the warpgroup's two n sub-tiles. A stage's
// weights are copied and read once for all.
template <class Shape>
class RemainderLoop {
 public:
  using TheRing = Ring<Shape::kStages>;
  static constexpr int kRemainderTokens = Shape::kTokens - Shape::kMTile;
  static constexpr int kTokenBlocks = Shape::kMTile / 64;
  static_assert(Shape::kKTiles == 1 && Shape::kBlocks == 2 && Shape::kMulticast == 1 &&
                kRemainderTokens == 16);

  // remainder: a thread's sums of two n sub-tiles: 4j + 2h + i is row 16w + q + 8h of the subtile
  // and token 8j + 2c + i.
  struct Sums {
    TokenSums tokens[kTokenBlocks];
    float remainder[2][kRemainderTokens / 2];
  };

  __device__ RemainderLoop(const GemmParams& params, GemmStorage<Shape>& shared,
                           const TheRing& ring)
      : params_(params),
        shared_(shared),
        ring_(ring),
        // A shuffle tells the compiler that it is the same in all lanes.
        warpgroup_(__shfl_sync(0xFFFFFFFFU, static_cast<int>(threadIdx.x) / kWarpgroup - 1, 0)) {}

  // Blocks of 64 tokens of a tile with this many rows; the others are its remainder.
  __device__ static int blocks_of(int num_rows) {
    return num_rows <= 64 + kRemainderTokens ? 1 : kTokenBlocks;
  }
  __device__ static bool has_remainder(int num_rows) { return num_rows > 64 * blocks_of(num_rows); }

  // Sums that the tile's rows do not need are 0. One loop for tiles of all sizes: a branch
  // around some instructions costs less than the code, and the registers, of a loop for each.
  __device__ void multiply(int num_rows, Sums& sums) {
    const int num_blocks = blocks_of(num_rows);
    const bool with_remainder = has_remainder(num_rows);
    // Computed again each time: what is made of it takes no registers after the loop.
    const uint32_t thread = keep_in_register(threadIdx.x) % kWarpgroup;
    lane_ = static_cast<int>(thread % 32);
    first_scale_ = (thread / 32 * 16 + thread % 32 / 4) * sizeof(float);
    clear(sums);
#pragma unroll 1
    for (int left = params_.k_tiles; left > 0; --left) {
      ring_.wait_full(at_);
      fence_async_proxy();
      if (with_remainder) multiply_remainder(64 * num_blocks, sums);
      if (num_blocks > 1) multiply_block<1>(sums);
      multiply_block<0>(sums);
    }
  }

 private:
  // Block 0 is the last of a stage.
  template <int kBlock>
  __device__ void multiply_block(Sums& sums) {
    TokenSums k_tile_sums;
    // Loaded before the first wgmma: a load among them would hold up the last of them.
    const float2 tokens = token_scales(kBlock);
    const float2 weights = weight_scales();
    const uint64_t rows = rows_from(64 * kBlock);
    const uint64_t subtiles = subtile(0);
    wgmma_fence();
    multiply_k_tile(k_tile_sums, rows, subtiles);
    wgmma_commit();
    wgmma_wait();
    if constexpr (kBlock == 0) {
      ring_.release_warp(at_, lane_);
      at_.advance();
    }
    const TokenFactors factors = {
        {{__fmul_rn(tokens.x, weights.x), __fmul_rn(tokens.x, weights.y)},
         {__fmul_rn(tokens.y, weights.x), __fmul_rn(tokens.y, weights.y)}}};
    promote_tokens(k_tile_sums, factors, sums.tokens[kBlock]);
  }

  // Tokens from `first` on.
  __device__ void multiply_remainder(int first, Sums& sums) const {
    constexpr int kSums = kRemainderTokens / 2;
    float k_tile_sums[2][kSums];
    const float2 weights = weight_scales();
    const uint64_t rows = rows_from(first);
    wgmma_fence();
#pragma unroll
    for (int block = 0; block < 2; ++block)
      multiply_k_tile(k_tile_sums[block], subtile(block), rows);
    wgmma_commit();
    wgmma_wait();
    const float* tokens = shared_.group_scales[at_.stage][0] + first + lane_ % 4 * 2;
#pragma unroll
    for (int i = 0; i < 2 * kSums; ++i) {
      const int at = i % kSums;
      const float factor =
          __fmul_rn(tokens[at / 4 * 8 + at % 2], i < kSums ? weights.x : weights.y);
      float& sum = sums.remainder[i / kSums][at];
      sum = __fmaf_rn(factor, k_tile_sums[i / kSums][at], sum);
    }
  }

  [[nodiscard]] __device__ uint64_t rows_from(int token) const {
    return swizzled_descriptor(shared_address(shared_.rows[at_.stage][0]) +
                               static_cast<uint32_t>(token * kKTileRowBytes));
  }
  // The warpgroup's n sub-tile `block`; the other one's rows follow those of the first.
  [[nodiscard]] __device__ uint64_t subtile(int block) const {
    return swizzled_descriptor(shared_address(shared_.weights[at_.stage][2 * warpgroup_ + block]));
  }

  // The scales of a thread's two tokens of a block of 64.
  [[nodiscard]] __device__ float2 token_scales(int block) const {
    const uint32_t tokens = shared_address(shared_.group_scales[at_.stage][0]) + first_scale_;
    return {bits_float(load_shared(tokens + block * 256)),
            bits_float(load_shared(tokens + block * 256 + 32))};
  }
  // The scales of the warpgroup's two n sub-tiles.
  [[nodiscard]] __device__ float2 weight_scales() const {
    const uint32_t weights = shared_address(shared_.weight_scales[at_.stage][2 * warpgroup_]);
    return {bits_float(load_shared(weights)), bits_float(load_shared(weights + 16))};
  }

  __device__ static void clear(Sums& sums) {
#pragma unroll
    for (int i = 0; i < kTokenBlocks * 64; ++i) sums.tokens[i / 64][i % 64] = 0;
#pragma unroll
    for (int i = 0; i < kRemainderTokens; ++i) sums.remainder[i % 2][i / 2] = 0;
  }

  const GemmParams& params_;
  GemmStorage<Shape>& shared_;
  const TheRing& ring_;
  int warpgroup_;
  int lane_ = 0;
  uint32_t first_scale_ = 0;  // Bytes before that of the thread's first token.
  RingPosition<Shape::kStages> at_;
};

// A consumer warpgroup whose tiles may have a remainder multiplies tile after tile and stores each.
// It differs from Consumer (gemm_kernel_sm90.cuh) by what saves registers: tiles come from the
// producer (TileRing), and numbers of threads are computed again where they are needed.
template <class Shape>
class RemainderConsumer {
 public:
  using Loop = RemainderLoop<Shape>;
  using Sums = typename Loop::Sums;

  __device__ RemainderConsumer(const GemmParams& params, GemmStorage<Shape>& shared,
                               const Ring<Shape::kStages>& ring)
      : params_(params), shared_(shared), loop_(params, shared, ring) {}

  __device__ void run() {
    TileRing tiles(shared_.found.tiles);
    for (; tiles.has_tile(); tiles.advance(thread() % 32)) {
      if (!tiles.tile().has_copies) continue;
      load_factors<Shape::kTokens>(params_, tiles.tile(), thread(), shared_.factors[warpgroup()]);
      load_column_factors(params_, tiles.tile(), tiles.tile().block + 2 * warpgroup(), thread(),
                          shared_.columns[warpgroup()]);
      Sums sums;
      // A shuffle tells the compiler that it is the same in all lanes.
      loop_.multiply(__shfl_sync(kFullWarp, tiles.tile().num_rows, 0), sums);
      finish(tiles.tile(), sums);
    }
  }

 private:
  __device__ void finish(const OutputTile& tile, const Sums& sums) const {
    // The factors are there, and later no longer needed.
    sync_threads(1 + warpgroup(), kWarpgroup);
    const int remainder = 64 * Loop::blocks_of(tile.num_rows);
    TokenOutput output{.first_row = tile.first_row,
                       .num_rows = min(tile.num_rows, remainder),
                       .first_block = tile.block + 2 * warpgroup(),
                       .shared_tokens = shared_.factors[warpgroup()],
                       .shared_columns = shared_.columns[warpgroup()]};
    store_token_blocks_as(params_, output, sums.tokens);
    if (Loop::has_remainder(tile.num_rows)) {
      output.first_row += remainder;
      output.num_rows = tile.num_rows - remainder;
      output.shared_tokens += remainder;
      store_remainder(output, sums.remainder);
    }
    sync_threads(1 + warpgroup(), kWarpgroup);
  }

  // The subtiles' order of rows makes columns 16w + 2q and the next one of a thread's two rows.
  __device__ void store_remainder(const TokenOutput& output,
                                  const float (&sums)[2][Loop::kRemainderTokens / 2]) const {
    const int distance = params_.image_rows.are_interleaved() ? 2 : 1;
    const int col = thread() / 32 * 16 + thread() % 32 / 4 * 2;
#pragma unroll
    for (int subtile = 0; subtile < 2; ++subtile) {
      const BlockColumns block(params_.image_rows, output.first_block + subtile);
      if (col >= block.rows) continue;
      const ColumnFactor* two = output.shared_columns + subtile * kSubtileRows + col;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = i / 2 * 8 + thread() % 4 * 2 + i % 2;
        if (token >= output.num_rows) continue;
        const TokenFactor factor = output.shared_tokens[token];
        const float* own = sums[subtile] + i / 2 * 4 + i % 2;
        const float low = finished(own[0], factor, two[0]);
        const float high = finished(own[2], factor, two[1]);
        const int64_t index =
            (output.first_row + token) * params_.rows + block.first + col * distance;
        distance == 1 ? store_neighbours(params_, index, low, high)
                      : store_apart(params_, index, distance, {low, high});
      }
    }
  }

  __device__ static int warpgroup() { return consumer_thread() / kWarpgroup; }
  __device__ static int thread() { return consumer_thread() % kWarpgroup; }

  const GemmParams& params_;
  GemmStorage<Shape>& shared_;
  Loop loop_;
};

}  // namespace narrowfloat
