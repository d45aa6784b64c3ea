// Tile sizes of the Hopper GEMM, and what they take of an SM: registers, stages, shared memory.
#pragma once

#include <array>
#include <type_traits>

#include "base/float_ops.h"
#include "device/ptx/cluster.cuh"
#include "device/register_budget.h"
#include "device/ring.cuh"
#include "ops/grouped_gemm/packed/packed_weights.h"
#include "ops/grouped_gemm/sm90/epilogue.cuh"
#include "ops/grouped_gemm/sm90/gemm_params.h"
#include "ops/grouped_gemm/sm90/tile_scheduler.cuh"

namespace narrowfloat {

// In clusters split along n, each CTA has half of a group of 128 columns of one tile and sends its
// maximum of every token to the other one. This lies in shared memory. A CTA that has the maximum
// of both has received all that the other one sends.
template <int kTokens>
struct ClusterMaxima {
  uint64_t barrier;
  float received[kTokens];

  // Called by one thread, before a barrier of the cluster.
  __device__ void init() {
    init_barrier(shared_address(&barrier), 1);
    fence_barrier_init();
  }

  // The maximum over both CTAs. Called once, by one thread for every token, also for those that the
  // tile has not. Numbers win over NaN.
  [[nodiscard]] __device__ float over_cluster(int token, float own) {
    const uint32_t arrived = shared_address(&barrier);
    if (token == 0) arrive_and_expect(arrived, sizeof(received));
    send_to_block(shared_address(&received[token]), cluster_rank() ^ 1U, float_bits(own), arrived);
    wait_for_phase(arrived, 0);
    return fmaxf(own, received[token]);
  }
};
struct NoClusterMaxima {};

inline constexpr int kWarpgroup = 128;
inline constexpr int kConsumers = 2;  // Warpgroups.
inline constexpr int kGemmThreads = (1 + kConsumers) * kWarpgroup;

// It decides, with the tokens of a tile, how a kernel multiplies.
enum class GemmKind : int {
  kAny,
  kBf16,        // Weights of 8 or 16 bits become bf16.
  kFp4,         // Those of 4 bits do.
  kBf16Groups,  // Weights become bf16, and sums are promoted every 128 columns.
  kE4m3,        // Weights become E4M3.
  kE4m3Groups,  // The same, and sums are promoted every 128 columns.
  kFp8,         // The tensor cores read FP8 weights as they are.
};

// A kernel's output tile, and what it takes of an SM beside shared memory.
struct TileConfig {
  GemmKind kind;
  int tokens;       // Those of an m tile, 128 at most, and of a remainder (tile_scheduler.cuh).
  int n_sub_tiles;  // A warpgroup's, of 64 weight rows each.
  int multicast;    // CTAs of a cluster that share weights.
  int ctas_per_sm;
  int consumer_registers;  // A thread's.
  int producer_registers;
};

// An m tile of up to 128 rows takes the first row of its kind that has as many tokens. Two n
// sub-tiles halve the reads of activations, where registers take them; with one, two CTAs share an
// SM, and of their four consumer warps a scheduler some can run while others wait, which pays where
// decoding takes most of the instructions and sums have no second set. A remainder has up to 32
// rows or, where temporary sums lie beside those of 256 weight rows, 16; FP8 weights have a kernel
// of their own for it, where many experts have one (gemm_wide.cu). Few tokens with weights that
// become E4M3 are bound by latency with two CTAs an SM.
inline constexpr std::array kTileConfigs{TileConfig{GemmKind::kE4m3, 8, 1, 1, 3, 72, 24},
                                         TileConfig{GemmKind::kE4m3, 16, 1, 1, 3, 72, 24},
                                         TileConfig{GemmKind::kE4m3Groups, 8, 1, 1, 3, 72, 24},
                                         TileConfig{GemmKind::kAny, 8, 1, 1, 2, 104, 32},
                                         TileConfig{GemmKind::kAny, 16, 1, 1, 2, 104, 32},
                                         TileConfig{GemmKind::kAny, 32, 1, 1, 2, 104, 32},
                                         TileConfig{GemmKind::kBf16, 64, 2, 1, 1, 224, 56},
                                         TileConfig{GemmKind::kBf16, 160, 2, 1, 1, 224, 56},
                                         TileConfig{GemmKind::kFp4, 64, 1, 1, 2, 96, 48},
                                         TileConfig{GemmKind::kFp4, 160, 2, 1, 1, 224, 56},
                                         TileConfig{GemmKind::kBf16Groups, 64, 2, 1, 1, 224, 56},
                                         TileConfig{GemmKind::kBf16Groups, 160, 1, 1, 1, 224, 56},
                                         TileConfig{GemmKind::kE4m3, 64, 1, 1, 2, 96, 48},
                                         TileConfig{GemmKind::kE4m3, 144, 2, 1, 1, 232, 40},
                                         TileConfig{GemmKind::kE4m3Groups, 64, 2, 1, 1, 224, 56},
                                         TileConfig{GemmKind::kE4m3Groups, 144, 2, 1, 1, 232, 40},
                                         TileConfig{GemmKind::kFp8, 64, 2, 1, 1, 232, 40},
                                         TileConfig{GemmKind::kFp8, 128, 2, 2, 1, 224, 56},
                                         TileConfig{GemmKind::kFp8, 144, 2, 1, 1, 224, 56}};

template <class Weights>
constexpr GemmKind kind_of(bool has_groups) {
  if (Weights::kIsSharedOperand) return GemmKind::kFp8;
  if (activation_bytes(Weights::kEncoding) == 1) {
    return has_groups ? GemmKind::kE4m3Groups : GemmKind::kE4m3;
  }
  if (has_groups) return GemmKind::kBf16Groups;
  return code_bits_of(Weights::kEncoding) == 4 ? GemmKind::kFp4 : GemmKind::kBf16;
}

constexpr TileConfig config_of(GemmKind kind, int tokens) {
  for (const TileConfig& config : kTileConfigs) {
    const bool is_of_kind = config.kind == kind || config.kind == GemmKind::kAny;
    if (is_of_kind && config.tokens >= tokens) return config;
  }
  return {};
}

// WeightsPolicy decodes k tiles (weight_decoder.cuh). kHasGroupSums: sums are promoted every 128
// columns, times scales; else the tensor cores sum all columns. kIsSplitAlongN: two CTAs have a
// tile together.
template <class WeightsPolicy, bool kHasGroupSums, int kTileTokens, bool kIsSplitAlongN = false>
struct GemmShapeOf {
  using Weights = WeightsPolicy;
  static constexpr TileConfig kConfig = config_of(kind_of<Weights>(kHasGroupSums), kTileTokens);
  static_assert(kConfig.tokens == kTileTokens);
  static constexpr bool kHasGroups = kHasGroupSums;
  // Tokens of a tile: kMTile, and those of a remainder after it (tile_scheduler.cuh).
  static constexpr int kTokens = kTileTokens;
  static constexpr int kMTile = kTokens > 128 ? 128 : kTokens;
  static constexpr int kSums = kTokens / 2;  // A thread's, for 64 weight rows.
  static constexpr bool kIsSmall = kConfig.ctas_per_sm > 1;
  static constexpr bool kIsSharedOperand = Weights::kIsSharedOperand;
  // Tokens are wgmma's rows (gemm_fp8_sm90.cuh) instead of its columns.
  static constexpr bool kIsTokenMajor = kIsSharedOperand && kTokens > 32;
  // Tiles have a remainder, which is multiplied the other way round (gemm_fp8_sm90.cuh).
  static constexpr bool kHasRemainders = kIsTokenMajor && kTokens > 128;
  // CTAs of a cluster with multicast multiply neighbouring token tiles with the same weights: what
  // one copies of these from L2 serves both.
  static constexpr int kMulticast = kConfig.multicast;
  static constexpr int kGroupKTiles = 128 / k_tile_cols(Weights::kEncoding);
  static constexpr int kBlocks = kConfig.n_sub_tiles;
  static constexpr int kTileBlocks = 2 * kBlocks;
  // Beside rows with one scale each, NVFP4 that does not fit E4M3 has no scales every 128 columns.
  static constexpr bool kMayLackGroupScales =
      kHasGroups && Weights::kEncoding == WeightEncoding::kNvfp4Rounded;
  // CTAs of a cluster split along n multiply neighbouring weight rows with the same token tile, of
  // which each has the half of a group of 128 columns of the second GEMM's rows
  // (ClusterMaxima). For calls of no more tiles than clusters: each has one, at most.
  static constexpr int kNSplit = kIsSplitAlongN ? 2 : 1;
  static constexpr int kClusterCtas = kMulticast * kNSplit;  // CTAs of a cluster of either kind.
  // The main loop is that of gemm_prefill_sm90.cuh.
  static constexpr bool kHasPrefillLoop =
      !kIsSharedOperand && kGroupKTiles == 1 && kTokens > 32 && kBlocks == 2;
  // Rows of a TMA box of activations (gemm_kernel_sm90.cuh); 0 in kernels that gather all rows.
  static constexpr int kBoxRows = kHasPrefillLoop && kTokens > 64 ? kTokens / 2 : 0;
  static_assert(kBoxRows % 8 == 0);

  // Factors of columns are requested before the main loop (SharedColumns).
  static constexpr bool kSharesColumns =
      kHasPrefillLoop || (!kIsSharedOperand && kGroupKTiles == 1 && kTokens <= 32);

  // The place of a token's scale of a group in a stage: those of a thread's tokens in 16 of
  // gemm_prefill_sm90.cuh's, 2c, 2c + 1, 2c + 8 and 2c + 9, side by side.
  NF_HOST_DEVICE static constexpr int scale_place(int token) {
    if (!kHasPrefillLoop) return token;
    return token / 16 * 16 + token % 8 / 2 * 4 + token / 8 % 2 * 2 + token % 2;
  }
  static_assert(!kHasPrefillLoop || kTokens % 16 == 0);
  // Consumers have their tiles from the producer (tile_scheduler.cuh), where they would wait
  // longest for the list, which takes 2500 cycles, and the producer gathers rows as fast all the
  // same.
  static constexpr bool kHasTileRing = kHasRemainders || (kHasPrefillLoop && kTokens > 64);

  // Numbers of columns that main loops of decoded weights can multiply, ascending, up to kTokens: a
  // tile takes the first that its rows fit.
  NF_HOST_DEVICE static constexpr int columns(int width) {
    constexpr int kOfMany[] = {32, 64, 80, 96, 112, 128, 144, 160};
    // A decode of so many instructions that eight main loops would not be one function.
    constexpr int kOfManyRounded[] = {32, 96, 128, 160};
    constexpr int kOfManyFp8[] = {48, 80, 96, 112, 128, 144};
    constexpr int kOf64[] = {32, 40, 48, 64};
    // Half of the columns take half of the promotion and half of the tensor cores' work, which
    // counts where weights become E4M3.
    if (kTokens == 16 || kTokens == 32) {
      constexpr bool kBecomesE4m3 = kGroupKTiles == 1 && !kIsSharedOperand;
      return kBecomesE4m3 && width == 0 ? kTokens / 2 : kTokens;
    }
    if (kTokens <= 64) return kTokens == 64 ? kOf64[width] : kTokens;
    if (kGroupKTiles == 1) return kOfManyFp8[width];
    return Weights::kEncoding == WeightEncoding::kNvfp4Rounded ? kOfManyRounded[width]
                                                               : kOfMany[width];
  }

  // Rows that the mode's second GEMM reads (epilogue_activation.cuh), and the passes that give a
  // tile 128 columns of them.
  NF_HOST_DEVICE static constexpr bool writes(RowFormat format) {
    return writes_rows(Weights::kEncoding, kHasGroups, format) &&
           takes_rows(Weights::kEncoding, kTokens, format);
  }
  static constexpr bool kHasHalfGroups = kBlocks == 1 && writes(RowFormat::kFp8Group);
  static_assert(kNSplit == 1 || (kHasHalfGroups && kIsSmall && kMulticast == 1));
  static constexpr int kGroupPasses = kHasHalfGroups && kNSplit == 1 ? 2 : 1;

  // Decoding NVFP4 takes more code; with 48 tokens ptxas would make more than one function (C7510).
  static constexpr int kBranchTokens = Weights::kEncoding == WeightEncoding::kNvfp4Fp8 ? 24 : 48;
  static constexpr bool kHasHalfChunks = kTokens == 64 && !kIsSharedOperand && kGroupKTiles == 1;
  // Tokens that the epilogue is unrolled over (epilogue_activation.cuh): as many
  // as registers allow, since each chunk moves all sums, or so few that tiles with half of their
  // rows save something.
  static constexpr int kChunkTokens = kHasHalfChunks                      ? 32
                                      : kTokens <= 64 || kIsSharedOperand ? kTokens
                                      : kBlocks == 1                      ? 32
                                      : writes(RowFormat::kNvfp4)         ? 16
                                      : kHasPrefillLoop                   ? kBranchTokens
                                                                          : kTokens / 2;
  static constexpr int kChunks = kTokens / kChunkTokens;
  // No sums move if the code of all chunks fits the instruction cache
  // (epilogue_activation.cuh).
  static constexpr bool kUnrollsChunks = kHasPrefillLoop;
  static_assert(kTokens % kChunkTokens == 0 && kChunkTokens % 8 == 0);

  static_assert(fits_registers(kGemmThreads, kConfig.ctas_per_sm, kConfig.producer_registers,
                               kConfig.consumer_registers));

  // Around 16 KB of weights a stage; whole promotion groups.
  static constexpr int kMostKTiles = 8192 / k_tile_code_bytes(Weights::kEncoding);
  static constexpr bool kHasLongStages = kTokens < 32 || (kTokens == 32 && kGroupPasses == 1);
  static constexpr int kFewKTiles =
      (kHasGroups && kTokens > 128) || kHasPrefillLoop ? kGroupKTiles : 2;
  static constexpr int kKTiles = kHasLongStages || kMostKTiles < 2 ? kMostKTiles : kFewKTiles;
  static constexpr int kGroups = kHasGroups ? kKTiles / kGroupKTiles : 0;
  static constexpr int kKTileBytes = k_tile_bytes(Weights::kEncoding);
  // Subtiles start at multiples of 1024; several that one instruction reads follow each other, with
  // their scales elsewhere.
  static constexpr int kBlockStageBytes = kIsTokenMajor      ? k_tile_code_bytes(Weights::kEncoding)
                                          : kIsSharedOperand ? round_up(kKTiles * kKTileBytes, 1024)
                                                             : kKTiles * kKTileBytes;
  static constexpr int kTokenTileBytes = kTokens * kKTileRowBytes;  // A k tile of activations.
  static constexpr int kStageBytes =
      kTileBlocks * kBlockStageBytes + kKTiles * kTokenTileBytes + kGroups * kTokens * 4;
  static constexpr int kSharedBytes = (kConfig.ctas_per_sm == 3   ? 75
                                       : kConfig.ctas_per_sm == 2 ? 112
                                                                  : 226) *
                                      1024;

  // An activation takes shared memory (epilogue_activation.cuh): warpgroups swap u and g of a few
  // tokens of each thread, park a first pass, and tell each other maxima.
  static constexpr int kSwapPairs = kBlocks == 2 ? 0 : kTokens < 16 ? 1 : 2;
  static constexpr int kParkedPairs = kGroupPasses == 2 ? kTokens / 8 : 0;
  static constexpr int kMaxima =
      writes(RowFormat::kMxfp8) || writes(RowFormat::kFp8Group) ? 4 * kBlocks * kTokens : 0;
  static constexpr int kRest = kConfig.ctas_per_sm == 3 ? 512 : 2048;  // Barriers and the like.
  static constexpr int kFixedBytes = (kSwapPairs + kParkedPairs) * 256 * 8 + kRest + kMaxima * 4 +
                                     2 * kTokens * 8 +
                                     (kIsTokenMajor || kSharesColumns ? 256 * 8 : 0);
  static constexpr int kFittingStages = (kSharedBytes - kFixedBytes) / kStageBytes;
  static constexpr int kStages = kFittingStages > 8 ? 8 : kFittingStages;
  static_assert(kStages >= 3 && kKTiles % (kHasGroups ? kGroupKTiles : 1) == 0);
};

// Small tiles with weights that become E4M3: so little work hides what a warp waits for that the
// producer sleeps while the ring is full, and consumers read shared memory as early as they can.
template <class Shape>
inline constexpr bool kIsSmallE4m3 =
    Shape::kIsSmall && !Shape::kIsSharedOperand && Shape::kGroupKTiles == 1;

template <class Shape>
using GemmParamsOf = std::conditional_t<(Shape::kBoxRows > 0), BoxedGemmParams, GemmParams>;

// With tiles_are_complete, CTAs of small tiles find their first tile before previous kernels are
// done, and wait for these with it; other CTAs wait at once.
template <class Shape>
NF_HOST_DEVICE inline bool is_early(const GemmParams& params) {
  return Shape::kIsSmall && params.tiles_are_complete;
}

// Tiles on their way from the producer to consumers, and where it gathers their rows from.
template <int kTokens>
struct FoundTiles {
  static_assert(kTokens == 144);  // Sources of a row of the array are three vectors.
  PublishedTiles tiles;
  alignas(16) int32_t row_sources[16][kTokens / 16 + 3];  // Row r is [r % 16][r / 16].
};
struct NoFoundTiles {};

struct NoSharedColumns {};

// Arrays have at least one element.
constexpr int some(int count) { return count > 0 ? count : 1; }

template <class Shape>
struct GemmStorage {
  uint8_t rows[Shape::kStages][Shape::kKTiles][Shape::kTokenTileBytes];
  uint8_t weights[Shape::kStages][Shape::kTileBlocks][Shape::kBlockStageBytes];
  float weight_scales[Shape::kIsTokenMajor ? Shape::kStages : 1][Shape::kTileBlocks][4];
  alignas(16) float group_scales[Shape::kStages][Shape::kGroups > 0 ? Shape::kGroups : 1]
                                [Shape::kTokens];
  float2 swapped[kConsumers][some(Shape::kSwapPairs)][Shape::kSwapPairs > 0 ? kWarpgroup : 1];
  float2 parked[some(Shape::kParkedPairs)][Shape::kParkedPairs > 0 ? 2 * kWarpgroup : 1];
  float maxima[some(Shape::kMaxima)];
  TokenFactor factors[kConsumers][Shape::kTokens];
  alignas(16) ColumnFactor columns[kConsumers][Shape::kIsTokenMajor ? kWarpgroup : 1];
  std::conditional_t<Shape::kSharesColumns, SharedColumns[kConsumers], NoSharedColumns>
      shared_columns;
  RingBarriers<Shape::kStages> barriers;
  TileQueue queue;
  std::conditional_t<Shape::kHasTileRing, FoundTiles<Shape::kTokens>, NoFoundTiles> found;
  std::conditional_t<(Shape::kNSplit > 1), ClusterMaxima<Shape::kTokens>, NoClusterMaxima>
      cluster_maxima;
};

}  // namespace narrowfloat
