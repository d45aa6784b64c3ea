// sm90_warp: one warp selects the experts of a token with the keys in registers (moe spec 4.1 to
// 4.3), for up to 512 experts, 32 selected ones and 32 groups.
//
//   threads of the CTA   keys of all experts of the CTA's tokens -> shared memory
//   warp w               token w: [groups: two best keys of each, then the best groups]
//                        lanes sort their keys; k iterations take the best of the lanes' best
//   lane s               weight of slot s; sums run over lanes in slot order
//
// Keys are compared as ordered bits, 32-bit integers, so an iteration is a warp reduction in
// hardware (REDUX), a vote on the lane with the maximum, and a second reduction only for equal
// keys.
//
// A CTA has one token while there are fewer tokens than the GPU has room for, so that in decode
// each thread computes one sigmoid (a chain of about 20 double operations), and up to eight tokens
// above that. The steps are in route_warp_sm90.cuh. Bytes per token: experts * width read, 8 k
// written.
#include <algorithm>
#include <cuda_runtime.h>

#include "ops/route/route_warp_sm90.cuh"

namespace narrowfloat {
namespace {

constexpr int kMaxThreads = 512;
constexpr int kManyTokensThreads = 256;  // Threads of CTAs with several tokens.
constexpr int kMaxTokensPerBlock = kManyTokensThreads / kWarpSize;

template <int kPerLane>
__global__ void __launch_bounds__(kMaxThreads)
    route_warp_kernel(const __grid_constant__ WarpParams params) {
  NF_DYNAMIC_SHARED(uint32_t, shared, 16);
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int64_t first_token = int64_t{blockIdx.x} * params.tokens_per_block;
  wait_for_previous_grids();
  compute_keys(params, first_token, shared);
  trigger_dependent_launch();
  __syncthreads();
  if (blockIdx.x == 0 && threadIdx.x == 0) clear_errors(params.route.args.errors);
  const int64_t token = first_token + warp;
  if (warp >= params.tokens_per_block || token >= params.route.tokens) return;
  const SharedToken own = shared_token(params, shared, warp);
  const int32_t id = select_experts<kPerLane>(params, own);
  const float weight = weight_of_slot(params.route, own, id);
  if (lane < params.route.top_k) store_routed(params.route, token, lane, id, weight);
  store_shared_experts(params.route, token, lane, kWarpSize);
}

void launch_route_warp(const RouteProblem& problem, const RouteArgs& args, Stream stream) {
  const CudaDeviceScope scope(problem.device);
  if (problem.tokens == 0) return launch_clear_errors(args.errors, stream);
  constexpr int64_t kBlocksPerSm = 4;
  const int64_t room = kBlocksPerSm * cuda_device(problem.device.index).num_sms;
  const WarpParams params = make_warp_params(
      problem, args, std::clamp<int64_t>(problem.tokens / room, 1, kMaxTokensPerBlock));
  const int64_t keys = warp_shared_words(params) / 2;
  const int64_t max_threads = params.tokens_per_block > 1 ? kManyTokensThreads : kMaxThreads;
  const int64_t threads = std::clamp(round_up(keys, kWarpSize),
                                     int64_t{params.tokens_per_block} * kWarpSize, max_threads);
  const LaunchShape shape{
      dim3(static_cast<unsigned>(ceil_div(problem.tokens, params.tokens_per_block))),
      dim3(static_cast<unsigned>(threads)), static_cast<size_t>(2 * keys) * sizeof(uint32_t)};
  visit_keys_per_lane(ceil_div(params.candidates, kWarpSize), [&](auto per_lane) {
    launch(route_warp_kernel<decltype(per_lane)::value>, shape, stream, params);
  });
}

Support supports(const RouteProblem& problem) {
  if (problem.input != RoutingInput::kLogits) return Support::no("takes logits only");
  return fits_a_warp(problem);
}

}  // namespace

const RouteImpl kRouteSm90Warp{"sm90_warp", on_own_code<supports>, launch_route_warp};
const RouteImpl kRouteSm80Warp{"sm80_warp", on_portable_code<supports>, launch_route_warp};

}  // namespace narrowfloat
