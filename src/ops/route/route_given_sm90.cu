// sm90_given: a precomputed routing, packed or not, to ids and weights (moe spec 4.5). A thread
// copies one slot of the output at a time.
//
// An id out of range becomes -1, a slot of no expert, and is reported (moe spec 1.7): unchanged it
// could be a shared expert's. Reports are sums and minima of integers, so they do not depend on the
// order of threads. A single CTA clears the record itself. If there are several CTAs, none knows
// whether another has counted yet, so a launch before them clears it.
#include <algorithm>
#include <cuda_runtime.h>

#include "base/int_math.h"
#include "ops/route/route_given_sm90.cuh"

namespace narrowfloat {
namespace {

constexpr int kMaxThreads = 512;
// Up to this many slots are copied by one CTA.
constexpr int64_t kOneBlockSlots = 4 * kMaxThreads;

__global__ void __launch_bounds__(1) clear_errors_kernel(DeviceErrors* errors) {
  wait_for_previous_grids();
  clear_errors(errors);
}

__global__ void __launch_bounds__(kMaxThreads)
    copy_given_kernel(const __grid_constant__ GivenParams params) {
  wait_for_previous_grids();
  if (gridDim.x == 1) {
    if (threadIdx.x == 0) clear_errors(params.route.args.errors);
    __syncthreads();
  }
  const uint32_t threads = gridDim.x * blockDim.x;
  for (uint32_t slot = blockIdx.x * blockDim.x + threadIdx.x; slot < params.num_slots;
       slot += threads) {
    copy_slot(params, slot);
  }
  trigger_dependent_launch();
}

void launch_copy_given(const RouteProblem& problem, const RouteArgs& args, Stream stream) {
  const CudaDeviceScope scope(problem.device);
  const int64_t slots = problem.tokens * problem.slots();
  if (slots == 0) return launch_clear_errors(args.errors, stream);
  const GivenParams params = make_given_params(problem, args);
  constexpr int64_t kBlocksPerSm = 4;
  const int64_t room = kBlocksPerSm * cuda_device(problem.device.index).num_sms;
  const bool is_one_block = slots <= kOneBlockSlots;
  const int64_t blocks = is_one_block ? 1 : std::min(room, ceil_div(slots, kMaxThreads));
  if (!is_one_block) launch_clear_errors(args.errors, stream);
  const int64_t threads = std::min<int64_t>(kMaxThreads, round_up(slots, kWarpSize));
  launch(copy_given_kernel,
         {dim3(static_cast<unsigned>(blocks)), dim3(static_cast<unsigned>(threads))}, stream,
         params);
}

Support supports(const RouteProblem& problem) {
  return problem.input != RoutingInput::kLogits ? Support::yes()
                                                : Support::no("takes precomputed routings only");
}

}  // namespace

void launch_clear_errors(DeviceErrors* errors, Stream stream) {
  if (errors != nullptr) launch(clear_errors_kernel, {dim3(1), dim3(1)}, stream, errors);
}

const RouteImpl kRouteSm90Given{"sm90_given", on_own_code<supports>, launch_copy_given};
const RouteImpl kRouteSm80Given{"sm80_given", on_portable_code<supports>, launch_copy_given};

}  // namespace narrowfloat
