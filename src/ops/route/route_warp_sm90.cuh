// The steps of a warp that routes a token with the keys in registers (route_warp_sm90.cu), for the
// kernels that route one token per warp: up to 512 experts, 32 selected ones and 32 groups.
#pragma once

#include <algorithm>
#include <bit>
#include <type_traits>

#include "base/fast_division.h"
#include "base/int_math.h"
#include "device/sigmoid.cuh"
#include "ops/route/route_sm90.cuh"

namespace narrowfloat {

inline constexpr int32_t kMaxWarpExperts = 512;
inline constexpr int32_t kMaxWarpSlots = kWarpSize;
inline constexpr int32_t kMaxWarpGroups = kWarpSize;

struct WarpParams {
  RouteParams route;
  FastDivisor experts;
  FastDivisor group_size;
  int32_t shared_stride = 0;  // Keys from a token to the next: whole 16-byte words.
  int32_t candidates = 0;     // Experts, or members of the groups that are kept.
  int32_t tokens_per_block = 1;
  int32_t group_lane_bits = 0;  // 2^bits lanes share a group.
  int32_t group_steps = 0;      // Steps of these lanes over the members of a group.
};

// The shared memory of one token.
struct SharedToken {
  uint32_t*
      ordered_keys;  // [experts]: ordered keys. Free for other use once they are in registers.
  float* values;     // [experts]: sigmoids if keys are made of them, else logits.
};

__device__ inline bool values_are_sigmoids(const RoutingSpec& spec) {
  return spec.key != RoutingKey::kLogit;
}

__device__ inline SharedToken shared_token(const WarpParams& params, uint32_t* shared, int token) {
  uint32_t* const ordered_keys = shared + token * params.shared_stride;
  return {.ordered_keys = ordered_keys,
          .values = reinterpret_cast<float*>(ordered_keys +
                                             params.tokens_per_block * params.shared_stride)};
}

__device__ inline void compute_keys(const WarpParams& params, int64_t first_token,
                                    uint32_t* shared) {
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
    const float value = is_sigmoid ? router_sigmoid(logit) : logit;
    to.values[expert] = value;
    to.ordered_keys[expert] = ordered_bits(key_of_value(route.spec.key, value, bias));
  }
}

struct TwoLargest {
  uint32_t largest = 0;
  uint32_t second = 0;

  __device__ void add(uint32_t ordered) {
    second = max(second, min(largest, ordered));
    largest = max(largest, ordered);
  }
};

// The two largest keys of the group that this lane shares with its neighbours.
__device__ inline TwoLargest two_largest_of_group(const WarpParams& params, const SharedToken& from,
                                                  int group, int lane_in_group) {
  const int size = params.route.group_size;
  TwoLargest keys;
  if (group < params.route.num_groups) {
    const uint32_t* const ordered_keys = from.ordered_keys + group * size;
    // Groups start at different steps to avoid bank conflicts.
    int step = min(group, params.group_steps - 1);
#pragma unroll 4
    for (int i = 0; i < params.group_steps; ++i) {
      const int member = (step << params.group_lane_bits) + lane_in_group;
      keys.add(member < size ? ordered_keys[member] : 0U);
      step = step + 1 < params.group_steps ? step + 1 : 0;
    }
  }
  for (int distance = 1; distance < 1 << params.group_lane_bits; distance *= 2) {
    const uint32_t largest = __shfl_xor_sync(kFullWarp, keys.largest, distance);
    const uint32_t second = __shfl_xor_sync(kFullWarp, keys.second, distance);
    keys.add(largest);
    keys.second = max(keys.second, second);
  }
  return keys;
}

// Lane i gets the i-th kept group in the order of the groups. A group is kept if fewer than
// topk_group are better: each lane counts them.
__device__ inline int kept_groups(const WarpParams& params, const SharedToken& from) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int bits = params.group_lane_bits;
  const int group = lane >> bits;
  const int lane_in_group = lane - (group << bits);
  const TwoLargest keys = two_largest_of_group(params, from, group, lane_in_group);
  const uint32_t score =
      ordered_bits(group_score(float_of_ordered(keys.largest), float_of_ordered(keys.second)));
  int better = 0;
#pragma unroll 8
  for (int other = 0; other < params.route.num_groups; ++other) {
    const uint32_t ordered = __shfl_sync(kFullWarp, score, other << bits);
    better += ordered > score || (ordered == score && other < group) ? 1 : 0;
  }
  const bool is_kept =
      lane_in_group == 0 && group < params.route.num_groups && better < params.route.topk_group;
  unsigned kept = __ballot_sync(kFullWarp, is_kept);
  int own = 0;
#pragma unroll 4
  for (int i = 0; i < params.route.topk_group; ++i) {
    if (lane == i) own = (__ffs(static_cast<int>(kept)) - 1) >> bits;
    kept &= kept - 1;
  }
  return own;
}

// The ordered bits of a key above the complement of its expert: larger first, equal keys by the
// lower expert. 0 means none.
using RankedKey = uint64_t;

__device__ inline RankedKey ranked(uint32_t ordered, uint32_t expert) {
  return (RankedKey{ordered} << 32) | (0xFFFFFFFFU - expert);
}
__device__ inline uint32_t image_of(RankedKey key) { return static_cast<uint32_t>(key >> 32); }
__device__ inline uint32_t low_word(RankedKey key) { return static_cast<uint32_t>(key); }

// Loads candidates lane, lane + 32, ...: experts, or members of the kept groups one after another.
template <int kPerLane>
__device__ inline void load_keys(const WarpParams& params, const SharedToken& from,
                                 RankedKey (&keys)[kPerLane]) {
  const bool is_grouped = params.route.num_groups > 1;
  const int own_group = is_grouped ? kept_groups(params, from) : 0;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const uint32_t candidate = threadIdx.x % kWarpSize + static_cast<uint32_t>(i) * kWarpSize;
    uint32_t expert = candidate;
    if (is_grouped) {
      const uint32_t place = params.group_size.quotient(candidate);
      const auto size = static_cast<uint32_t>(params.route.group_size);
      const int group = __shfl_sync(kFullWarp, own_group, static_cast<int>(place % kWarpSize));
      expert = static_cast<uint32_t>(group) * size + candidate - place * size;
    }
    const bool exists = candidate < static_cast<uint32_t>(params.candidates);
    keys[i] = exists ? ranked(from.ordered_keys[expert], expert) : RankedKey{0};
  }
}

// The exchanges of Batcher's odd-even merge sort of kCount keys.
template <int kCount>
struct SortingNetwork {
  int size = 0;
  int low[kCount * kCount / 2 + 1] = {};
  int high[kCount * kCount / 2 + 1] = {};

  NF_HOST_DEVICE constexpr SortingNetwork() {
    for (int p = 1; p < kCount; p *= 2) {
      for (int k = p; k >= 1; k /= 2) {
        for (int j = k % p; j + k < kCount; j += 2 * k) add_run(p, k, j);
      }
    }
  }

 private:
  NF_HOST_DEVICE constexpr void add_run(int p, int k, int j) {
    for (int i = j; i < j + k && i + k < kCount; ++i) {
      if (i / (2 * p) != (i + k) / (2 * p)) continue;
      low[size] = i;
      high[size++] = i + k;
    }
  }
};

// Sorts in descending order.
template <int kCount>
__device__ inline void sort_keys(RankedKey (&keys)[kCount]) {
  constexpr SortingNetwork<kCount> kNetwork;
#pragma unroll
  for (int i = 0; i < kNetwork.size; ++i) {
    RankedKey& low = keys[kNetwork.low[i]];
    RankedKey& high = keys[kNetwork.high[i]];
    const RankedKey larger = low > high ? low : high;
    high = low > high ? high : low;
    low = larger;
  }
}

// Lane s gets the expert of slot s, best first. Each iteration takes the best of the lanes' best.
template <int kPerLane>
__device__ inline int32_t select_experts(const WarpParams& params, const SharedToken& from) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  RankedKey keys[kPerLane];
  load_keys(params, from, keys);
  sort_keys(keys);
  uint32_t selected = 0;
  for (int32_t slot = 0; slot < params.route.top_k; ++slot) {
    const uint32_t largest = __reduce_max_sync(kFullWarp, image_of(keys[0]));
    bool is_best = image_of(keys[0]) == largest;
    unsigned best = __ballot_sync(kFullWarp, is_best);
    if ((best & (best - 1)) != 0) {
      // Equal keys: the lower expert wins. Lanes without keys have the least low word.
      const uint32_t low = __reduce_max_sync(kFullWarp, is_best ? low_word(keys[0]) : 0U);
      is_best = is_best && low_word(keys[0]) == low;
      best = __ballot_sync(kFullWarp, is_best);
    }
    const uint32_t low =
        __shfl_sync(kFullWarp, low_word(keys[0]), __ffs(static_cast<int>(best)) - 1);
    if (lane == slot) selected = 0xFFFFFFFFU - low;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const RankedKey next = i + 1 < kPerLane ? keys[i + 1 < kPerLane ? i + 1 : i] : RankedKey{0};
      keys[i] = is_best ? next : keys[i];
    }
  }
  return static_cast<int32_t>(selected);
}

// Softmaxes over all experts: exponentials go to shared memory, then every lane sums them in the
// order of the experts.
__device__ inline float sum_over_experts(const RouteParams& route, const SharedToken& token,
                                         float* maximum) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  uint32_t largest = 0;
  for (int32_t e = lane; e < route.experts; e += kWarpSize) {
    largest = max(largest, ordered_for_maximum(token.values[e]));
  }
  *maximum = float_of_ordered(__reduce_max_sync(kFullWarp, largest));
  __syncwarp();
  for (int32_t e = lane; e < route.experts; e += kWarpSize) {
    token.ordered_keys[e] = float_bits(softmax_term(token.values[e], *maximum));
  }
  __syncwarp();
  // The loads are vectors, so that only additions are in the dependent chain.
  float sum = 0.0F;
  int32_t expert = 0;
#pragma unroll 4
  for (; expert + 4 <= route.experts; expert += 4) {
    const uint4 terms = *reinterpret_cast<const uint4*>(token.ordered_keys + expert);
    sum = add_rn(add_rn(sum, bits_float(terms.x)), bits_float(terms.y));
    sum = add_rn(add_rn(sum, bits_float(terms.z)), bits_float(terms.w));
  }
  for (; expert < route.experts; ++expert)
    sum = add_rn(sum, bits_float(token.ordered_keys[expert]));
  return sum;
}

// Lane s has the raw weight of slot s. Eight shuffles are in flight at once.
__device__ inline float sum_over_slots(float raw, int32_t top_k) {
  constexpr int32_t kAtOnce = 8;
  float sum = 0.0F;
  for (int32_t first = 0; first < top_k; first += kAtOnce) {
    float terms[kAtOnce];
#pragma unroll
    for (int32_t i = 0; i < kAtOnce; ++i) terms[i] = __shfl_sync(kFullWarp, raw, first + i);
#pragma unroll
    for (int32_t i = 0; i < kAtOnce; ++i) {
      if (first + i < top_k) sum = add_rn(sum, terms[i]);
    }
  }
  return sum;
}

// raw_weight() of a value in shared memory.
__device__ inline float raw_weight_of_value(const RoutingSpec& spec, float value, float maximum) {
  if (spec.weight == RoutingWeight::kLogit) return value;
  if (spec.weight != RoutingWeight::kSigmoid) return softmax_term(value, maximum);
  return values_are_sigmoids(spec) ? value : router_sigmoid(value);
}

// The weight of slot s in lane s, whose expert is `id`.
__device__ inline float weight_of_slot(const RouteParams& route, const SharedToken& token,
                                       int32_t id) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  const bool has_slot = lane < route.top_k;
  const RoutingSpec& spec = route.spec;
  const float value = has_slot ? token.values[id] : -__builtin_inff();
  float maximum = 0.0F;
  float sum = 0.0F;
  if (spec.weight == RoutingWeight::kSoftmaxOverAll) {
    sum = sum_over_experts(route, token, &maximum);
  } else if (spec.weight == RoutingWeight::kSoftmaxOverSelected) {
    maximum = float_of_ordered(__reduce_max_sync(kFullWarp, ordered_for_maximum(value)));
  }
  const float raw = raw_weight_of_value(spec, value, maximum);
  if (spec.weight != RoutingWeight::kSoftmaxOverAll) {
    sum = sum_over_slots(raw, route.top_k);
  }
  return final_weight(raw, route.routed_scale, weight_divisor(spec, sum));
}

// tokens_per_block: tokens whose keys share a CTA's shared memory.
inline WarpParams make_warp_params(const RouteProblem& problem, const RouteArgs& args,
                                   int64_t tokens_per_block) {
  WarpParams params{.route = make_route_params(problem, args)};
  params.experts = FastDivisor(static_cast<uint32_t>(params.route.experts));
  params.group_size = FastDivisor(static_cast<uint32_t>(params.route.group_size));
  params.tokens_per_block = static_cast<int32_t>(tokens_per_block);
  const auto groups = static_cast<uint32_t>(params.route.num_groups);
  const int32_t group_lanes = kWarpSize / static_cast<int32_t>(std::bit_ceil(groups));
  params.group_lane_bits = std::countr_zero(static_cast<uint32_t>(group_lanes));
  params.group_steps = static_cast<int32_t>(ceil_div(params.route.group_size, group_lanes));
  params.candidates = params.route.num_groups > 1
                          ? params.route.topk_group * params.route.group_size
                          : params.route.experts;
  params.shared_stride = static_cast<int32_t>(round_up(params.route.experts, 4));
  return params;
}

// Dynamic shared memory, in words, of a CTA's keys and values.
NF_HOST_DEVICE inline int64_t warp_shared_words(const WarpParams& params) {
  return int64_t{2} * params.tokens_per_block * params.shared_stride;
}

// Calls body with the least number of registers that hold `needed` keys.
template <typename Body>
void visit_keys_per_lane(int64_t needed, const Body& body) {
  if (needed <= 1) return body(std::integral_constant<int, 1>());
  if (needed <= 4) return body(std::integral_constant<int, 4>());
  if (needed <= 8) return body(std::integral_constant<int, 8>());
  if (needed <= 12) return body(std::integral_constant<int, 12>());
  body(std::integral_constant<int, 16>());
}

// Whether registers and lanes suffice.
inline Support fits_a_warp(const RouteProblem& problem) {
  static_assert(kMaxWarpExperts == 512 && kMaxWarpSlots == 32 && kMaxWarpGroups == 32);
  if (problem.config.experts > kMaxWarpExperts) return Support::no("more than 512 experts");
  if (problem.config.top_k > kMaxWarpSlots) return Support::no("more than 32 selected experts");
  if (problem.config.n_group > kMaxWarpGroups) return Support::no("more than 32 groups");
  return Support::yes();
}

}  // namespace narrowfloat
