// swizzled_128x4: what FP4 tensor cores read. Tiles of 128 rows x 4 blocks are 512 contiguous
// scales; inside a tile
//
//   offset = (row % 32) * 16 + (row / 32 % 4) * 4 + block % 4
//
// so 16 consecutive scales are the 4 blocks of rows r, r + 32, r + 64, r + 96. Tiles follow each
// other along the blocks first. As a tensor: [row tiles][block tiles][32][4][4].
#pragma once

#include "tensor/layouts/image_extents.h"

namespace narrowfloat {

struct Swizzled128x4Layout {
  static constexpr ScaleLayoutId kId = ScaleLayoutId::kSwizzled128x4;
  static constexpr std::string_view kName = "swizzled_128x4";
  static constexpr int64_t kTileRows = 128;
  static constexpr int64_t kTileBlocks = 4;

  NF_HOST_DEVICE static constexpr ImageExtents padded(const ImageExtents& logical) {
    return {round_up(logical.rows, kTileRows), round_up(logical.blocks, kTileBlocks)};
  }
  NF_HOST_DEVICE static constexpr int64_t offset(int64_t row, int64_t block,
                                                 const ImageExtents& extents) {
    // Powers of two divide unsigned numbers by shifts, and 32-bit operands stay 32 bits wide.
    const auto r = static_cast<uint64_t>(row);
    const auto b = static_cast<uint64_t>(block);
    const auto block_tiles = static_cast<uint64_t>(ceil_div(extents.blocks, kTileBlocks));
    const uint64_t tile = (r / kTileRows) * block_tiles + b / kTileBlocks;
    return static_cast<int64_t>(tile * (kTileRows * kTileBlocks) + (r % 32) * 16 +
                                (r % kTileRows / 32) * 4 + b % kTileBlocks);
  }
  NF_HOST_DEVICE static constexpr ScalePlace place(int64_t offset, const ImageExtents& extents) {
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
