// swizzled_8x4: tiles of 8 rows x 4 blocks, row-major inside (32 contiguous scales), for small
// numbers of tokens. Tiles follow each other along the blocks first.
#pragma once

#include "tensor/layouts/scale_extents.h"

namespace narrowfloat {

struct Swizzled8x4Layout {
  static constexpr ScaleLayoutId kId = ScaleLayoutId::kSwizzled8x4;
  static constexpr std::string_view kName = "swizzled_8x4";
  static constexpr int64_t kTileRows = 8;
  static constexpr int64_t kTileBlocks = 4;

  NF_HOST_DEVICE static constexpr ScaleExtents padded(const ScaleExtents& logical) {
    return {round_up(logical.rows, kTileRows), round_up(logical.blocks, kTileBlocks)};
  }
  NF_HOST_DEVICE static constexpr int64_t offset(int64_t row, int64_t block,
                                                 const ScaleExtents& extents) {
    return offset_in_tiles(static_cast<uint64_t>(row), static_cast<uint64_t>(block),
                           static_cast<uint64_t>(ceil_div(extents.blocks, kTileBlocks)));
  }
  // offset() for an unsigned type that holds the number of tiles: 32 bits are cheaper on a GPU.
  // block_tiles: tiles along the blocks.
  template <typename Index>
  NF_HOST_DEVICE static constexpr int64_t offset_in_tiles(Index row, Index block,
                                                          Index block_tiles) {
    const Index tile = row / 8U * block_tiles + block / 4U;
    const Index place = (row % 8U) * 4U + block % 4U;
    return static_cast<int64_t>(tile) * (kTileRows * kTileBlocks) + static_cast<int64_t>(place);
  }
  NF_HOST_DEVICE static constexpr ScalePlace place(int64_t offset, const ScaleExtents& extents) {
    const auto block_tiles = static_cast<uint64_t>(ceil_div(extents.blocks, kTileBlocks));
    const auto position = static_cast<uint64_t>(offset);
    const uint64_t tile = position / (kTileRows * kTileBlocks);
    const uint64_t in_tile = position % (kTileRows * kTileBlocks);
    const uint64_t row = tile / block_tiles * kTileRows + in_tile / kTileBlocks;
    const uint64_t block = tile % block_tiles * kTileBlocks + in_tile % kTileBlocks;
    return {static_cast<int64_t>(row), static_cast<int64_t>(block)};
  }
};

}  // namespace narrowfloat
