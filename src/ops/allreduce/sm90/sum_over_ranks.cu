// The sum of nccl_exact: the parts of all ranks, received one after another, in rank order.
#include <algorithm>

#include "comm/leaf_sums.h"
#include "device/ptx/grid_dependency.cuh"
#include "ops/allreduce/allreduce_sm90.h"
#include "ops/allreduce/sm90/leaf_elements.cuh"
#include "runtime/cuda/cuda_devices.h"
#include "runtime/cuda/launch.h"

namespace narrowfloat {
namespace {

constexpr unsigned kSumThreads = 256;

template <class Elements>
__global__ void sum_over_ranks_kernel(const RankSum args) {
  wait_for_previous_grids();
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < args.leaves; i += step) {
    LeafSum<Elements> sum(args.accumulation);
    sum.start(without_negative_zeros(Elements::load(args.parts, i)));
    for (int rank = 1; rank < args.ranks; ++rank) {
      sum.add(without_negative_zeros(Elements::load(args.parts, rank * args.leaves + i)));
    }
    store_leaf(args.sum, i, sum.narrow());
  }
}

template <class Elements>
void launch_sum(const RankSum& sum, Stream stream) {
  constexpr int64_t kMostCtas = 1024;
  const int64_t ctas = std::min(ceil_div(sum.leaves, int64_t{kSumThreads}), kMostCtas);
  launch(sum_over_ranks_kernel<Elements>, {dim3(static_cast<unsigned>(ctas)), dim3(kSumThreads)},
         stream, sum);
}

}  // namespace

void sum_over_ranks(DType element, const RankSum& sum, Device device, Stream stream) {
  const CudaDeviceScope scope(device);
  if (element == DType::kBF16) return launch_sum<HalfLeafElements<PackedBf16>>(sum, stream);
  if (element == DType::kF16) return launch_sum<HalfLeafElements<PackedF16>>(sum, stream);
  launch_sum<FloatLeafElements>(sum, stream);
}

}  // namespace narrowfloat
