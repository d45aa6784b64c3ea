// The sizes of the TMA kernel's tile (gemm_fp8_tma_sm90.cu), its parameters, and its shared memory.
#pragma once

#include <cstdint>

#include "device/register_budget.h"
#include "device/ring.cuh"
#include "ops/grouped_gemm/sm90/epilogue.cuh"
#include "ops/grouped_gemm/sm90/tile_scheduler.cuh"
#include "runtime/cuda/tensor_map.h"

namespace narrowfloat {

// The sizes of a tile, and the registers and shared memory of a CTA.
struct TmaTile {
  static constexpr int kTokens = 128;
  static constexpr int kMTile = kTokens;
  static constexpr int kTileBlocks = 3;  // Subtiles of 64 weight rows.
  // CTAs of a cluster multiply neighbouring token tiles with the same weights: what one copies of
  // these from L2 serves both.
  static constexpr int kMulticast = 2;
  static constexpr int kNSplit = 1;
  static constexpr int kStages = 4;
  static constexpr int kConsumers = 2;  // Warpgroups; each has half of the tokens.
  static constexpr int kWarps = kConsumers * 4;
  static constexpr int kCopyWarps = 2;  // The producer's third warp finds tiles.
  static constexpr int kThreads = (1 + kConsumers) * 128;
  static constexpr int kProducerRegisters = 40;
  static constexpr int kConsumerRegisters = 232;
  static_assert(fits_registers(kThreads, 1, kProducerRegisters, kConsumerRegisters));

  // The weight rows in two chunks, of which each has half of every subtile: rows 32c to 32c + 31 of
  // the three. A CTA of a cluster copies one chunk for both.
  static constexpr int kChunks = 2;
  static constexpr int kSubtilePart = kSubtileRows / kChunks;
  static constexpr int kSubtileSums =
      kSubtilePart / 2;  // Each thread's, for a subtile and a chunk.
  static constexpr int kWeightBytes = kTileBlocks * kSubtileRows * kKTileRowBytes;
  static constexpr int kRowBytes = kTokens * kKTileRowBytes;
  static constexpr int kSubtilePartBytes = kSubtilePart * kKTileRowBytes;

  // Results of a warp on their way to memory: a box of 16 tokens x 128 bytes for each subtile.
  static constexpr int kWarpTokens = 16;
  static constexpr int kBoxBytes = kWarpTokens * 128;
};

// How results of whole groups of 16 tokens leave shared memory.
enum class TmaStore : uint8_t {
  kRows,      // The warp copies them, as it does those of fewer tokens.
  kBoxes,     // Each subtile as a box.
  kSubtiles,  // All subtiles as one box.
};

struct TmaGemmParams {
  GemmParams gemm;
  TensorMap weights;         // [subtile of any expert][row of 128 bytes in its k tiles][128 bytes]
  TensorMap narrow_weights;  // The same, with boxes of one subtile.
  TensorMap rows;            // [row][bytes], in the 128-byte swizzle.
  TensorMap output;          // Likewise: [row][column], for kSubtiles [subtile][row][column].
  TmaStore store;
  int tile_group;          // TileSizes::group.
  bool has_plain_factors;  // PlainFactors are all there are.
  bool has_whole_scales;   // A token's scales of four k tiles are 16 aligned bytes.
};

// The scales of as many k tiles as there are stages.
struct TmaScales {
  float tokens[TmaTile::kTokens][TmaTile::kStages];
  float weights[TmaTile::kStages][4];  // One for each subtile.
};

struct TmaStorage {
  static constexpr int kScaleSlots = 2;

  uint8_t rows[TmaTile::kStages][TmaTile::kRowBytes];
  uint8_t weights[TmaTile::kStages][TmaTile::kWeightBytes];
  uint8_t results[TmaTile::kWarps][TmaTile::kTileBlocks][TmaTile::kBoxBytes];
  alignas(16) TmaScales scales[kScaleSlots];
  TokenFactor tokens[TmaTile::kTokens];
  alignas(16) ColumnFactor columns[TmaTile::kConsumers][TmaTile::kTileBlocks * kSubtileRows];
  RingBarriers<TmaTile::kStages> barriers;
  RingBarriers<kScaleSlots> scale_barriers;
  TileQueue queue;
  uint64_t next_tile_wanted;  // A phase for each tile; the producer's warps among themselves.
  PublishedTiles tiles;
};

// With narrow tiles where one subtile is left.
using TmaScheduler = TileSchedulerOf<true>;
using TmaRing = Ring<TmaTile::kStages>;
using TmaPosition = RingPosition<TmaTile::kStages>;
using ScaleRing = Ring<TmaStorage::kScaleSlots>;
using ScalePosition = RingPosition<TmaStorage::kScaleSlots>;

// Tiles pass whole rounds of the ring, so that stages are constants of the main loop: where k tiles
// do not fill the last round, its other stages stay empty.
__device__ inline int num_rounds(int k_tiles) {
  return (k_tiles + TmaTile::kStages - 1) / TmaTile::kStages;
}

// A thread's sums of 64 tokens and the weight rows of `kSubtiles` subtiles: 4j + 2h + i is token
// 16w + q + 8h and row 8j + 2c + i of the chunks (packed_weights.h).
template <int kSubtiles>
using TmaSums = float[TmaTile::kChunks * kSubtiles * TmaTile::kSubtileSums];

}  // namespace narrowfloat
