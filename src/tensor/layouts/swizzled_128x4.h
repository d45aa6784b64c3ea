// swizzled_128x4, the layout that FP4 tensor cores read. Tiles of 128 rows x 4 blocks are 512
// contiguous scales; inside a tile
//
//   offset = (row % 32) * 16 + (row / 32 % 4) * 4 + block % 4
//
// so 16 consecutive scales are the 4 blocks of rows r, r + 32, r + 64, r + 96. Tiles follow each
// other along the blocks first. As a tensor: [row tiles][block tiles][32][4][4].
#pragma once

#include "tensor/layouts/scale_extents.h"

namespace narrowfloat {

struct Swizzled128x4Layout {
  static constexpr ScaleLayoutId kId = ScaleLayoutId::kSwizzled128x4;
  static constexpr std::string_view kName = "swizzled_128x4";
  static constexpr int64_t kTileRows = 128;
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
    const Index tile = row / 128U * block_tiles + block / 4U;
    const Index place = (row % 32U) * 16U + (row % 128U / 32U) * 4U + block % 4U;
    return static_cast<int64_t>(tile) * (kTileRows * kTileBlocks) + static_cast<int64_t>(place);
  }
  NF_HOST_DEVICE static constexpr ScalePlace place(int64_t offset, const ScaleExtents& extents) {
    const auto block_tiles = static_cast<uint64_t>(ceil_div(extents.blocks, kTileBlocks));
    const auto position = static_cast<uint64_t>(offset);
    const uint64_t tile = position / (kTileRows * kTileBlocks);
    const uint64_t in_tile = position % (kTileRows * kTileBlocks);
    const uint64_t row = tile / block_tiles * kTileRows + (in_tile / 4 % 4) * 32 + in_tile / 16;
    const uint64_t block = tile % block_tiles * kTileBlocks + in_tile % kTileBlocks;
    return {static_cast<int64_t>(row), static_cast<int64_t>(block)};
  }
};

}  // namespace narrowfloat
