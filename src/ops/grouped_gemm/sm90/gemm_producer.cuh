// The producer warpgroup of the Hopper GEMM (gemm_kernel.cuh): fills the ring. Thread 0 requests
// weights, every thread gathers 16-byte pieces of activation rows.
//
// tiles_are_complete: the list of tiles was complete before the kernel in front of this one passed
// its own wait_for_previous_grids(), as for the second GEMM of a layer, which the first one
// separates from the permutation. No block of this kernel starts before all of that one's have
// allowed it or have ended, which they do behind their wait (a rule: MoeRun::multiply_second). So
// the tiles can be read at once, and weights, which nobody writes, fill the ring while rows are
// still being made.
#pragma once

#include "base/int_math.h"
#include "device/ptx/async_copy.cuh"
#include "device/ptx/grid_dependency.cuh"
#include "device/ptx/tensor_copy.cuh"
#include "ops/grouped_gemm/sm90/finish_activated.cuh"
#include "ops/grouped_gemm/sm90/work_list.cuh"

namespace narrowfloat {

template <class Shape>
class Producer {
 public:
  using TheRing = Ring<Shape::kStages>;
  using TheList = WorkListFor<Shape>;

  __device__ Producer(const GemmParamsOf<Shape>& params, GemmStorage<Shape>& shared,
                      const TheRing& ring)
      : params_(params), shared_(shared), ring_(ring), thread_(threadIdx.x % kWarpgroup) {}

  // With tiles_are_complete, by the first thread of any warpgroup, before previous kernels are
  // done: the first item's weights, as many stages as the ring has.
  __device__ void request_weights() {
    const int passes = passes_of<Shape>(params_);
    const TheList work(params_, shared_.queue, WorkTiling::of<Shape>(passes), true);
    if (!work.has_next()) return;
    const WorkItem item = work.item();
    if (!item.has_copies) return;
    for (int unit = 0; unit < min(params_.units, kRingUnits); unit += Shape::kUnits) {
      copy_weights(item, item.block, unit);
      at_.advance();
    }
  }

  __device__ void run() {
    const int passes = passes_of<Shape>(params_);
    TheList work(params_, shared_.queue, WorkTiling::of<Shape>(passes), is_early<Shape>(params_));
    for (; work.has_next(); work.next()) {
      const WorkItem item = work.item();
      if (is_early<Shape>(params_) && work.is_first()) {
        wait_for_previous_grids();
        work.end_early();
      }
      if constexpr (Shape::kHasItemRing) publish(work.taken(), item);
      if (item.has_copies) copy_item(item, passes, work.is_first());
      // The next grid's blocks take the places of those that end, and request their weights.
      if (Shape::kIsSmall && work.is_first()) trigger_dependent_launch();
      // The ring is full meanwhile; a claim among the copies would take registers.
      if (thread_ == 0) work.choose_next();
    }
    if constexpr (Shape::kHasItemRing) publish(work.taken(), {.block = kNoBlock});
  }

 private:
  static constexpr int kGroupUnits = Shape::kGroupUnits;
  static constexpr int kRingUnits = Shape::kStages * Shape::kUnits;
  static constexpr int kTileBlocks = Shape::kTileBlocks;
  // A thread copies 16 bytes of a row of a unit, of every kRowsPerPass-th row.
  static constexpr int kRowsPerPass = kWarpgroup / 8;
  static constexpr int kSources = Shape::kTokens > kRowsPerPass ? Shape::kTokens / kRowsPerPass : 1;
  // Units a pass covers where one has fewer rows.
  static constexpr int kUnitStep =
      Shape::kTokens < kRowsPerPass ? kRowsPerPass / Shape::kTokens : 1;
  static constexpr int kScaleSources =
      Shape::kHasGroups ? (Shape::kTokens + kWarpgroup - 1) / kWarpgroup : 0;

  __device__ void publish(uint32_t number, const WorkItem& item) const {
    if (thread_ == 0) ItemRing(shared_.found.items).publish(number, item);
  }

  __device__ void copy_item(const WorkItem& item, int passes, bool is_first) {
    find_rows(item);
    for (int pass = 0; pass < passes; ++pass) {
      const bool is_requested = params_.tiles_are_complete && is_first && pass == 0;
      const int first_block = item.block + pass * kTileBlocks;
      if constexpr (Shape::kIsTokenMajor) find_weight_scale(item, first_block);
      for (int unit = 0; unit < params_.units; unit += Shape::kUnits) {
        ring_.wait_empty(at_);
        if (!is_requested || unit >= kRingUnits) copy_weights(item, first_block, unit);
        copy_stage(item, unit);
      }
    }
  }

  // The thread's 16 bytes of a row's first unit.
  [[nodiscard]] __device__ const uint8_t* piece_of(int64_t row) const {
    return params_.values + row * params_.row_bytes + thread_ % 8 * 16;
  }

  // But for weights.
  __device__ void copy_stage(const WorkItem& item, int unit) {
    if constexpr (Shape::kBoxRows > 0) {
      copy_boxes_or_rows(item, unit);
    } else if constexpr (Shape::kHasItemRing) {
      copy_shared_rows(unit);
    } else {
      copy_rows(unit);
    }
    if constexpr (Shape::kIsTokenMajor) copy_weight_scale(unit);
    if constexpr (Shape::kHasGroups) copy_group_scales(unit / kGroupUnits);
    arrive_after_copies(ring_.full(at_));
    at_.advance();
  }

  // Boxes are requested by one thread, where gathered rows take a thread for each 16 bytes. There
  // are zeros after the last row and column of the activations; rows of other tiles multiply to
  // sums that nobody reads.
  __device__ void copy_boxes_or_rows(const WorkItem& item, int unit) const {
    if (params_.has_row_boxes) {
      copy_row_boxes(item, unit);
    } else {
      copy_shared_rows(unit);
    }
    // The arrival that boxes make.
    if (!params_.has_row_boxes && thread_ == 0) arrive(ring_.full(at_));
  }
  __device__ void copy_row_boxes(const WorkItem& item, int unit) const {
    if (thread_ != 0) return;
    constexpr int kBoxBytes = Shape::kBoxRows * kUnitRowBytes;
    const int units = min(Shape::kUnits, params_.units - unit);
    const int boxes = ceil_div(item.num_rows, Shape::kBoxRows);
    arrive_and_expect(ring_.full(at_), static_cast<uint32_t>(units * boxes * kBoxBytes));
#pragma unroll 1
    for (int i = 0; i < units; ++i) {
      const uint32_t shared_rows = shared_address(shared_.rows[at_.stage][i]);
#pragma unroll 1
      for (int box = 0; box < boxes; ++box) {
        copy_box(shared_rows + static_cast<uint32_t>(box * kBoxBytes), &params_.row_boxes,
                 (unit + i) * kUnitRowBytes,
                 static_cast<int>(item.first_row) + box * Shape::kBoxRows, ring_.full(at_));
      }
    }
  }

  // Of a panel, by one of the last threads: a bulk copy of 16 bytes takes as long as one of some
  // thousand.
  __device__ void copy_weight_scale(int unit) const {
    if (weight_scale_ == nullptr) return;
    copy_4(shared_address(shared_.weight_scales[at_.stage][kWarpgroup - 1 - thread_]),
           weight_scale_ + static_cast<int64_t>(unit) * unit_stride(Shape::Weights::kCoding), 4);
  }
  __device__ void find_weight_scale(const WorkItem& item, int first_block) {
    const int block = first_block + kWarpgroup - 1 - thread_;
    const bool has_scale = block < min(first_block + kTileBlocks, params_.blocks);
    weight_scale_ = has_scale ? params_.image + item.expert * params_.expert_bytes +
                                    block * params_.block_bytes + Shape::kBlockStageBytes
                              : nullptr;
  }

  // Row of the activations behind row `row` of the tile; -1 for absent ones.
  __device__ int source_of(const WorkItem& item, int row) const {
    if (row >= item.num_rows) return -1;
    const int64_t tile_row = item.first_row + row;
    if (params_.row_to_token == nullptr) return static_cast<int>(tile_row);
    const int token = params_.row_to_token[tile_row];
    return token >= 0 && token < params_.input_rows ? token : -1;
  }

  __device__ void find_rows(const WorkItem& item) {
    row_passes_ = ceil_div(item.num_rows, kRowsPerPass);
    if constexpr (Shape::kHasItemRing) {
      share_sources(item);
    } else {
      keep_sources(item);
    }
  }
  // Of all rows, in shared memory: the registers that are left to producers of items, 40 or 56 with
  // scales of rows, do not hold nine of them beside an item.
  __device__ void share_sources(const WorkItem& item) const {
    constexpr int kBarrier = 2 + kConsumers;
    // The thread that has told the consumers.
    __syncwarp();
    // Nobody reads the last item's any more.
    sync_threads(kBarrier, kWarpgroup);
    for (int row = thread_; row < Shape::kTokens; row += kWarpgroup) {
      shared_.found.row_sources[row] = source_of(item, row);
    }
    sync_threads(kBarrier, kWarpgroup);
  }
  // Of the rows that the thread copies, in registers.
  __device__ void keep_sources(const WorkItem& item) {
    has_row_ = 0;
#pragma unroll
    for (int i = 0; i < kSources; ++i) {
      const int source = source_of(item, thread_ / 8 % Shape::kTokens + i * kRowsPerPass);
      const int row = source >= 0 ? source : 0;
      global_rows_[i] = piece_of(row);
      has_row_ |= (source >= 0 ? 1U : 0U) << i;
    }
#pragma unroll
    for (int i = 0; i < kScaleSources; ++i) {
      scale_sources_[i] = source_of(item, thread_ + i * kWarpgroup);
    }
  }

  // Where two blocks share them, each copies half of them for both.
  __device__ void copy_weights(const WorkItem& item, int first_block, int unit) const {
    if (thread_ != 0) return;
    // Several units are one copy.
    static_assert(Shape::kUnits == 1 || unit_stride(Shape::Weights::kCoding) == Shape::kUnitBytes);
    const int count = min(Shape::kUnits, params_.units - unit);
    const int blocks =
        item.num_rows > 0 ? max(0, min(kTileBlocks, params_.blocks - first_block)) : 0;
    const auto bytes = static_cast<uint32_t>(Shape::kIsTokenMajor ? Shape::kBlockStageBytes
                                                                  : count * Shape::kUnitBytes);
    arrive_and_expect(ring_.full(at_), static_cast<uint32_t>(blocks) * bytes);
    const uint8_t* global_units = params_.image + item.expert * params_.expert_bytes +
                                  first_block * params_.block_bytes +
                                  static_cast<int64_t>(unit) * unit_stride(Shape::Weights::kCoding);
    const int own = item.is_shared ? kTileBlocks / Shape::kTeam : kTileBlocks;
    const int first = item.is_shared ? static_cast<int>(cluster_rank()) * own : 0;
    for (int block = first; block < min(blocks, first + own); ++block) {
      copy_to_team(item, shared_address(shared_.weights[at_.stage][block]),
                   global_units + block * params_.block_bytes, bytes);
    }
  }

  __device__ void copy_to_team(const WorkItem& item, uint32_t shared, const uint8_t* global,
                               uint32_t bytes) const {
    if (Shape::kTeam > 1 && item.is_shared) {
      copy_bulk_to_blocks(shared, global, bytes, ring_.full(at_), (1U << Shape::kTeam) - 1);
    } else {
      copy_bulk(shared, global, bytes, ring_.full(at_));
    }
  }

  // Addresses are sums of what changes with the stage and constants of the thread.
  __device__ void copy_rows(int unit) const {
    const int row = thread_ / 8 % Shape::kTokens;
    const int first = thread_ / 8 / Shape::kTokens;  // Unit of the stage; 0 unless kUnitStep > 1.
    const int chunk = (thread_ ^ row) % 8;
    const uint32_t shared_rows = shared_address(shared_.rows[at_.stage][first]) +
                                 static_cast<uint32_t>(row * 128 + chunk * 16);
    const int first_byte = (unit + first) * kUnitRowBytes;
    if (first >= Shape::kUnits) return;
#pragma unroll
    for (int step = 0; step < Shape::kUnits; step += kUnitStep) {
      const bool has_cols =
          first_byte + step * kUnitRowBytes + thread_ % 8 * 16 < params_.row_bytes;
      const uint32_t mask = has_cols ? has_row_ : 0;
#pragma unroll
      for (int i = 0; i < kSources; ++i) {
        if (kSources > 2 && i >= row_passes_) break;
        copy_16(
            shared_rows + static_cast<uint32_t>(step * Shape::kPanelBytes + i * kRowsPerPass * 128),
            global_rows_[i] + first_byte + step * kUnitRowBytes, (mask >> i & 1U) != 0 ? 16 : 0);
      }
    }
  }

  // The same with sources from shared memory, a few passes at a time without branches between them.
  __device__ void copy_shared_rows(int unit) const {
    static_assert(Shape::kUnits == 1 && kSources == 9);
    const int first_byte = unit * kUnitRowBytes + thread_ % 8 * 16;
    const uint32_t bytes = first_byte < params_.row_bytes ? 16 : 0;
    copy_pieces<0, 4>(first_byte, bytes);
    if (row_passes_ > 4) copy_pieces<4, 4>(first_byte, bytes);
    if (row_passes_ > 8) copy_pieces<8, kSources - 8>(first_byte, bytes);
  }
  // All sources in front of the copies: a load behind a copy stays there, so that each would wait
  // for its own.
  template <int kFirst, int kCount>
  __device__ void copy_pieces(int first_byte, uint32_t bytes) const {
    const int row = thread_ / 8;
    int sources[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      sources[i] = shared_.found.row_sources[row + (kFirst + i) * kRowsPerPass];
    }
    const uint32_t shared_rows =
        shared_address(shared_.rows[at_.stage][0]) +
        static_cast<uint32_t>((kFirst * kRowsPerPass + row) * 128 + (thread_ ^ row) % 8 * 16);
    const uint8_t* pieces = params_.values + first_byte;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      // Both have 31 bits.
      const uint64_t offset = uint64_t{static_cast<uint32_t>(max(sources[i], 0))} *
                              static_cast<uint32_t>(params_.row_bytes);
      copy_16(shared_rows + static_cast<uint32_t>(i * kRowsPerPass * 128), pieces + offset,
              bytes & ~static_cast<uint32_t>(sources[i] >> 31));
    }
  }

  // The i-th of the rows whose scales the thread copies.
  [[nodiscard]] __device__ int scale_source(int i) const {
    if constexpr (Shape::kHasItemRing) {
      return shared_.found.row_sources[thread_ + i * kWarpgroup];
    } else {
      return scale_sources_[i];
    }
  }
  __device__ void copy_group_scales(int group) const {
#pragma unroll
    for (int i = 0; i < kScaleSources; ++i) {
      const int token = thread_ + i * kWarpgroup;
      if (token < Shape::kTokens) copy_group_scales(group, token, scale_source(i));
    }
  }
  __device__ void copy_group_scales(int group, int token, int source) const {
#pragma unroll
    for (int i = 0; i < Shape::kGroups; ++i) {
      const bool is_there = source >= 0 && (group + i) * kGroupUnits < params_.units;
      const int64_t offset =
          is_there ? source * params_.group_row_stride + (group + i) * params_.group_stride : 0;
      copy_4(shared_address(&shared_.group_scales[at_.stage][i][Shape::scale_place(token)]),
             params_.group_scales + offset, is_there ? 4 : 0);
    }
  }

  const GemmParamsOf<Shape>& params_;
  GemmStorage<Shape>& shared_;
  const TheRing& ring_;
  int thread_;
  RingPosition<Shape::kStages> at_;
  const uint8_t* global_rows_[kSources];
  uint32_t has_row_ = 0;  // A bit for each.
  // Rows behind the item's last multiply to sums that nobody reads, whatever they are.
  int row_passes_ = kSources;
  int scale_sources_[some(kScaleSources)];
  const uint8_t* weight_scale_ = nullptr;  // Of a panel's first unit, where kIsTokenMajor.
};

}  // namespace narrowfloat
