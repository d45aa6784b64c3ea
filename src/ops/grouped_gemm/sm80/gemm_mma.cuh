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

// The work of a CTA for up to kRows rows. `kIsRest`: for the few that experts have beyond a
// multiple of 128 rows, by the CTAs of 128 rows: with less in a stage, more stages.
template <MmaCoding kCodingOf, bool kGroups, int kRows, bool kIsRest = false>
struct MmaConfig {
  static constexpr MmaCoding kCoding = kCodingOf;
  static constexpr bool kHasGroups = kGroups;  // Sums of chunks times scales of 1x128, or 1.
  static constexpr bool kHasBlockFactors = kCoding == MmaCoding::kMxfp8;
  static constexpr int kTokens = kRows;
  // With few bytes in a stage more CTAs, of fewer stages each, have places in one wave.
  static constexpr bool kHasFewBytes = kRows <= 16 && mma_code_bits(kCoding) == 4;
  static constexpr bool kIsLarge = kRows == kMostMmaTokens || kIsRest;

  template <MmaCoding kOther>
  using OfCoding = MmaConfig<kOther, kGroups, kRows, kIsRest>;
  // This configuration takes a rest of up to kRestRows rows.
  static constexpr int kRestRows = 32;
  using OfRest = MmaConfig<kCoding, kGroups, kRestRows, true>;

  // A warp has kWarpTokens and kStrips of 16 weight rows. Sums of chunks take registers.
  static constexpr int kStrips = kRows < 64 ? 1 : 2;
  static constexpr int kWarpTokens = std::min(kRows, kGroups ? (kIsRest ? 16 : 32) : 64);
  static constexpr int kTokenWarps = kRows / kWarpTokens;
  static constexpr bool kCanHalve = kRows >= 64 || kIsRest;
  static constexpr int kWarps = kIsLarge ? 8 : 4 * (kRows == 64 && kGroups ? 1 : kTokenWarps);
  static constexpr int kRowWarps = kWarps / kTokenWarps;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kCtaStrips = kRowWarps * kStrips;
  static_assert(kCtaStrips * kMmaStripRows >= kLeastMmaCtaRows);
  // At least. As Hopper's own code, which seldom runs, spills registers otherwise.
  static constexpr int ctas_per_sm() {
    if (kRows <= 16) return !kHasFewBytes || kGroups ? 5 : kRows == 8 ? 8 : 6;
    if (kRows == 32) return 4;
    return kRows == 64 ? (kHasHopperInstructions ? 2 : 3) : (kHasHopperInstructions ? 1 : 2);
  }

  // A stage: rows, strips of weights, scales of rows; of a chunk, or of half of it.
  static constexpr int kStageCols =
      kRows == kMostMmaTokens && kCoding == MmaCoding::kBf16 ? kMmaChunkCols / 2 : kMmaChunkCols;
  static constexpr int kStagesPerChunk = kMmaChunkCols / kStageCols;
  static constexpr int kRowBytes = 2 * kStageCols;
  static constexpr int kStripBytes = mma_chunk_bytes(kCoding) / kStagesPerChunk;
  static constexpr int kWeightsAt = kTokens * kRowBytes;
  static constexpr int kScalesAt = kWeightsAt + kCtaStrips * kStripBytes;
  static constexpr int kStageBytes = kScalesAt + (kGroups ? 4 * kTokens : 0);
  // As many as leave room for several CTAs, or as shared memory has room for.
  static constexpr int most_stage_bytes() {
    if constexpr (kIsRest) return MmaConfig<kCoding, kGroups, kMostMmaTokens>::kSharedBytes;
    return (kRows == kMostMmaTokens ? 97 : !kHasFewBytes ? 44 : kRows == 8 ? 28 : 34) * 1024;
  }
  static constexpr int kStages = std::clamp(most_stage_bytes() / kStageBytes,
                                            mma_code_bits(kCoding) == 16 && kRows <= 16 ? 3 : 2, 6);

  // Pieces of 16 bytes of a row; a thread copies those of kThreadTokens, whose places it keeps
  // where they are few.
  static constexpr int kRowPieces = kRowBytes / 16;
  static constexpr int kTokensAtOnce = std::min(kThreads / kRowPieces, kTokens);
  static constexpr int kThreadTokens = kTokens / kTokensAtOnce;
  static constexpr bool kKeepsPlaces = kThreadTokens <= 4 && kRows < 64;
  static constexpr int kPlacesAt = kStages * kStageBytes;
  static constexpr int kSharedBytes = kPlacesAt + (kKeepsPlaces ? 0 : 8 * kTokens);
  static_assert(kSharedBytes <= kMmaSharedBytes);
};

// A CTA takes rows of a tile, and strips of weights.
struct MmaTile {
  int expert = 0;
  int64_t first_row = 0;
  int num_rows = 0;  // 0: nothing to do.
  int first_strip = 0;

  // All strips of a tile come one after the other, so that its rows stay in the L2 cache.
  template <class Config>
  __device__ static MmaTile of(const GemmParams& params) {
    const auto groups =
        (static_cast<unsigned>(params.blocks) + Config::kCtaStrips - 1) / Config::kCtaStrips;
    const unsigned piece = blockIdx.x / groups;
    const int tile = static_cast<int>(piece / static_cast<unsigned>(params.splits));
    if (tile >= min(*params.num_tiles, params.max_tiles)) return {};
    const int64_t first = int64_t{tile} * params.token_tile;
    const int split = static_cast<int>(piece % static_cast<unsigned>(params.splits));
    MmaTile result{
        .expert = params.tile_experts[tile],
        .first_row = first + split * Config::kTokens,
        .first_strip = static_cast<int>(blockIdx.x - piece * groups) * Config::kCtaStrips};
    const int64_t end =
        min(min(int64_t{params.row_ends[tile]}, first + params.token_tile), params.row_limit);
    if (result.expert < 0 || result.expert >= params.experts) return {};
    result.num_rows =
        static_cast<int>(max(int64_t{0}, min(int64_t{Config::kTokens}, end - result.first_row)));
    return result;
  }
};

// Copies into stages, by all threads of the CTA.
template <class Config>
class MmaCopies {
 public:
  // Before the first copy() comes meet().
  __device__ MmaCopies(const GemmParams& params, const MmaTile& tile, uint8_t* shared)
      : params_(params),
        num_rows_(tile.num_rows),
        shared_(shared_address(shared)),
        places_(reinterpret_cast<int64_t*>(shared + Config::kPlacesAt)) {
    for (int i = 0; i < kWarpStrips; ++i) {
      // Beyond the last strip that one again.
      const int strip = min(tile.first_strip + first_strip() + i, params.blocks - 1);
      weights_[i] = params.image + tile.expert * params.expert_bytes + strip * params.block_bytes +
                    thread() % 32 * 16;
    }
    if constexpr (Config::kKeepsPlaces) {
#pragma unroll
      for (int i = 0; i < Config::kThreadTokens; ++i) {
        own_places_[i] = place_of(params, tile, first_token() + i * Config::kTokensAtOnce);
      }
    } else if (thread() < Config::kTokens) {
      places_[thread()] = place_of(params, tile, thread());
    }
    if constexpr (Config::kHasGroups) {
      static_assert(Config::kThreads >= Config::kTokens);
      if (params.group_scales == nullptr) {
        set_scales_to_one(shared);
      } else if (thread() < Config::kTokens) {
        const int64_t source = source_of(params, tile, thread());
        scales_ = source < 0 ? nullptr : params.group_scales + source * params.group_row_stride;
      }
    }
  }

  // All threads of the CTA meet if places are in shared memory.
  __device__ void meet() {
    if constexpr (!Config::kKeepsPlaces) __syncthreads();
    are_all_there_ = true;
    if (first_token() >= Config::kTokens) return;
#pragma unroll
    for (int i = 0; i < Config::kThreadTokens; ++i) are_all_there_ &= place(i) >= 0;
  }

  // Starts the copy of what stage number `index` of all columns has.
  __device__ void copy(int index, int stage) const {
    const uint32_t to = shared_ + static_cast<uint32_t>(stage * Config::kStageBytes);
    copy_weights(index, to + Config::kWeightsAt);
    copy_rows(index, to);
    if constexpr (Config::kHasGroups) {
      if (params_.group_scales != nullptr) copy_scales(index, to + Config::kScalesAt);
    }
  }

 private:
  // Rows without a scale for each chunk have these: no copy overwrites them.
  __device__ static void set_scales_to_one(uint8_t* shared) {
    for (int i = thread(); i < Config::kStages * Config::kTokens; i += Config::kThreads) {
      const int stage = i / Config::kTokens;
      store(shared + stage * Config::kStageBytes + Config::kScalesAt + i % Config::kTokens * 4,
            1.0F);
    }
  }

  static constexpr int kWarpStrips = std::max(Config::kStrips / Config::kTokenWarps, 1);
  static constexpr int kStripWarps = Config::kCtaStrips / kWarpStrips;

  __device__ static int thread() { return static_cast<int>(threadIdx.x); }
  __device__ static int first_strip() { return thread() / 32 % kStripWarps * kWarpStrips; }
  __device__ static int first_token() { return thread() / Config::kRowPieces; }

  // The row of the input; -1 if there is none. Tokens beyond the last one are zeros where tokens
  // are few; else they have its row, so that a check of all rows passes. Their sums are not stored.
  __device__ static int64_t source_of(const GemmParams& params, const MmaTile& tile, int token) {
    if (Config::kKeepsPlaces && token >= tile.num_rows) return -1;
    const int64_t row = tile.first_row + min(token, tile.num_rows - 1);
    const int64_t source = params.row_to_token == nullptr ? row : params.row_to_token[row];
    return source < params.input_rows ? max(source, int64_t{-1}) : -1;
  }
  __device__ static int64_t place_of(const GemmParams& params, const MmaTile& tile, int token) {
    const int64_t source = source_of(params, tile, token);
    return source < 0 ? -1 : source * params.row_bytes;
  }
  [[nodiscard]] __device__ int64_t place(int i) const {
    if constexpr (Config::kKeepsPlaces) return own_places_[i];
    return places_[first_token() + i * Config::kTokensAtOnce];
  }

  // A warp copies whole strips.
  __device__ void copy_weights(int index, uint32_t to) const {
    constexpr int kChunkBytes = mma_chunk_bytes(Config::kCoding);
    if (kStripWarps * 32 < Config::kThreads && thread() >= kStripWarps * 32) return;
    const int64_t chunk = int64_t{index / Config::kStagesPerChunk} * kChunkBytes;
    const int half = index % Config::kStagesPerChunk;
    const uint32_t own = to + static_cast<uint32_t>(first_strip() * Config::kStripBytes) +
                         static_cast<uint32_t>(thread() % 32 * 16);
#pragma unroll
    for (int i = 0; i < kWarpStrips; ++i) {
      const uint8_t* from = weights_[i] + chunk;
#pragma unroll
      for (int at = 0; at < Config::kStripBytes; at += 512) {
        if (at + 512 > Config::kStripBytes && thread() % 32 * 16 >= Config::kStripBytes - at) {
          continue;
        }
        // Half a chunk has half of the blocks of both rows.
        const int source = Config::kStagesPerChunk == 1 ? at : at + at / 1024 * 1024 + half * 1024;
        copy_16(own + static_cast<uint32_t>(i * Config::kStripBytes + at), from + source);
      }
    }
  }

  // Zeros where there is no row or column. Nothing is copied where all tokens of a copy have no
  // row.
  __device__ void copy_rows(int index, uint32_t to) const {
    static_assert(Config::kTokensAtOnce % 2 == 0);
    if (Config::kTokensAtOnce * Config::kRowPieces < Config::kThreads &&
        first_token() >= Config::kTokens) {
      return;
    }
    const int piece = thread() % Config::kRowPieces;
    const int col = index * Config::kStageCols + piece * 8;
    const uint32_t own = to + static_cast<uint32_t>(first_token() * Config::kRowBytes) +
                         static_cast<uint32_t>(piece ^ first_token() % 2 * 4) * 16;
    const uint8_t* const from = params_.values + 2 * int64_t{col};
    const auto to_token = [&](int i) {
      return own + static_cast<uint32_t>(i * Config::kTokensAtOnce * Config::kRowBytes);
    };
    if (Config::kThreadTokens >= 4 && are_all_there_ &&
        (index + 1) * Config::kStageCols <= params_.cols) {
#pragma unroll
      for (int i = 0; i < Config::kThreadTokens; ++i) {
        if (i * Config::kTokensAtOnce < num_rows_) copy_16(to_token(i), from + place(i));
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < Config::kThreadTokens; ++i) {
      if (i * Config::kTokensAtOnce >= num_rows_) break;
      const bool is_there = place(i) >= 0 && col < params_.cols;
      copy_16(to_token(i), is_there ? from + place(i) : params_.values, is_there ? 16 : 0);
    }
  }

  __device__ void copy_scales(int index, uint32_t to) const {
    if (thread() >= Config::kTokens) return;
    const bool is_there = scales_ != nullptr;
    copy_4(to + static_cast<uint32_t>(4 * thread()),
           is_there ? scales_ + index * params_.group_stride : params_.group_scales,
           is_there ? 4 : 0);
  }

  const GemmParams& params_;
  int num_rows_;
  uint32_t shared_;
  const uint8_t* weights_[kWarpStrips];
  // A row's bytes from the first one; -1 where there is no row.
  int64_t* places_;
  int64_t own_places_[Config::kKeepsPlaces ? Config::kThreadTokens : 1];
  const float* scales_ = nullptr;
  bool are_all_there_ = false;  // The thread's rows.
};

// The place of a warp in its CTA, and of a lane in its warp.
template <class Config>
struct MmaPlace {
  int lane = static_cast<int>(threadIdx.x) % 32;
  int first_token = 0;
  int num_rows = 0;  // A warp without rows only copies; this is not positive then.
  int first_strip = static_cast<int>(threadIdx.x) / 32 % Config::kRowWarps * Config::kStrips;

  // All warps take half of the rows that half of them could take.
  __device__ explicit MmaPlace(const MmaTile& tile) {
    const bool is_half = Config::kCanHalve && tile.num_rows <= Config::kTokens / 2;
    const int most = Config::kWarpTokens / (is_half ? 2 : 1);
    first_token = static_cast<int>(threadIdx.x) / 32 / Config::kRowWarps * most;
    num_rows = min(tile.num_rows - first_token, most);
  }
};

// The sums of a warp: of 8 tokens each, as multiply_add_bf16() has them.
template <class Config>
struct MmaSums {
  static constexpr int kTiles = Config::kWarpTokens / 8;
  static constexpr int kStrips = Config::kStrips;
  using Weights = MmaWeights<Config::kCoding, Config::kStagesPerChunk>;

  float sums[kTiles][kStrips][4] = {};
  float totals[Config::kHasGroups ? kTiles : 1][kStrips][4] = {};

  // Adds the columns of a stage, for the warp's rows at least.
  __device__ void add(uint32_t stage, const MmaPlace<Config>& place) {
    if constexpr (Config::kCanHalve) {
      if (place.num_rows <= kTiles * 4) return add_tiles<kTiles / 2>(stage, place);
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
    const uint32_t strips =
        stage + Config::kWeightsAt + static_cast<uint32_t>(place.first_strip * Config::kStripBytes);
    if constexpr (kStrips == 1) {
      Weights weights[1] = {{strips, place.lane}};
      add_tiles<kUsed>(weights, stage, place);
    } else {
      Weights weights[2] = {{strips, place.lane}, {strips + Config::kStripBytes, place.lane}};
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
    for (int block = 0; block < Config::kStageCols / 32; ++block) {
      uint32_t a[kStrips][2][4];
#pragma unroll
      for (int strip = 0; strip < kStrips; ++strip) weights[strip].decode(block, a[strip]);
      // Instructions on the same sums are as far apart as registers allow.
      constexpr int kAtOnce = kUsed % 2 == 0 ? 2 : 1;
#pragma unroll
      for (int first = 0; first < kUsed; first += kAtOnce) {
        uint4 b[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          b[i] = load_shared_16(
              starts[block % 2] +
              static_cast<uint32_t>((first + i) * 8 * Config::kRowBytes + block / 2 * 128));
        }
        add_block<kAtOnce>(weights, block, a, b, first);
      }
    }
    if constexpr (Config::kHasGroups) {
      add_to_totals<kUsed>(weights, stage + Config::kScalesAt, place);
    }
  }

  template <int kCount>
  __device__ void add_block(const Weights (&weights)[kStrips], int block,
                            const uint32_t (&a)[kStrips][2][4], const uint4 (&b)[kCount],
                            int first) {
    if constexpr (Config::kHasBlockFactors) {
#pragma unroll
      for (int at = 0; at < kCount * kStrips; ++at) {
        const int i = at / kStrips;
        const int strip = at % kStrips;
        float inner[4] = {};
        multiply_add_bf16(inner, a[strip][0], b[i].x, b[i].y);
        multiply_add_bf16(inner, a[strip][1], b[i].z, b[i].w);
        float(&to)[4] = sums[first + i][strip];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          to[k] = __fmaf_rn(weights[strip].factor(k / 2, block), inner[k], to[k]);
        }
      }
    } else {
#pragma unroll
      for (int at = 0; at < kCount * kStrips; ++at) {
        const int i = at / kStrips;
        multiply_add_bf16(sums[first + i][at % kStrips], a[at % kStrips][0], b[i].x, b[i].y);
      }
#pragma unroll
      for (int at = 0; at < kCount * kStrips; ++at) {
        const int i = at / kStrips;
        multiply_add_bf16(sums[first + i][at % kStrips], a[at % kStrips][1], b[i].z, b[i].w);
      }
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
      const int index = tile_.first_strip + place_.first_strip + strip;
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
        const int token = 8 * i + place_.lane % 4 * 2 + k;
        if (token < place_.num_rows) store(tile_.first_row + place_.first_token + token, i, k);
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
__device__ void multiply_tile(const GemmParams& params, const MmaTile& tile, uint8_t* shared) {
  MmaCopies<Config> copies(params, tile, shared);
  const MmaPlace<Config> place(tile);
  const int num_stages = params.k_tiles * Config::kStagesPerChunk;
  MmaSums<Config> sums;
  copies.meet();
#pragma unroll
  for (int i = 0; i < Config::kStages - 1; ++i) {
    if (i < num_stages) copies.copy(i, i);
    end_copy_group();
  }
  int stage = 0;
  int free_stage = Config::kStages - 1;
#pragma unroll 1
  for (int i = 0; i < num_stages; ++i) {
    wait_for_copy_groups<Config::kStages - 2>();
    // The stage is there, and nobody reads the one before it any more.
    __syncthreads();
    if (i + Config::kStages - 1 < num_stages) copies.copy(i + Config::kStages - 1, free_stage);
    end_copy_group();
    if (place.num_rows > 0) {
      sums.add(shared_address(shared) + static_cast<uint32_t>(stage * Config::kStageBytes), place);
    }
    free_stage = stage;
    stage = stage + 1 == Config::kStages ? 0 : stage + 1;
  }
  if (place.num_rows > 0) MmaResults<Config>(params, tile, place).store(sums);
}

template <class Config>
__device__ void multiply_rows(const GemmParams& params, const MmaTile& tile, uint8_t* shared) {
  if constexpr (Config::kTokens == kMostMmaTokens) {
    using Rest = typename Config::OfRest;
    static_assert(Rest::kThreads == Config::kThreads && Rest::kCtaStrips == Config::kCtaStrips);
    static_assert(Rest::kSharedBytes <= Config::kSharedBytes);
    if (tile.num_rows <= Config::kRestRows) return multiply_tile<Rest>(params, tile, shared);
  }
  multiply_tile<Config>(params, tile, shared);
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::ctas_per_sm())
    multiply_tiles_kernel(const __grid_constant__ GemmParams params) {
  NF_DYNAMIC_SHARED(uint8_t, shared, 16);
  wait_for_previous_grids();
  trigger_dependent_launch();
  const MmaTile tile = MmaTile::of<Config>(params);
  if (tile.num_rows == 0) return;
  if constexpr (Config::kCoding == MmaCoding::kMxfp4) {
    if (params.expert_encodings[tile.expert] == 0) {
      using Near = typename Config::template OfCoding<MmaCoding::kMxfp4Near>;
      return multiply_rows<Near>(params, tile, shared);
    }
  }
  multiply_rows<Config>(params, tile, shared);
}

template <class Config>
void launch_multiply_tiles(const GemmParams& params, Stream stream, int device) {
  const auto ctas = static_cast<unsigned>(params.max_tiles) * static_cast<unsigned>(params.splits) *
                    static_cast<unsigned>(ceil_div(params.blocks, Config::kCtaStrips));
  constexpr auto kKernel = multiply_tiles_kernel<Config>;
  static SharedMemoryOptIn opt_in;
  opt_in.allow(reinterpret_cast<const void*>(kKernel), Config::kSharedBytes, device);
  launch(kKernel, {dim3(ctas), dim3(Config::kThreads), Config::kSharedBytes}, stream, params);
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
    case 64:
      return launch_for.template operator()<64>();
    default:
      return launch_for.template operator()<128>();
  }
}

}  // namespace narrowfloat
