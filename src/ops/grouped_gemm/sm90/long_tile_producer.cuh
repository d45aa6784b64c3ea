// The producer warpgroup of the kernel for long tiles (gemm_fp8_long.cu): finds items, tells the
// consumers, and fills the ring. Thread 0 requests weights and rows as boxes, every thread copies a
// token's scales, three those of the panels.
#pragma once

#include "device/ptx/async_copy.cuh"
#include "device/ptx/cluster.cuh"
#include "device/ptx/tensor_copy.cuh"
#include "ops/grouped_gemm/sm90/long_tile.cuh"

namespace narrowfloat {

template <bool kTakesNarrow>
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
    const WorkListOf<kTakesNarrow> work(gemm_, shared_.queue, WorkTiling::of<LongTile>(1), true);
    if (!work.has_next()) return;
    const WorkItem item = work.item();
    if (!item.has_copies) return;
    for (int unit = 0; unit < min(gemm_.units, LongTile::kStages); ++unit) {
      copy_weights(item, unit);
      at_.advance();
    }
  }

  __device__ void run() {
    WorkListOf<kTakesNarrow> work(gemm_, shared_.queue, WorkTiling::of<LongTile>(1));
    for (; work.has_next(); work.next()) {
      const WorkItem item = work.item();
      publish(work.taken(), item);
      if (item.has_copies) copy_item(item, gemm_.tiles_are_complete && work.is_first());
      if (thread_ == 0) work.choose_next();
    }
    publish(work.taken(), {.block = kNoBlock});
  }

 private:
  __device__ void publish(uint32_t number, const WorkItem& item) const {
    if (thread_ == 0) ItemRing(shared_.items).publish(number, item);
  }

  // is_requested: the weights of the ring's first round.
  __device__ void copy_item(const WorkItem& item, bool is_requested) {
    find_scales(item);
    for (int unit = 0; unit < gemm_.units; ++unit) {
      ring_.wait_empty(at_);
      if (thread_ == 0) {
        if (!is_requested || unit >= LongTile::kStages) copy_weights(item, unit);
        copy_rows(item, unit);
      }
      copy_scales(unit);
      arrive_after_copies(ring_.full(at_));
      at_.advance();
    }
  }

  // By one thread. Where two blocks share weights, each copies a chunk for both. Panels behind an
  // expert's last are those of the next, or zeros; nothing is stored of them.
  __device__ void copy_weights(const WorkItem& item, int unit) const {
    constexpr int kUnitLines = unit_stride(WeightCoding::kFp8) / kUnitRowBytes;
    const uint32_t full = ring_.full(at_);
    const bool is_narrow = kTakesNarrow && item.is_narrow;
    const uint32_t chunk_bytes =
        (is_narrow ? 1 : LongTile::kTileBlocks) * LongTile::kPanelPartBytes;
    const uint32_t bytes = LongTile::kRowBytes + LongTile::kChunks * chunk_bytes;
    arrive_and_expect(full, item.num_rows > 0 ? bytes : 0);
    if (item.num_rows <= 0) return;
    const TensorMap* map = is_narrow ? &params_.narrow_weights : &params_.weights;
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

  __device__ void find_scales(const WorkItem& item) {
    token_scale_ = thread_ < item.num_rows
                       ? gemm_.group_scales + (item.first_row + thread_) * gemm_.group_row_stride
                       : nullptr;
    // By the last threads, while the first one requests boxes.
    const int block = item.block + 127 - thread_;
    const bool has_scale = block < min(item.block + LongTile::kTileBlocks, gemm_.blocks);
    weight_scale_ = has_scale ? gemm_.image + item.expert * gemm_.expert_bytes +
                                    block * gemm_.block_bytes + unit_code_bytes(WeightCoding::kFp8)
                              : nullptr;
  }

  __device__ void copy_scales(int unit) const {
    if (token_scale_ != nullptr) {
      copy_4(shared_address(&shared_.token_scales[at_.stage][thread_]),
             token_scale_ + unit * gemm_.group_stride, 4);
    }
    if (weight_scale_ != nullptr) {
      copy_4(shared_address(&shared_.weight_scales[at_.stage][127 - thread_]),
             weight_scale_ + static_cast<int64_t>(unit) * unit_stride(WeightCoding::kFp8), 4);
    }
  }

  const LongTileParams& params_;
  const GemmParams& gemm_;
  LongTileStorage& shared_;
  const LongTileRing& ring_;
  int thread_;
  LongTilePosition at_;
  const float* token_scale_ = nullptr;
  const uint8_t* weight_scale_ = nullptr;
};

}  // namespace narrowfloat
