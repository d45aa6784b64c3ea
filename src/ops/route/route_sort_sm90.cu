// sm90_sort: one CTA sorts all experts of a token (moe spec 4.1 to 4.3). It takes any number of
// experts, selected experts and groups within the limits of a routing.
//
//   [groups: rank = ordered bits of the score above the complement of the index; sort; keep first]
//   experts: rank = ordered bits of the key above the complement of the id, 0 outside kept groups;
//            sort
//   ids of the first k; raw weights; one sum by one thread in the order of the specification
//
// The sort is a bitonic network in shared memory over the next power of two. Ranks of experts are
// never 0 or equal, so any sort gives the same order, and entries that are no candidates come last.
#include <bit>
#include <cuda_runtime.h>

#include "ops/route/route_sm90.cuh"

namespace narrowfloat {
namespace {

constexpr int kThreads = 512;
constexpr int kMaxGroupWords = kMaxExperts / 2 / 32;

struct SortParams {
  RouteParams route;
  int32_t sorted_experts = 1;  // Powers of two.
  int32_t sorted_groups = 1;
};

struct SharedStorage {
  uint32_t kept_groups[kMaxGroupWords];  // One bit per group.
  uint32_t scratch[kThreads / kWarpSize];
  float sum;
};

__device__ uint64_t ranked(uint32_t ordered, int32_t index) {
  return (uint64_t{ordered} << 32) | ~static_cast<uint32_t>(index);
}
__device__ int32_t index_of(uint64_t rank) {
  return static_cast<int32_t>(~static_cast<uint32_t>(rank));
}

__device__ uint32_t ordered_key(const RouteParams& route, int64_t token, int32_t expert) {
  return ordered_bits(
      routing_key(route.spec.key, load_logit(route, token, expert), load_bias(route, expert)));
}

// Sorts in descending order; `count` is a power of two. Ends with a barrier.
__device__ void sort_descending(uint64_t* shared_ranks, int32_t count) {
  for (int32_t length = 2; length <= count; length *= 2) {
    for (int32_t distance = length / 2; distance > 0; distance /= 2) {
      for (int32_t i = static_cast<int32_t>(threadIdx.x); i < count / 2; i += kThreads) {
        const int32_t low = 2 * i - (i & (distance - 1));
        const int32_t high = low + distance;
        const uint64_t a = shared_ranks[low];
        const uint64_t b = shared_ranks[high];
        if (((low & length) == 0) != (a < b)) continue;
        shared_ranks[low] = b;
        shared_ranks[high] = a;
      }
      __syncthreads();
    }
  }
}

__device__ uint32_t ordered_group_score(const RouteParams& route, int64_t token, int32_t group) {
  uint32_t largest = 0;
  uint32_t second = 0;
  for (int32_t i = 0; i < route.group_size; ++i) {
    const uint32_t ordered = ordered_key(route, token, group * route.group_size + i);
    second = max(second, min(largest, ordered));
    largest = max(largest, ordered);
  }
  return ordered_bits(group_score(float_of_ordered(largest), float_of_ordered(second)));
}

// Selects the groups. Ends with a barrier.
__device__ void select_groups(const SortParams& params, int64_t token, uint64_t* shared_ranks,
                              uint32_t* shared_kept) {
  const RouteParams& route = params.route;
  const auto thread = static_cast<int32_t>(threadIdx.x);
  for (int32_t j = thread; j < params.sorted_groups; j += kThreads) {
    shared_ranks[j] =
        j < route.num_groups ? ranked(ordered_group_score(route, token, j), j) : uint64_t{0};
  }
  if (thread < kMaxGroupWords) shared_kept[thread] = 0;
  __syncthreads();
  sort_descending(shared_ranks, params.sorted_groups);
  for (int32_t i = thread; i < route.topk_group; i += kThreads) {
    const int32_t group = index_of(shared_ranks[i]);
    atomicOr(shared_kept + group / 32, 1U << group % 32);
  }
  __syncthreads();
}

// Computes the ranks of all experts, sorted. Ends with a barrier.
__device__ void rank_experts(const SortParams& params, int64_t token, uint64_t* shared_ranks,
                             uint32_t* shared_kept) {
  const RouteParams& route = params.route;
  if (route.num_groups > 1) select_groups(params, token, shared_ranks, shared_kept);
  for (int32_t e = static_cast<int32_t>(threadIdx.x); e < params.sorted_experts; e += kThreads) {
    bool is_candidate = e < route.experts;
    if (is_candidate && route.num_groups > 1) {
      const int32_t group = e / route.group_size;
      is_candidate = (shared_kept[group / 32] >> group % 32 & 1U) != 0;
    }
    shared_ranks[e] = is_candidate ? ranked(ordered_key(route, token, e), e) : uint64_t{0};
  }
  __syncthreads();
  sort_descending(shared_ranks, params.sorted_experts);
}

// Whether a softmax or a sum runs over all experts, or over the selected ones in the order of the
// slots.
__device__ bool runs_over_all(const RouteParams& route) {
  return route.spec.weight == RoutingWeight::kSoftmaxOverAll;
}
__device__ float term_logit(const RouteParams& route, int64_t token, const uint64_t* shared_ranks,
                            int32_t term) {
  return load_logit(route, token, runs_over_all(route) ? term : index_of(shared_ranks[term]));
}

// Stores the raw weight of term i above the index in rank i; returns the softmax's maximum.
__device__ float weigh_terms(const RouteParams& route, int64_t token, int32_t terms,
                             uint64_t* shared_ranks, uint32_t* shared_scratch) {
  uint32_t largest = 0;
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < terms; i += kThreads) {
    largest = max(largest, ordered_for_maximum(term_logit(route, token, shared_ranks, i)));
  }
  const float maximum = float_of_ordered(block_max(largest, shared_scratch));
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < terms; i += kThreads) {
    const float logit = term_logit(route, token, shared_ranks, i);
    const uint32_t raw = float_bits(raw_weight(route.spec.weight, logit, maximum));
    shared_ranks[i] = (uint64_t{raw} << 32) | static_cast<uint32_t>(shared_ranks[i]);
  }
  return maximum;
}

__device__ float sum_terms(const uint64_t* shared_ranks, int32_t terms) {
  float sum = 0.0F;
#pragma unroll 8
  for (int32_t i = 0; i < terms; ++i) {
    sum = add_rn(sum, bits_float(static_cast<uint32_t>(shared_ranks[i] >> 32)));
  }
  return sum;
}

__global__ void __launch_bounds__(kThreads)
    route_sort_kernel(const __grid_constant__ SortParams params) {
  NF_DYNAMIC_SHARED(uint64_t, shared_ranks, 8);
  __shared__ SharedStorage shared;
  const RouteParams& route = params.route;
  const int64_t token = blockIdx.x;
  const auto thread = static_cast<int32_t>(threadIdx.x);
  wait_for_previous_grids();
  rank_experts(params, token, shared_ranks, shared.kept_groups);
  const int32_t terms = runs_over_all(route) ? route.experts : route.top_k;
  const float maximum = weigh_terms(route, token, terms, shared_ranks, shared.scratch);
  __syncthreads();
  if (thread == 0) shared.sum = sum_terms(shared_ranks, terms);
  __syncthreads();
  trigger_dependent_launch();
  const float divisor = weight_divisor(route.spec, shared.sum);
  for (int32_t s = thread; s < route.top_k; s += kThreads) {
    const int32_t id = index_of(shared_ranks[s]);
    const float raw = raw_weight(route.spec.weight, load_logit(route, token, id), maximum);
    store_routed(route, token, s, id, final_weight(raw, route.routed_scale, divisor));
  }
  store_shared_experts(route, token, thread, kThreads);
  if (blockIdx.x == 0 && thread == 0) clear_errors(route.args.errors);
}

void launch_route_sort(const RouteProblem& problem, const RouteArgs& args, Stream stream) {
  const CudaDeviceScope scope(problem.device);
  if (problem.tokens == 0) return launch_clear_errors(args.errors, stream);
  SortParams params{.route = make_route_params(problem, args)};
  const auto power = [](int32_t count) {
    return static_cast<int32_t>(std::bit_ceil(static_cast<uint32_t>(count)));
  };
  params.sorted_experts = power(params.route.experts);
  params.sorted_groups = power(params.route.num_groups);
  launch(route_sort_kernel,
         {dim3(static_cast<unsigned>(problem.tokens)), dim3(kThreads),
          static_cast<size_t>(params.sorted_experts) * sizeof(uint64_t)},
         stream, params);
}

Support supports(const RouteProblem& problem) {
  return problem.input == RoutingInput::kLogits ? Support::yes() : Support::no("takes logits only");
}

}  // namespace

const RouteImpl kRouteSm90Sort{"sm90_sort", on_own_code<supports>, launch_route_sort};
const RouteImpl kRouteSm80Sort{"sm80_sort", on_portable_code<supports>, launch_route_sort};

}  // namespace narrowfloat
