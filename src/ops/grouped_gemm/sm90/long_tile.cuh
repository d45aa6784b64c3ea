// Tiles of 128 tokens and 192 weight rows, E4M3 both, for rows that lie one behind the other: what
// they take of a multiprocessor, and what their kernel reads (gemm_fp8_long.cu). An expert's last
// panel of 64 weight rows, where it is alone, is a narrow tile of its own.
#pragma once

#include "device/register_budget.h"
#include "device/ring.cuh"
#include "ops/grouped_gemm/sm90/finish.cuh"
#include "ops/grouped_gemm/sm90/item_ring.cuh"
#include "runtime/cuda/tensor_map.h"

namespace narrowfloat {

struct LongTile {
  static constexpr int kTokens = 128;
  static constexpr int kPieceTokens = kTokens;
  static constexpr int kTileBlocks = 3;  // Panels of 64 weight rows.
  // Blocks of threads that form a cluster and multiply neighbouring token tiles with the same
  // weights: what one copies of these from L2 serves both.
  static constexpr int kTeam = 2;
  static constexpr int kRowTeam = 1;
  static constexpr int kStages = 4;
  static constexpr int kConsumers = 2;  // Warpgroups; each has half of the tokens.
  static constexpr int kWarps = kConsumers * 4;
  static constexpr int kCopyWarps = 3;  // Of the producer's four; the last one finds items.
  static constexpr int kThreads = (1 + kConsumers) * 128;
  static constexpr int kProducerRegisters = 40;
  static constexpr int kConsumerRegisters = 232;
  static_assert(fits_registers(kThreads, 1, kProducerRegisters, kConsumerRegisters));

  // The weight rows in two chunks, of which each has half of every panel: rows 32c to 32c + 31 of
  // the three. A block of a team copies one chunk for both.
  static constexpr int kChunks = 2;
  static constexpr int kPanelPart = kUnitRows / kChunks;
  static constexpr int kPanelSums = kPanelPart / 2;  // Of a thread, a panel and a chunk.
  static constexpr int kWeightBytes = kTileBlocks * kUnitRows * kUnitRowBytes;
  static constexpr int kRowBytes = kTokens * kUnitRowBytes;
  static constexpr int kPanelPartBytes = kPanelPart * kUnitRowBytes;

  // Results of a warp on their way to memory: a box of 16 tokens x 128 bytes for each panel.
  static constexpr int kWarpTokens = 16;
  static constexpr int kBoxBytes = kWarpTokens * 128;
};

// How results of whole groups of 16 tokens leave shared memory.
enum class LongTileStore : uint8_t {
  kRows,    // By the warp, as those of fewer tokens do.
  kBoxes,   // Each panel as a box.
  kPanels,  // All panels as one box.
};

struct LongTileParams {
  GemmParams gemm;
  TensorMap weights;         // [block of any expert][row of 128 bytes in its units][128 bytes]
  TensorMap narrow_weights;  // The same, of which a box has one block.
  TensorMap rows;            // [row][bytes], in the 128-byte swizzle.
  TensorMap output;          // Likewise: [row][column], for kPanels [panel][row][column].
  LongTileStore store;
  bool has_plain_factors;  // PlainFactors (finish_long_tile.cuh) are all there are.
};

struct LongTileStorage {
  uint8_t rows[LongTile::kStages][LongTile::kRowBytes];
  uint8_t weights[LongTile::kStages][LongTile::kWeightBytes];
  uint8_t results[LongTile::kWarps][LongTile::kTileBlocks][LongTile::kBoxBytes];
  float token_scales[LongTile::kStages][LongTile::kTokens];
  float weight_scales[LongTile::kStages][4];
  TokenFactor tokens[LongTile::kTokens];
  alignas(16) ColumnFactor columns[LongTile::kConsumers][LongTile::kTileBlocks * kUnitRows];
  RingBarriers<LongTile::kStages> barriers;
  ItemQueue queue;
  uint64_t next_item_wanted;  // A phase for each item; the producer's warps among themselves.
  PublishedItems items;
};

// With narrow items where one panel is left.
using LongTileList = WorkListOf<true>;
using LongTileRing = Ring<LongTile::kStages>;
using LongTilePosition = RingPosition<LongTile::kStages>;

// Of 64 tokens and the weight rows of `kPanels` panels, in a thread: 4j + 2h + i is token 16w + q +
// 8h and row 8j + 2c + i of the chunks (weight_units.h).
template <int kPanels>
using LongTileSums = float[LongTile::kChunks * kPanels * LongTile::kPanelSums];

}  // namespace narrowfloat
