// The producer warpgroup of the kernel for long tiles (gemm_fp8_long.cu), by warps:
//
//   0      requests weights and rows as boxes, by its first lane; three copy the panels' scales
//   1, 2   copy the tokens' scales, a lane those of two
//   3      finds items and tells all others, which takes 2500 cycles: while those copy, or the ring
//          would run empty between two items
#pragma once

#include "device/ptx/async_copy.cuh"
#include "device/ptx/cluster.cuh"
#include "device/ptx/tensor_copy.cuh"
#include "ops/grouped_gemm/sm90/long_tile.cuh"

namespace narrowfloat {

class LongTileProducer {
 public:
  __device__ LongTileProducer(const LongTileParams& params, LongTileStorage& shared,
                              const LongTileRing& ring)
      : params_(params),
        gemm_(params.gemm),
        shared_(shared),
        ring_(ring),
        thread_(static_cast<int>(threadIdx.x) % 128) {}

  // With tiles_are_complete (gemm_producer.cuh), by the first thread of any warpgroup, before
  // previous kernels are done: the first item's weights, as many stages as the ring has.
  __device__ void request_weights() {
    const LongTileList work(gemm_, shared_.queue, WorkTiling::of<LongTile>(1), true);
    if (!work.has_next()) return;
    const WorkItem item = work.item();
    if (!item.has_copies) return;
    for (int unit = 0; unit < min(gemm_.units, LongTile::kStages); ++unit) {
      copy_weights(item, unit);
      at_.advance();
    }
  }

  __device__ void run() {
    if (thread_ / 32 == LongTile::kCopyWarps) {
      find_items();
    } else {
      copy_items();
    }
  }

 private:
  // An item is chosen when the one before has so many units left to copy: late, as blocks that are
  // ahead of others shall take more of them.
  static constexpr int kUnitsAhead = 5;

  __device__ void find_items() const {
    const bool is_first_lane = thread_ % 32 == 0;
    LongTileList work(gemm_, shared_.queue, WorkTiling::of<LongTile>(1));
    for (; work.has_next(); work.next()) {
      const WorkItem item = work.item();
      if (is_first_lane) {
        items().publish(work.taken(), item);
        wait_for_phase(shared_address(&shared_.next_item_wanted), work.taken() % 2);
        work.choose_next();
      }
    }
    if (is_first_lane) items().publish(work.taken(), {.block = kNoBlock});
  }

  __device__ void copy_items() {
    ItemRing list = items();
    for (bool is_first = true; list.has_item(); is_first = false) {
      const WorkItem item = list.item();
      list.advance(thread_ % 32);
      if (item.has_copies) {
        copy_item(item, gemm_.tiles_are_complete && is_first);
      } else {
        want_next_item();
      }
    }
  }
  __device__ void want_next_item() const {
    if (thread_ == 0) arrive(shared_address(&shared_.next_item_wanted));
  }
  [[nodiscard]] __device__ ItemRing items() const { return ItemRing(shared_.items); }

  // is_requested: the weights of the ring's first round.
  __device__ void copy_item(const WorkItem& item, bool is_requested) {
    find_scales(item);
    const int last_units = max(gemm_.units - kUnitsAhead, 0);
    for (int unit = 0; unit < gemm_.units; ++unit) {
      ring_.wait_empty(at_);
      if (unit == last_units) want_next_item();
      if (thread_ == 0) {
        if (!is_requested || unit >= LongTile::kStages) copy_weights(item, unit);
        copy_rows(item, unit);
      }
      copy_scales();
      arrive_after_copies(ring_.full(at_));
      at_.advance();
    }
  }

  // By one thread. Where two blocks share weights, each copies a chunk for both. Panels behind an
  // expert's last are those of the next, or zeros; nothing is stored of them.
  __device__ void copy_weights(const WorkItem& item, int unit) const {
    constexpr int kUnitLines = unit_stride(WeightCoding::kFp8) / kUnitRowBytes;
    const uint32_t full = ring_.full(at_);
    const uint32_t chunk_bytes =
        (item.is_narrow ? 1 : LongTile::kTileBlocks) * LongTile::kPanelPartBytes;
    const uint32_t bytes = LongTile::kRowBytes + LongTile::kChunks * chunk_bytes;
    arrive_and_expect(full, item.num_rows > 0 ? bytes : 0);
    if (item.num_rows <= 0) return;
    const TensorMap* map = item.is_narrow ? &params_.narrow_weights : &params_.weights;
    const uint32_t chunks = shared_address(shared_.weights[at_.stage]);
    const int block = item.expert * gemm_.blocks + item.block;
    if (item.is_shared) {
      const int chunk = static_cast<int>(cluster_rank());
      copy_box_to_blocks(chunks + chunk * chunk_bytes, map, 0,
                         unit * kUnitLines + chunk * LongTile::kPanelPart, block, full,
                         (1U << LongTile::kTeam) - 1);
      return;
    }
    for (int chunk = 0; chunk < LongTile::kChunks; ++chunk) {
      copy_box(chunks + chunk * chunk_bytes, map, 0,
               unit * kUnitLines + chunk * LongTile::kPanelPart, block, full);
    }
  }

  // Behind copy_weights(), which expects their bytes. Rows behind the item's last are others'.
  __device__ void copy_rows(const WorkItem& item, int unit) const {
    if (item.num_rows <= 0) return;
    copy_box(shared_address(shared_.rows[at_.stage]), &params_.rows, unit * kUnitRowBytes,
             static_cast<int>(item.first_row), ring_.full(at_));
  }

  [[nodiscard]] __device__ bool copies_token_scales() const { return thread_ >= 32; }
  [[nodiscard]] __device__ int first_token() const { return thread_ - 32; }
  static constexpr int kTokenDistance = 64;  // To the lane's other one.

  __device__ void find_scales(const WorkItem& item) {
    if (copies_token_scales()) {
      first_scale_ = token_scale(item, first_token());
      second_scale_ = token_scale(item, first_token() + kTokenDistance);
      scale_step_ = gemm_.group_stride * static_cast<int64_t>(sizeof(float));
    } else {
      first_scale_ = panel_scale(item, thread_);
      scale_step_ = unit_stride(WeightCoding::kFp8);
    }
  }
  // Of the first unit; null where there is none.
  [[nodiscard]] __device__ const uint8_t* token_scale(const WorkItem& item, int token) const {
    if (token >= item.num_rows) return nullptr;
    const int64_t row = item.first_row + token;
    return reinterpret_cast<const uint8_t*>(gemm_.group_scales + row * gemm_.group_row_stride);
  }
  [[nodiscard]] __device__ const uint8_t* panel_scale(const WorkItem& item, int panel) const {
    const int block = item.block + panel;
    if (panel >= LongTile::kTileBlocks || block >= gemm_.blocks) return nullptr;
    return gemm_.image + item.expert * gemm_.expert_bytes + block * gemm_.block_bytes +
           unit_code_bytes(WeightCoding::kFp8);
  }

  // Of the stage's unit; units come one after the other.
  __device__ void copy_scales() {
    const uint32_t target = copies_token_scales()
                                ? shared_address(&shared_.token_scales[at_.stage][first_token()])
                                : shared_address(&shared_.weight_scales[at_.stage][thread_]);
    copy_scale(target, first_scale_);
    copy_scale(target + kTokenDistance * sizeof(float), second_scale_);
  }
  __device__ void copy_scale(uint32_t target, const uint8_t*& scale) const {
    if (scale == nullptr) return;
    copy_4(target, scale, 4);
    scale += scale_step_;
  }

  const LongTileParams& params_;
  const GemmParams& gemm_;
  LongTileStorage& shared_;
  const LongTileRing& ring_;
  int thread_;
  LongTilePosition at_;
  // What the thread copies next.
  const uint8_t* first_scale_ = nullptr;
  const uint8_t* second_scale_ = nullptr;
  int64_t scale_step_ = 0;
};

}  // namespace narrowfloat
