// The all-reduce kernels of one element type.
#include "ops/allreduce/sm90/launch_allreduce.cuh"

namespace narrowfloat {

void launch_allreduce_f32(const AllReduceLaunchPlan& plan, std::span<const RankArgs> args,
                          Stream stream) {
  launch_allreduce_of<FloatLeafElements>(plan, args, stream);
}

}  // namespace narrowfloat
