// Maxima of groups of 128 columns whose halves two blocks of a cluster have, of one item: each
// block sends its own of every token to the other one.
#pragma once

#include "base/float_ops.h"
#include "device/ptx/cluster.cuh"
#include "device/ring.cuh"

namespace narrowfloat {

// In shared memory. A block that has the maximum of both has received all that the other one sends.
template <int kTokens>
struct TeamMaxima {
  uint64_t barrier;
  float received[kTokens];

  // By one thread, before a barrier of the team.
  __device__ void init() {
    init_barrier(shared_address(&barrier), 1);
    fence_barrier_init();
  }

  // Over both blocks, once; by one thread for every token, also of those that the item has not.
  // Numbers win over NaN.
  [[nodiscard]] __device__ float over_team(int token, float own) {
    const uint32_t arrived = shared_address(&barrier);
    if (token == 0) arrive_and_expect(arrived, sizeof(received));
    send_to_block(shared_address(&received[token]), cluster_rank() ^ 1U, float_bits(own), arrived);
    wait_for_phase(arrived, 0);
    return fmaxf(own, received[token]);
  }
};
struct NoTeamMaxima {};

}  // namespace narrowfloat
