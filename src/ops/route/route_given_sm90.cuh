// Slots of a precomputed routing (moe spec 4.5), for the kernels that copy them. A thread copies
// one slot of the output at a time.
#pragma once

#include "base/fast_division.h"
#include "ops/route/route_sm90.cuh"

namespace narrowfloat {

inline constexpr uint32_t kIdOutOfRange = 1;

struct GivenParams {
  RouteParams route;
  FastDivisor slots;  // Slots of a token.
  uint32_t num_slots = 0;
  bool is_packed = false;
  bool allows_empty = false;
};

__device__ inline bool is_in_range(const GivenParams& params, int32_t id) {
  return (id >= 0 && id < params.route.experts) || (id == -1 && params.allows_empty);
}

__device__ inline void report(DeviceErrors* errors, int64_t index) {
  if (errors == nullptr) return;
  using Unsigned = unsigned long long;  // NOLINT(google-runtime-int): atomicMin takes this type.
  atomicAdd(&errors->count, 1U);
  errors->kind = kIdOutOfRange;
  // -1 is the largest unsigned number.
  atomicMin(reinterpret_cast<Unsigned*>(&errors->first_index), static_cast<Unsigned>(index));
}

__device__ inline float given_weight(const GivenParams& params, int64_t index) {
  const RouteArgs& args = params.route.args;
  if (params.is_packed) {
    return bf16_to_float(static_cast<uint16_t>(load_readonly<int32_t>(args.packed + index)));
  }
  if (args.given_weights == nullptr) return 1.0F;
  return load_widened(args.given_weights, params.route.dtype, index);
}

// Copies a slot and returns its id.
__device__ inline int32_t copy_slot(const GivenParams& params, uint32_t slot) {
  const RouteParams& route = params.route;
  const uint32_t token = params.slots.quotient(slot);
  const auto slot_of_token = static_cast<int32_t>(slot - token * params.slots.divisor());
  if (slot_of_token >= route.top_k) {
    const int32_t shared_id = route.experts + slot_of_token - route.top_k;
    route.args.ids[slot] = shared_id;
    route.args.weights[slot] = 1.0F;
    return shared_id;
  }
  const int64_t index = int64_t{token} * route.top_k + slot_of_token;
  int32_t id = given_id(route.args, index);
  const float weight = given_weight(params, index);
  if (!is_in_range(params, id)) {
    report(route.args.errors, index);
    id = -1;
  }
  store_routed(route, token, slot_of_token, id, weight);
  return id;
}

inline GivenParams make_given_params(const RouteProblem& problem, const RouteArgs& args) {
  GivenParams params{.route = make_route_params(problem, args)};
  params.slots = FastDivisor(static_cast<uint32_t>(params.route.slots));
  params.num_slots = static_cast<uint32_t>(problem.tokens * problem.slots());
  params.is_packed = problem.input == RoutingInput::kPacked;
  params.allows_empty = problem.config.options.negative_one_is_empty;
  return params;
}

}  // namespace narrowfloat
