// The order of work of the Hopper GEMM: which 128 or 256 weight rows a block multiplies with which
// token tile, read from the permutation on the device.
//
// Tiles are taken in groups of kTileGroup; inside a group all tiles of the same weight rows
// come first. So blocks that run at the same time share weights and the activations of a few tiles,
// and both stay in L2.
#pragma once

#include "ops/grouped_gemm/sm90/gemm_params.h"

namespace narrowfloat {

struct WorkItem {
  int expert = 0;
  int block = 0;  // The first block of 64 weight rows.
  int64_t first_row = 0;
  int num_rows = 0;  // 0: nothing to do.
};

class WorkList {
 public:
  // tile_blocks: blocks of 64 weight rows of an item.
  __device__ WorkList(const GemmParams& params, int tokens, int tile_blocks)
      : params_(params),
        tokens_(tokens),
        tile_blocks_(tile_blocks),
        row_tiles_(static_cast<uint32_t>((params.blocks + tile_blocks - 1) / tile_blocks)),
        next_(blockIdx.x) {
    const int tiles = min(max(*params.num_tiles, 0), params.max_tiles);
    pieces_ = static_cast<uint32_t>(tiles * params.splits);
    end_ = pieces_ * row_tiles_;
  }

  [[nodiscard]] __device__ bool has_next() const { return next_ < end_; }
  __device__ void next() { next_ += gridDim.x; }

  [[nodiscard]] __device__ WorkItem item() const {
    const uint32_t group_items = kTileGroup * row_tiles_;
    const uint32_t group = next_ / group_items;
    const uint32_t in_group = next_ - group * group_items;
    const uint32_t group_pieces = min(kTileGroup, pieces_ - group * kTileGroup);
    const uint32_t row_tile = in_group / group_pieces;
    const uint32_t piece = group * kTileGroup + (in_group - row_tile * group_pieces);
    const auto splits = static_cast<uint32_t>(params_.splits);
    return make_item(static_cast<int>(row_tile), static_cast<int>(piece / splits),
                     static_cast<int>(piece % splits));
  }

 private:
  static constexpr uint32_t kTileGroup = 8;

  // Whatever the device holds: no row outside the buffers, no expert outside the weights.
  [[nodiscard]] __device__ WorkItem make_item(int row_tile, int tile, int split) const {
    const int64_t tile_row = static_cast<int64_t>(tile) * params_.token_tile;
    WorkItem item{.expert = params_.tile_experts[tile], .block = tile_blocks_ * row_tile};
    item.first_row = tile_row + static_cast<int64_t>(split) * tokens_;
    int64_t end = min(tile_row + params_.token_tile, params_.row_limit);
    end = min(end, static_cast<int64_t>(params_.row_ends[tile]));
    end = min(end, item.first_row + tokens_);
    if (has_expert(item.expert) && end > item.first_row) {
      item.num_rows = static_cast<int>(end - item.first_row);
    }
    return item;
  }

  [[nodiscard]] __device__ bool has_expert(int expert) const {
    if (expert < 0 || expert >= params_.experts) return false;
    return params_.expert_forms == nullptr || params_.expert_forms[expert] == params_.form;
  }

  const GemmParams& params_;
  int tokens_;
  int tile_blocks_;
  uint32_t row_tiles_;
  uint32_t next_;
  uint32_t pieces_;
  uint32_t end_;
};

}  // namespace narrowfloat
