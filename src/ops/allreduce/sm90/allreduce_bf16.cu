// The all-reduce kernels of one element type.
#include "ops/allreduce/sm90/launch_allreduce.cuh"

namespace narrowfloat {

void launch_allreduce_bf16(const AllReduceLaunchPlan& plan, std::span<const RankArgs> args,
                           Stream stream) {
  launch_allreduce_of<HalfLeafElements<PackedBf16>>(plan, args, stream);
}

}  // namespace narrowfloat
