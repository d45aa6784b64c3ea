// A ring of stages in shared memory between producer and consumer threads: a pair of barriers a
// stage and a position that both sides advance in the same order.
//
//   producer   ring.wait_empty(at)   fill stage at.stage, arrive on ring.full(at)   at.advance()
//   consumer   ring.wait_full(at)    read stage at.stage    ring.release(at)        at.advance()
#pragma once

#include "device/ptx/mbarrier.cuh"

namespace narrowfloat {

template <int kStages>
struct RingPosition {
  int stage = 0;
  uint32_t parity = 0;

  __device__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1U;
    }
  }
};

template <int kStages>
struct RingBarriers {
  uint64_t full_barriers[kStages];
  uint64_t empty_barriers[kStages];
};

// Waits until the phase of this parity has ended.
__device__ inline void wait_for_phase(uint32_t barrier, uint32_t parity) {
  while (!try_wait(barrier, parity)) {
  }
}

// The same for waits that may be long.
__device__ inline void wait_asleep_for_phase(uint32_t barrier, uint32_t parity) {
  while (!try_wait_asleep(barrier, parity)) {
  }
}

template <int kStages>
class Ring {
 public:
  using Position = RingPosition<kStages>;

  __device__ explicit Ring(RingBarriers<kStages>& shared)
      : full_(shared_address(shared.full_barriers)),
        empty_(shared_address(shared.empty_barriers)) {}

  // Called by one thread before a CTA barrier, with the arrivals that end a phase of each kind.
  __device__ void init(uint32_t producers, uint32_t consumers) const {
    for (int stage = 0; stage < kStages; ++stage) {
      init_barrier(full_ + 8 * stage, producers);
      init_barrier(empty_ + 8 * stage, consumers);
    }
    fence_barrier_init();
  }
  [[nodiscard]] __device__ uint32_t full(const Position& at) const { return full_ + 8 * at.stage; }
  [[nodiscard]] __device__ uint32_t empty(const Position& at) const {
    return empty_ + 8 * at.stage;
  }
  __device__ void wait_full(const Position& at) const { wait_for_phase(full(at), at.parity); }
  // All stages start empty.
  __device__ void wait_empty(const Position& at) const {
    wait_for_phase(empty(at), at.parity ^ 1U);
  }
  __device__ void wait_full_asleep(const Position& at) const {
    wait_asleep_for_phase(full(at), at.parity);
  }
  __device__ void wait_empty_asleep(const Position& at) const {
    wait_asleep_for_phase(empty(at), at.parity ^ 1U);
  }
  __device__ void release(const Position& at) const { arrive(empty(at)); }
  // Called by all lanes of a warp after they have read; one of them arrives for the warp.
  __device__ void release_warp(const Position& at, int lane) const {
    __syncwarp();
    if (lane == 0) release(at);
  }

 private:
  uint32_t full_;
  uint32_t empty_;
};

}  // namespace narrowfloat
