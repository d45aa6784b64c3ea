// The common part of the CUDA routers: loads of logits and biases, keys, and the steps after a
// token's selection. The arithmetic is routing_spec.h's and the order of sums is that of
// token_routing.cpp, so ids and weights have the CPU's bits.
#pragma once

#include "device/ptx/grid_dependency.cuh"
#include "device/reduce.cuh"
#include "device/vector_io.cuh"
#include "formats/float16.h"
#include "ops/route/route_problem.h"
#include "runtime/cuda/cuda_devices.h"
#include "runtime/cuda/launch.h"

namespace narrowfloat {

struct RouteParams {
  RouteArgs args;
  RoutingSpec spec;
  DType dtype = DType::kF32;       // Type of the logits.
  DType bias_dtype = DType::kF32;  // Type of the bias, if any.
  bool bias_bf16 = false;          // Round the bias first.
  bool weights_bf16 = false;
  float routed_scale = 1.0F;
  int64_t tokens = 0;
  int32_t experts = 0;
  int32_t top_k = 0;
  int32_t slots = 0;  // top_k and the shared experts.
  int32_t num_groups = 1;
  int32_t topk_group = 1;
  int32_t group_size = 0;
};

inline RouteParams make_route_params(const RouteProblem& problem, const RouteArgs& args) {
  const RoutingConfig& config = problem.config;
  RouteParams params;
  params.args = args;
  params.spec = problem.spec;
  params.dtype = problem.dtype;
  params.bias_dtype = problem.bias;
  params.bias_bf16 = problem.grouped() && config.options.grouped_bias_bf16;
  params.weights_bf16 = config.options.weights_bf16;
  params.routed_scale = config.routed_scale;
  params.tokens = problem.tokens;
  params.experts = config.experts;
  params.top_k = config.top_k;
  params.slots = static_cast<int32_t>(problem.slots());
  params.num_groups = config.n_group;
  params.topk_group = config.topk_group;
  params.group_size = problem.group_size();
  return params;
}

// Loads F32, BF16 or F16 as stored; exact, NaN payloads included.
__device__ inline float load_widened(const void* data, DType dtype, int64_t index) {
  if (dtype == DType::kF32) return load_readonly<float>(static_cast<const float*>(data) + index);
  const auto half = load_readonly<uint16_t>(static_cast<const uint16_t*>(data) + index);
  return dtype == DType::kBF16 ? bf16_to_float(half) : f16_to_float(half);
}

__device__ inline float round_to_bf16(float value) { return bf16_to_float(float_to_bf16(value)); }

__device__ inline float load_logit(const RouteParams& params, int64_t token, int32_t expert) {
  return load_widened(params.args.logits, params.dtype, token * params.args.logits_stride + expert);
}

__device__ inline float load_bias(const RouteParams& params, int32_t expert) {
  if (params.args.bias == nullptr) return 0.0F;
  const float bias = load_widened(params.args.bias, params.bias_dtype, expert);
  return params.bias_bf16 ? round_to_bf16(bias) : bias;
}

// The inverse of ordered_bits().
__device__ inline float float_of_ordered(uint32_t ordered) {
  return bits_float(ordered ^ ((ordered >> 31) != 0 ? 0x80000000U : 0xFFFFFFFFU));
}

// The ordered bits of a logit for the maximum of a softmax: NaN never is the maximum. The sign of a
// zero makes no difference to logit - maximum.
__device__ inline uint32_t ordered_for_maximum(float logit) {
  return ordered_bits(is_nan(logit) ? -__builtin_inff() : logit);
}

// The index of slot `slot` of a token in ids and weights.
__device__ inline int64_t slot_index(const RouteParams& params, int64_t token, int32_t slot) {
  return token * params.slots + slot;
}

__device__ inline void store_routed(const RouteParams& params, int64_t token, int32_t slot,
                                    int32_t id, float weight) {
  const int64_t index = slot_index(params, token, slot);
  params.args.ids[index] = id;
  params.args.weights[index] = params.weights_bf16 ? round_to_bf16(weight) : weight;
  if (params.args.replay != nullptr) {
    params.args.replay[token * params.top_k + slot] = static_cast<int16_t>(id);
  }
}

// Stores shared experts `thread`, `thread` + `threads`, ... of a token.
__device__ inline void store_shared_experts(const RouteParams& params, int64_t token, int thread,
                                            int threads) {
  for (int32_t slot = params.top_k + thread; slot < params.slots; slot += threads) {
    const int64_t index = slot_index(params, token, slot);
    params.args.ids[index] = params.experts + slot - params.top_k;
    params.args.weights[index] = 1.0F;
  }
}

// Called by one thread of a call. Logits have no errors.
__device__ inline void clear_errors(DeviceErrors* errors) {
  if (errors != nullptr) *errors = {.count = 0, .kind = 0, .first_index = -1};
}

// A separate launch, for calls without another launch or with many CTAs that count errors.
void launch_clear_errors(DeviceErrors* errors, Stream stream);

}  // namespace narrowfloat
