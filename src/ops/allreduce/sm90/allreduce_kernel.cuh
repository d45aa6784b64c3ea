// The kernel of the all-reduce: one protocol of src/comm over the CTAs of a rank's grid. A launch
// is one rank, or all virtual ranks of a GPU one after another in the grid.
#pragma once

#include "comm/launch_shape.h"
#include "comm/twoshot.h"
#include "device/end_of_exchange.cuh"
#include "ops/allreduce/sm90/device_row.cuh"

namespace narrowfloat {

// kLaunchRanks: ranks that one launch has room for.
template <int kLaunchRanks>
struct AllReduceLaunch {
  RankArgs ranks[kLaunchRanks];
  int32_t ctas_per_rank;
  bool triggers_after_push;
};

struct SingleRankProtocol {
  static constexpr int kMostRanks = 1;

  template <class Elements, class Cta, class Row>
  __device__ static void run(Cta& cta, const RankArgs& args, const RowExtents& extents, Row& row) {
    single_rank_allreduce<Elements>(cta, extents, row);
    // Told last: at the start the registers do not suffice.
    if (blockIdx.x == 0 && threadIdx.x == 0) tell_end_of_exchange(args.end_of_exchange);
  }
};

template <int kRanks>
struct OneShotProtocol {
  static constexpr int kMostRanks = kRanks;

  template <class Elements, class Cta, class Row>
  __device__ static void run(Cta& cta, const RankArgs& args, const RowExtents& extents, Row& row) {
    oneshot_allreduce<kMostRanks, Elements>(cta, args.memory, extents, args.accumulation, row);
  }
};

template <int kRanks>
struct TwoShotProtocol {
  static constexpr int kMostRanks = kRanks;

  template <class Elements, class Cta, class Row>
  __device__ static void run(Cta& cta, const RankArgs& args, const RowExtents& extents, Row& row) {
    twoshot_allreduce<kMostRanks, Elements>(cta, args.memory, extents, args.accumulation, row);
  }
};

template <class Elements, class Protocol, int kLaunchRanks>
__global__ void __maxnreg__(allreduce_registers(Protocol::kMostRanks, Elements::kBytes))
    allreduce_kernel(const __grid_constant__ AllReduceLaunch<kLaunchRanks> launch) {
  // Compiles to nothing elsewhere, where supports() refuses to run.
  if constexpr (kHasHopperInstructions) {
    NF_DYNAMIC_SHARED(uint4, shared, 16);
    const uint32_t rank =
        kLaunchRanks == 1 ? 0U : blockIdx.x / static_cast<uint32_t>(launch.ctas_per_rank);
    const RankArgs& args = launch.ranks[rank];
    DeviceCta cta(rank * static_cast<uint32_t>(launch.ctas_per_rank), launch.ctas_per_rank,
                  static_cast<int>(args.epilogue.hidden / kLeafElements),
                  launch.triggers_after_push);
    DeviceRow<Elements> row(args, cta, reinterpret_cast<uint8_t*>(shared));
    // Nobody stores into the shared memory of a CTA of the cluster that has not started.
    const bool is_cluster = cta.cluster_ctas() > 1;
    if (is_cluster) {
      row.init_barriers();
      arrive_at_cluster();
    }
    row.load_constants();
    wait_for_previous_grids();
    if (is_cluster) wait_for_cluster();
    row.prefetch_first_token();
    const RowExtents extents{args.epilogue.tokens, args.epilogue.hidden / kLeafElements};
    Protocol::template run<Elements>(cta, args, extents, row);
  }
}

}  // namespace narrowfloat
