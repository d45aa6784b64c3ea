// Chooses and launches a kernel of allreduce_kernel.cuh. Included by one translation unit for each
// element type.
#pragma once

#include <algorithm>

#include "ops/allreduce/allreduce_sm90.h"
#include "ops/allreduce/sm90/allreduce_kernel.cuh"
#include "runtime/cuda/cuda_devices.h"
#include "runtime/cuda/launch.h"
#include "runtime/cuda/shared_memory_opt_in.h"

namespace narrowfloat {

template <class Elements, class Protocol, int kLaunchRanks>
void launch_allreduce_kernel(const AllReduceLaunchPlan& plan, std::span<const RankArgs> args,
                             Stream stream) {
  AllReduceLaunch<kLaunchRanks> launch_args{};
  std::copy(args.begin(), args.end(), launch_args.ranks);
  launch_args.ctas_per_rank = plan.shape.ctas();
  launch_args.triggers_after_push = plan.triggers_after_push;
  const int64_t threads = int64_t{plan.shape.warps} * kWarpSize;
  const int64_t shared_bytes =
      row_memory_bytes(plan.shape.steps, plan.shape.warps, Elements::kBytes);
  constexpr auto* kKernel = allreduce_kernel<Elements, Protocol, kLaunchRanks>;
  static SharedMemoryOptIn opt_in;
  opt_in.allow(reinterpret_cast<const void*>(kKernel), RowMemory::kMostBytes, plan.device);
  const auto ctas = static_cast<unsigned>(launch_args.ctas_per_rank) *
                    static_cast<unsigned>(kLaunchRanks == 1 ? 1 : args.size());
  launch(kKernel,
         {.ctas = dim3(ctas),
          .threads = dim3(static_cast<unsigned>(threads)),
          .shared_bytes = static_cast<size_t>(shared_bytes),
          .cluster_ctas = static_cast<unsigned>(plan.shape.cluster),
          .is_cooperative = kLaunchRanks > 1},
         stream, launch_args);
}

// Virtual ranks of bf16 run the kernels for their number of ranks, so that what one GPU measures is
// what several run; other types run those for eight.
template <class Elements, template <int> class Protocol>
void launch_virtual_ranks(const AllReduceLaunchPlan& plan, std::span<const RankArgs> args,
                          Stream stream) {
  if constexpr (Elements::kDType == DType::kBF16) {
    if (args.size() <= 2)
      return launch_allreduce_kernel<Elements, Protocol<2>, 2>(plan, args, stream);
    if (args.size() <= 4)
      return launch_allreduce_kernel<Elements, Protocol<4>, 4>(plan, args, stream);
  }
  launch_allreduce_kernel<Elements, Protocol<kMaxRanks>, kMaxRanks>(plan, args, stream);
}

template <class Elements, template <int> class Protocol>
void launch_for_ranks(const AllReduceLaunchPlan& plan, std::span<const RankArgs> args,
                      Stream stream) {
  if (args.size() > 1) return launch_virtual_ranks<Elements, Protocol>(plan, args, stream);
  const int ranks = args[0].memory.ranks;
  if (ranks <= 2) return launch_allreduce_kernel<Elements, Protocol<2>, 1>(plan, args, stream);
  if (ranks <= 4) return launch_allreduce_kernel<Elements, Protocol<4>, 1>(plan, args, stream);
  launch_allreduce_kernel<Elements, Protocol<kMaxRanks>, 1>(plan, args, stream);
}

template <class Elements>
void launch_allreduce_of(const AllReduceLaunchPlan& plan, std::span<const RankArgs> args,
                         Stream stream) {
  const CudaDeviceScope scope({DeviceType::kCuda, plan.device});
  switch (plan.protocol) {
    case AllReduceProtocol::kSingleRank:
      return launch_allreduce_kernel<Elements, SingleRankProtocol, 1>(plan, args, stream);
    case AllReduceProtocol::kOneShot:
      return launch_for_ranks<Elements, OneShotProtocol>(plan, args, stream);
    case AllReduceProtocol::kTwoShot:
      return launch_for_ranks<Elements, TwoShotProtocol>(plan, args, stream);
  }
}

}  // namespace narrowfloat
