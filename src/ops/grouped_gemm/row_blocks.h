// The rows of a call in blocks that the CPU GEMMs multiply with one strip of weights after another:
// up to 128 rows of one expert.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "ops/grouped_gemm/gemm_shape.h"

namespace narrowfloat {

inline constexpr int64_t kBlockRows = 128;
// Tasks of fewer multiply-adds are not split further.
inline constexpr int64_t kGrainProducts = 32768;

// Consecutive m tiles of one expert, and the number of row blocks before them.
struct Segment {
  int64_t first_block;
  int32_t expert;
  int32_t first_tile;
  int32_t end_tile;
};

inline int64_t segment_bytes(const GroupedGemmProblem& problem) {
  return round_up(problem.experts * static_cast<int64_t>(sizeof(Segment)), kGemmAlignment);
}

// The valid rows of a row block.
struct RowBlock {
  int64_t expert;
  int64_t count = 0;
  std::array<int64_t, kBlockRows> rows;
};

class RowBlocks {
 public:
  // list: memory of segment_bytes(). Experts ascend, so there are at most as many segments as
  // experts.
  RowBlocks(const GemmTiles& tiles, Segment* list) : tiles_(tiles), list_(list) {
    for (int64_t tile = 0; tile < tiles.count;) {
      int64_t end = tile + 1;
      while (end < tiles.count && tiles.experts[end] == tiles.experts[tile]) ++end;
      list[segments_++] = {.first_block = count_,
                           .expert = tiles.experts[tile],
                           .first_tile = static_cast<int32_t>(tile),
                           .end_tile = static_cast<int32_t>(end)};
      count_ += ceil_div((end - tile) * tiles.token_tile, kBlockRows);
      tile = end;
    }
  }

  [[nodiscard]] int64_t count() const { return count_; }

  void find(int64_t index, RowBlock& block) const {
    const Segment& segment = segment_of(index);
    const int64_t begin =
        segment.first_tile * tiles_.token_tile + (index - segment.first_block) * kBlockRows;
    const int64_t end = std::min(begin + kBlockRows, segment.end_tile * tiles_.token_tile);
    block.expert = segment.expert;
    for (int64_t row = begin; row < end; ++row) {
      if (row < tiles_.row_ends[row / tiles_.token_tile]) {
        block.rows[static_cast<size_t>(block.count++)] = row;
      }
    }
  }

 private:
  [[nodiscard]] const Segment& segment_of(int64_t block) const {
    const Segment* next =
        std::upper_bound(list_, list_ + segments_, block,
                         [](int64_t b, const Segment& segment) { return b < segment.first_block; });
    return *(next - 1);
  }

  const GemmTiles& tiles_;
  const Segment* list_;
  int64_t segments_ = 0;
  int64_t count_ = 0;
};

}  // namespace narrowfloat
