// A routing as data (see quantize_problem.h).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "narrowfloat/route.h"
#include "ops/route/routing_spec.h"
#include "runtime/support.h"

namespace narrowfloat {

// E + S at most (moe spec 1.8): rows of keys fit on the stack.
inline constexpr int32_t kMaxExperts = 4096;

enum class RoutingInput : uint8_t { kLogits, kPacked, kUnpacked };

struct RouteProblem {
  RoutingInput input = RoutingInput::kLogits;
  DType dtype = DType::kF32;  // Type of the logits, or of unpacked weights.
  DType bias = DType::kF32;
  Device device;
  int64_t tokens = 0;
  RoutingConfig config;
  RoutingSpec spec;  // The method's, without the division if norm_topk = false.

  [[nodiscard]] int64_t slots() const { return config.top_k + config.shared_experts; }
  [[nodiscard]] bool grouped() const { return config.n_group > 1; }
  [[nodiscard]] int32_t group_size() const { return config.experts / config.n_group; }
};
std::string to_string(const RouteProblem& problem);

struct RouteArgs {
  const void* logits = nullptr;
  int64_t logits_stride = 0;        // In elements.
  const void* bias = nullptr;       // Null is zeros.
  const int32_t* packed = nullptr;  // In range, as are given_ids, on the CPU.
  const int32_t* given_ids = nullptr;
  const int64_t* given_wide_ids = nullptr;  // In the place of given_ids.
  const void* given_weights = nullptr;      // Null is ones.
  int32_t* ids = nullptr;
  float* weights = nullptr;
  int16_t* replay = nullptr;  // Null if not wanted.
  DeviceErrors* errors = nullptr;
};

// The id of slot `index` of a precomputed routing. Wide ids beyond 32 bits become the nearest
// number of 32 bits, which is out of range too.
NF_HOST_DEVICE inline int32_t given_id(const RouteArgs& args, int64_t index) {
  // The shift is arithmetic: the upper half is a signed id (moe spec 4.5).
  if (args.packed != nullptr) return args.packed[index] >> 16;
  if (args.given_wide_ids == nullptr) return args.given_ids[index];
  constexpr int64_t kLargest = 0x7FFFFFFF;
  constexpr int64_t kSmallest = -kLargest - 1;
  const int64_t id = args.given_wide_ids[index];
  if (id > kLargest) return kLargest;
  return static_cast<int32_t>(id < kSmallest ? kSmallest : id);
}

// The arguments of an implementation for a call.
struct RouteCall {
  RouteProblem problem;
  RouteArgs args;
};
// Throws kInvalidArgument for everything that route() refuses, except ids out of range.
RouteCall route_call(const Routing& routing, const RoutingConfig& config,
                     const RouteOutputs& outputs);
// The problem of such a call, for any outputs.
RouteProblem route_problem(const Routing& routing, const RoutingConfig& config);

struct RouteImpl {
  std::string_view name;
  Support (*supports)(const RouteProblem& problem);
  void (*run)(const RouteProblem& problem, const RouteArgs& args, Stream stream);
};

// Ordered, fastest first, the oracle last.
std::span<const RouteImpl> route_impls();
extern const RouteImpl kRouteCpuReference;
extern const RouteImpl kRouteCpuBaseline;
extern const RouteImpl kRouteSm90Warp;  // Only in builds with CUDA, like the next.
extern const RouteImpl kRouteSm80Warp;
extern const RouteImpl kRouteSm90Sort;
extern const RouteImpl kRouteSm80Sort;
extern const RouteImpl kRouteSm90Given;
extern const RouteImpl kRouteSm80Given;

}  // namespace narrowfloat
