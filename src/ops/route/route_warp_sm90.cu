// sm90_warp: a token's experts by one warp with the keys in registers (moe spec 4.1 to 4.3); for up
// to 512 experts, 32 selected ones and 32 groups.
//
//   threads of the block   keys of all experts of the block's tokens -> shared memory
//   warp w                 token w: [groups: two best keys of each, then the best groups]
//                          k rounds: the largest key of the warp, the lowest expert that has it
//   lane s                 weight of slot s; sums run over lanes in slot order
//
// Keys are compared as order images, 32-bit integers, so a round is two warp reductions in
// hardware (REDUX): the maximum of the images, the minimum of the ids that have it. Lane l holds
// experts l, l + 32, ..., and only the lane that lost its best looks for another one.
//
// A block of 256 threads has one token while there are fewer tokens than the GPU has room for, so
// that at decode each thread computes one sigmoid (a chain of about 40 double operations), and up
// to eight tokens above that. Bytes a token: experts * width read, 8 k written.
#include <algorithm>
#include <bit>
#include <cuda_runtime.h>
#include <string>

#include "base/fast_division.h"
#include "base/int_math.h"
#include "ops/route/route_sm90.cuh"

namespace narrowfloat {
namespace {

constexpr int kMaxThreads = 256;
constexpr int kMaxTokensPerBlock = kMaxThreads / kWarpSize;
constexpr int32_t kMaxWarpExperts = 512;
constexpr int32_t kMaxWarpSlots = kWarpSize;
constexpr int32_t kMaxWarpGroups = kWarpSize;

struct WarpParams {
  RouteParams route;
  FastDivisor experts;
  FastDivisor group_size;
  int32_t tokens_per_block = 1;
  int32_t lanes_per_group = 1;  // A power of two.
};

// One token's part of the shared memory.
struct SharedToken {
  uint32_t* images;  // [experts]: keys. Free for other use once they are in registers.
  float* values;     // [experts]: sigmoids where keys are made of them, else logits.
};

__device__ bool values_are_sigmoids(const RoutingSpec& spec) {
  return spec.key != RoutingKey::kLogit;
}

__device__ SharedToken shared_token(const WarpParams& params, uint32_t* shared, int token) {
  const int32_t experts = params.route.experts;
  return {.images = shared + token * experts,
          .values = reinterpret_cast<float*>(shared) +
                    static_cast<ptrdiff_t>(params.tokens_per_block + token) * experts};
}

__device__ void compute_keys(const WarpParams& params, int64_t first_token, uint32_t* shared) {
  const RouteParams& route = params.route;
  const auto tokens =
      static_cast<int32_t>(min(int64_t{params.tokens_per_block}, route.tokens - first_token));
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < tokens * route.experts;
       i += static_cast<int32_t>(blockDim.x)) {
    const auto token = static_cast<int32_t>(params.experts.quotient(static_cast<uint32_t>(i)));
    const int32_t expert = i - token * route.experts;
    const float logit = load_logit(route, first_token + token, expert);
    const float bias = load_bias(route, expert);
    const SharedToken to = shared_token(params, shared, token);
    const bool is_sigmoid = values_are_sigmoids(route.spec);
    const float value = is_sigmoid ? sigmoid_by_tanh(logit) : logit;
    to.values[expert] = value;
    to.images[expert] = order_image(key_of_value(route.spec.key, value, bias));
  }
}

// The largest image among the lanes that offer one, and among those that offer it the smallest
// index. Some lane does.
__device__ uint32_t warp_first_largest(bool offers, uint32_t image, uint32_t index) {
  const uint32_t largest = __reduce_max_sync(kFullWarp, offers ? image : 0U);
  return __reduce_min_sync(kFullWarp, offers && image == largest ? index : 0xFFFFFFFFU);
}

struct TwoLargest {
  uint32_t largest = 0;
  uint32_t second = 0;

  __device__ void add(uint32_t image) {
    second = max(second, min(largest, image));
    largest = max(largest, image);
  }
};

// The two largest keys of the group that this lane shares with lanes_per_group - 1 neighbours.
__device__ TwoLargest two_largest_of_group(const WarpParams& params, const SharedToken& from,
                                           int group, int lane_in_group) {
  const int lanes = params.lanes_per_group;
  const int size = params.route.group_size;
  const int steps = (size + lanes - 1) / lanes;
  TwoLargest keys;
  if (group < params.route.num_groups) {
    // Groups start at different steps, or all would read the same banks.
    int step = group % steps;
    for (int i = 0; i < steps; ++i) {
      const int member = step * lanes + lane_in_group;
      if (member < size) keys.add(from.images[group * size + member]);
      step = step + 1 < steps ? step + 1 : 0;
    }
  }
  for (int distance = 1; distance < lanes; distance *= 2) {
    const uint32_t largest = __shfl_xor_sync(kFullWarp, keys.largest, distance);
    const uint32_t second = __shfl_xor_sync(kFullWarp, keys.second, distance);
    keys.add(largest);
    keys.second = max(keys.second, second);
  }
  return keys;
}

// A bit for each group that is kept.
__device__ uint32_t select_groups(const WarpParams& params, const SharedToken& from) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int group = lane / params.lanes_per_group;
  const TwoLargest keys = two_largest_of_group(params, from, group, lane % params.lanes_per_group);
  const uint32_t score =
      order_image(group_score(float_of_image(keys.largest), float_of_image(keys.second)));
  bool is_left = group < params.route.num_groups;
  uint32_t kept = 0;
  for (int i = 0; i < params.route.topk_group; ++i) {
    const uint32_t best = warp_first_largest(is_left, score, static_cast<uint32_t>(group));
    kept |= 1U << best;
    is_left = is_left && static_cast<uint32_t>(group) != best;
  }
  return kept;
}

// The keys of a lane's experts lane + 32 i, and which of them may still be taken.
template <int kPerLane>
struct LaneKeys {
  uint32_t images[kPerLane];
  uint32_t left = 0;
  // The best of those left: the first of the largest.
  uint32_t best_image = 0;
  int best = 0;

  __device__ void find_best() {
    bool found = false;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const bool is_better = (left >> i & 1) != 0 && (!found || images[i] > best_image);
      best_image = is_better ? images[i] : best_image;
      best = is_better ? i : best;
      found = found || is_better;
    }
  }
};

template <int kPerLane>
__device__ LaneKeys<kPerLane> load_keys(const WarpParams& params, const SharedToken& from) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  const uint32_t kept = params.route.num_groups > 1 ? select_groups(params, from) : 1U;
  LaneKeys<kPerLane> keys;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int32_t expert = lane + i * kWarpSize;
    if (expert >= params.route.experts) continue;
    keys.images[i] = from.images[expert];
    const uint32_t group = params.group_size.quotient(static_cast<uint32_t>(expert));
    keys.left |= (kept >> group & 1U) << i;
  }
  keys.find_best();
  return keys;
}

// Lane s gets the expert of slot s, best first.
template <int kPerLane>
__device__ int32_t select_experts(const WarpParams& params, const SharedToken& from) {
  const uint32_t lane = threadIdx.x % kWarpSize;
  LaneKeys<kPerLane> keys = load_keys<kPerLane>(params, from);
  uint32_t selected = 0;
  for (uint32_t slot = 0; slot < static_cast<uint32_t>(params.route.top_k); ++slot) {
    const uint32_t own = lane + static_cast<uint32_t>(keys.best) * kWarpSize;
    const uint32_t expert = warp_first_largest(keys.left != 0, keys.best_image, own);
    if (lane == slot) selected = expert;
    if (own != expert || keys.left == 0) continue;
    keys.left &= ~(1U << keys.best);
    keys.find_best();
  }
  return static_cast<int32_t>(selected);
}

// Softmaxes over all experts: exponentials to shared memory, then one sum in the order of the
// experts, which every lane makes for itself.
__device__ float sum_over_experts(const RouteParams& route, const SharedToken& token,
                                  float* maximum) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  uint32_t largest = 0;
  for (int32_t e = lane; e < route.experts; e += kWarpSize) {
    largest = max(largest, image_for_maximum(token.values[e]));
  }
  *maximum = float_of_image(__reduce_max_sync(kFullWarp, largest));
  __syncwarp();
  for (int32_t e = lane; e < route.experts; e += kWarpSize) {
    token.images[e] = float_bits(raw_weight(route.spec.weight, token.values[e], *maximum));
  }
  __syncwarp();
  float sum = 0.0F;
#pragma unroll 8
  for (int32_t e = 0; e < route.experts; ++e) sum = add_rn(sum, bits_float(token.images[e]));
  return sum;
}

// Lane s: the weight of slot s, whose expert is `id`.
__device__ float weight_of_slot(const RouteParams& route, const SharedToken& token, int32_t id) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  const bool has_slot = lane < route.top_k;
  const RoutingSpec& spec = route.spec;
  const float value = has_slot ? token.values[id] : -__builtin_inff();
  float maximum = 0.0F;
  float sum = 0.0F;
  if (spec.weight == RoutingWeight::kSoftmaxOverAll) {
    sum = sum_over_experts(route, token, &maximum);
  } else if (spec.weight == RoutingWeight::kSoftmaxOverSelected) {
    maximum = float_of_image(__reduce_max_sync(kFullWarp, image_for_maximum(value)));
  }
  const bool is_done = spec.weight == RoutingWeight::kSigmoid && values_are_sigmoids(spec);
  const float raw = is_done ? value : raw_weight(spec.weight, value, maximum);
  if (spec.weight != RoutingWeight::kSoftmaxOverAll) {
    for (int32_t s = 0; s < route.top_k; ++s) {
      sum = add_rn(sum, __shfl_sync(kFullWarp, raw, s));
    }
  }
  return final_weight(raw, route.routed_scale, weight_divisor(spec, sum));
}

template <int kPerLane>
__global__ void __launch_bounds__(kMaxThreads)
    route_warp_kernel(const __grid_constant__ WarpParams params) {
  extern __shared__ uint32_t shared[];
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int64_t first_token = int64_t{blockIdx.x} * params.tokens_per_block;
  wait_for_previous_grids();
  compute_keys(params, first_token, shared);
  allow_next_grid();
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
  WarpParams params{.route = make_route_params(problem, args)};
  params.experts = FastDivisor(static_cast<uint32_t>(params.route.experts));
  params.group_size = FastDivisor(static_cast<uint32_t>(params.route.group_size));
  params.tokens_per_block =
      static_cast<int32_t>(std::clamp<int64_t>(problem.tokens / room, 1, kMaxTokensPerBlock));
  params.lanes_per_group =
      kWarpSize /
      static_cast<int32_t>(std::bit_ceil(static_cast<uint32_t>(params.route.num_groups)));
  const int64_t keys = int64_t{params.tokens_per_block} * params.route.experts;
  const int64_t threads = std::min<int64_t>(
      kMaxThreads,
      std::max<int64_t>(params.tokens_per_block * kWarpSize, round_up(keys, kWarpSize)));
  const LaunchShape shape{
      dim3(static_cast<unsigned>(ceil_div(problem.tokens, params.tokens_per_block))),
      dim3(static_cast<unsigned>(threads)), static_cast<size_t>(2 * keys) * sizeof(uint32_t)};
  if (params.route.experts <= 4 * kWarpSize) {
    launch(route_warp_kernel<4>, shape, stream, params);
  } else if (params.route.experts <= 8 * kWarpSize) {
    launch(route_warp_kernel<8>, shape, stream, params);
  } else {
    launch(route_warp_kernel<16>, shape, stream, params);
  }
}

Support supports(const RouteProblem& problem) {
  const Support device = runs_on_cuda(problem.device);
  if (!device.ok()) return device;
  if (problem.input != RoutingInput::kLogits) return Support::no("takes logits only");
  const auto at_most = [](int32_t limit, const char* what) {
    return Support::no("more than " + std::to_string(limit) + " " + what);
  };
  if (problem.config.experts > kMaxWarpExperts) return at_most(kMaxWarpExperts, "experts");
  if (problem.config.top_k > kMaxWarpSlots) return at_most(kMaxWarpSlots, "selected experts");
  if (problem.config.n_group > kMaxWarpGroups) return at_most(kMaxWarpGroups, "groups");
  return Support::yes();
}

}  // namespace

const RouteImpl kRouteSm90Warp{"sm90_warp", supports, launch_route_warp};

}  // namespace narrowfloat
