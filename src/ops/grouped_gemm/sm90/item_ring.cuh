// Items on their way from the warp of a block that finds them (work_list.cuh) to others, which then
// load nothing of the permutation: in shared memory, until all that read an item are done with it.
//
//   finder, one thread   publish(i, item) for its i-th item, then an item of kNoBlock: the end
//   readers, all warps   while (has_item()) { item() ... advance() }
//
// Readers are consumers, and the warps that copy where another one of the producer's finds items.
#pragma once

#include "device/reduce.cuh"
#include "device/ring.cuh"
#include "ops/grouped_gemm/sm90/work_list.cuh"

namespace narrowfloat {

inline constexpr int kNoBlock = -1;

struct PublishedItems {
  static constexpr int kSlots = ItemQueue::kSlots;
  RingBarriers<kSlots> barriers;
  WorkItem items[kSlots];
};

class ItemRing {
 public:
  // By one thread, before a block barrier: `warps` read the items.
  __device__ static void init(PublishedItems& shared, uint32_t warps) {
    Ring<PublishedItems::kSlots>(shared.barriers).init(1, warps);
  }

  __device__ explicit ItemRing(PublishedItems& shared) : shared_(shared) {}

  __device__ void publish(uint32_t number, const WorkItem& item) const {
    const auto at = WorkList::position_of(number);
    ring().wait_empty(at);
    shared_.items[at.stage] = item;
    arrive(ring().full(at));
  }

  [[nodiscard]] __device__ bool has_item() const {
    ring().wait_full(WorkList::position_of(taken_));
    return item().block != kNoBlock;
  }
  [[nodiscard]] __device__ const WorkItem& item() const {
    return shared_.items[WorkList::position_of(taken_).stage];
  }
  // By all lanes of a warp. From the first one, so that the compiler knows it to be the same in
  // all: it takes uniform registers then, none of the main loop's. Without what teams and narrow
  // items have, which no reader of it does.
  [[nodiscard]] __device__ WorkItem uniform_item() const {
    const auto uniform = [](auto value) { return __shfl_sync(kFullWarp, value, 0); };
    const WorkItem& own = item();
    return {.expert = uniform(own.expert),
            .block = uniform(own.block),
            .first_row = uniform(own.first_row),
            .num_rows = uniform(own.num_rows),
            .has_copies = uniform(own.has_copies ? 1 : 0) != 0};
  }
  __device__ void advance(int lane) {
    ring().release_warp(WorkList::position_of(taken_), lane);
    ++taken_;
  }

 private:
  [[nodiscard]] __device__ Ring<PublishedItems::kSlots> ring() const {
    return Ring<PublishedItems::kSlots>(shared_.barriers);
  }

  PublishedItems& shared_;
  uint32_t taken_ = 0;
};

}  // namespace narrowfloat
