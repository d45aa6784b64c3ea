// Routing: from a token's logits to its experts and their weights (moe spec 4).
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "narrowfloat/export.h"
#include "narrowfloat/tensor.h"

namespace narrowfloat {

// Numbers are FlashInfer's RoutingMethodType.
enum class RoutingMethod : int {
  kDefault = 0,
  kRenormalize = 1,
  kDeepSeekV3 = 2,
  kLlama4 = 3,
  kRenormalizeNaive = 4,
  kTopK = 5,
  kSigmoidRenorm = 6,
  kMiniMax2 = 7,
  kSigmoid = 8,
  kTopKSigmoid = 9,
};

struct RoutingMethodInfo {
  RoutingMethod id;
  std::string_view name;         // "deepseek_v3"
  std::string_view description;  // Selection key and weight, one line.
};
NARROWFLOAT_API std::span<const RoutingMethodInfo> all_routing_methods();
NARROWFLOAT_API std::string_view name(RoutingMethod method);
// Throws kInvalidArgument that lists the accepted names.
NARROWFLOAT_API RoutingMethod parse_routing_method(std::string_view text);

struct RouterOptions {
  bool weights_bf16 = false;           // Round the final weights to bf16 (nearest even).
  bool grouped_bias_bf16 = false;      // kDeepSeekV3 with groups: round the bias to bf16 first.
  bool negative_one_is_empty = false;  // Precomputed id -1 is an empty slot instead of an error.
};

struct RoutingConfig {
  RoutingMethod method = RoutingMethod::kRenormalize;
  int32_t experts = 0;         // E
  int32_t top_k = 0;           // k, 1 to E
  int32_t shared_experts = 0;  // S; ids E to E + S - 1 at slots k to k + S - 1, weight 1.
  int32_t n_group = 1;         // kDeepSeekV3 only; 0 and 1 mean no groups.
  int32_t topk_group = 1;
  float routed_scale = 1.0F;  // kDeepSeekV3 and kMiniMax2 only.
  bool norm_topk = true;      // false for kSigmoidRenorm only.
  RouterOptions options;
};

// Throws kInvalidArgument for values outside the limits, and for values that the method would
// ignore (moe spec 1.8, 4.3).
NARROWFLOAT_API void check_routing_config(const RoutingConfig& config);

// Exactly one of logits, packed and ids.
struct Routing {
  TensorView logits;   // F32, BF16 or F16 [T, E], dense rows with any row stride.
  TensorView bias;     // With logits, kDeepSeekV3 and kMiniMax2 only: F32 or BF16 [E]; absent is 0.
  TensorView packed;   // I32 [T, k]: id << 16 | bf16 weight.
  TensorView ids;      // I32 or I64 [T, k] and
  TensorView weights;  // F32 or BF16 [T, k]; absent with ids: 1.
};

// Errors that a device backend finds in data it cannot check beforehand. Cleared by each call.
struct DeviceErrors {
  uint32_t count = 0;        // Precomputed ids outside [0, E), treated as slots of no local expert.
  uint32_t kind = 0;         // 1: id out of range.
  int64_t first_index = -1;  // Lowest offending index t * k + s.
};

struct RouteOutputs {
  TensorView ids;      // I32 [T, k + S], best expert first; -1 for an empty slot.
  TensorView weights;  // F32 [T, k + S].
  TensorView replay;   // Optional: I16 [>= T, k]: the routed ids once more. Not with S > 0.
  DeviceErrors* errors = nullptr;  // Optional; device memory for a device backend.
};

// Computes ids and weights of all slots, from logits or from a precomputed routing. Ids are the
// same on every device, ties included: keys are compared by the order of their bits (-0 below +0,
// NaN above infinity), equal keys by the lower id. For precomputed ids out of range the CPU throws
// kInvalidArgument before it writes anything; a GPU writes -1 for them and counts them in `errors`.
NARROWFLOAT_API void route(const Routing& routing, const RoutingConfig& config,
                           const RouteOutputs& outputs, Stream stream = {});

}  // namespace narrowfloat
