// swizzled_8x4: tiles of 8 rows x 4 blocks, row-major inside (32 contiguous scales), for few
// tokens. Tiles follow each other along the blocks first.
#pragma once

#include "tensor/layouts/image_extents.h"

namespace narrowfloat {

struct Swizzled8x4Layout {
  static constexpr ScaleLayoutId kId = ScaleLayoutId::kSwizzled8x4;
  static constexpr std::string_view kName = "swizzled_8x4";
  static constexpr int64_t kTileRows = 8;
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
    return static_cast<int64_t>(tile * (kTileRows * kTileBlocks) + (r % kTileRows) * kTileBlocks +
                                b % kTileBlocks);
  }
  NF_HOST_DEVICE static constexpr ScalePlace place(int64_t offset, const ImageExtents& extents) {
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
