// Routing methods as data (moe spec 4.8): a method is a row of kRoutingMethods, and every
// implementation, on any device, reads that row. The scalar functions below are the whole
// arithmetic of a router except its sums; keys are compared, so they are bit-exact everywhere (moe
// spec 1.6). This header needs no fmt: kernels include it.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "base/portable_math.h"
#include "narrowfloat/route.h"

namespace narrowfloat {

// The order criterion of experts.
enum class RoutingKey : uint8_t { kLogit, kSigmoid, kSigmoidPlusBias };

// The raw weight of a selected expert. Softmaxes are exp(x - maximum) divided by the sum.
enum class RoutingWeight : uint8_t { kLogit, kSigmoid, kSoftmaxOverAll, kSoftmaxOverSelected };

// The effect of the sum over the selected experts on the weights; softmaxes have their own.
enum class RoutingDivisor : uint8_t { kNone, kSumAtLeastTiny, kSumPlusTiny };

struct RoutingSpec {
  RoutingKey key = RoutingKey::kLogit;
  RoutingWeight weight = RoutingWeight::kLogit;
  RoutingDivisor divisor = RoutingDivisor::kNone;
  bool norm_optional = false;  // norm_topk = false omits the division.
  bool scaled = false;         // Multiplied by routed_scale.
  bool grouped = false;        // May select groups of experts first (moe spec 4.3).
  bool single = false;         // top_k is 1.

  [[nodiscard]] constexpr bool takes_bias() const { return key == RoutingKey::kSigmoidPlusBias; }
};

struct RoutingMethodRecord {
  RoutingMethod id;
  std::string_view name;
  RoutingSpec spec;
  std::string_view description;
};

// The entries are in the order of RoutingMethod (moe spec 4.2).
inline constexpr std::array kRoutingMethods{
    RoutingMethodRecord{RoutingMethod::kDefault,
                        "default",
                        {RoutingKey::kLogit, RoutingWeight::kSoftmaxOverAll},
                        "by logit; softmax over all experts"},
    RoutingMethodRecord{RoutingMethod::kRenormalize,
                        "renormalize",
                        {RoutingKey::kLogit, RoutingWeight::kSoftmaxOverSelected},
                        "by logit; softmax over the selected experts"},
    RoutingMethodRecord{RoutingMethod::kDeepSeekV3,
                        "deepseek_v3",
                        {.key = RoutingKey::kSigmoidPlusBias,
                         .weight = RoutingWeight::kSigmoid,
                         .divisor = RoutingDivisor::kSumPlusTiny,
                         .scaled = true,
                         .grouped = true},
                        "by sigmoid + bias, in the best groups; sigmoid * scale / (sum + 1e-20)"},
    RoutingMethodRecord{
        RoutingMethod::kLlama4,
        "llama4",
        {.key = RoutingKey::kLogit, .weight = RoutingWeight::kSigmoid, .single = true},
        "the one best logit; its sigmoid"},
    RoutingMethodRecord{RoutingMethod::kRenormalizeNaive,
                        "renormalize_naive",
                        {RoutingKey::kLogit, RoutingWeight::kSoftmaxOverSelected},
                        "as renormalize"},
    RoutingMethodRecord{RoutingMethod::kTopK,
                        "topk",
                        {RoutingKey::kLogit, RoutingWeight::kLogit},
                        "by logit; the logit itself"},
    RoutingMethodRecord{RoutingMethod::kSigmoidRenorm,
                        "sigmoid_renorm",
                        {.key = RoutingKey::kSigmoid,
                         .weight = RoutingWeight::kSigmoid,
                         .divisor = RoutingDivisor::kSumAtLeastTiny,
                         .norm_optional = true},
                        "by sigmoid; sigmoid / max(sum, 1e-20), or the sigmoid without norm_topk"},
    RoutingMethodRecord{RoutingMethod::kMiniMax2,
                        "minimax2",
                        {.key = RoutingKey::kSigmoidPlusBias,
                         .weight = RoutingWeight::kSigmoid,
                         .divisor = RoutingDivisor::kSumPlusTiny,
                         .scaled = true},
                        "by sigmoid + bias; sigmoid * scale / (sum + 1e-20)"},
    RoutingMethodRecord{RoutingMethod::kSigmoid,
                        "sigmoid",
                        {RoutingKey::kSigmoid, RoutingWeight::kSigmoid},
                        "by sigmoid, where saturated ones tie; the sigmoid"},
    RoutingMethodRecord{RoutingMethod::kTopKSigmoid,
                        "topk_sigmoid",
                        {RoutingKey::kLogit, RoutingWeight::kSigmoid},
                        "by logit; the sigmoid"},
};

// The order of keys as integers (moe spec 4.1): larger first, -0 below +0, NaN beyond the
// infinities.
NF_HOST_DEVICE inline uint32_t ordered_bits(float key) {
  const uint32_t bits = float_bits(key);
  return bits ^ ((bits >> 31) != 0 ? 0xFFFFFFFFU : 0x80000000U);
}

// The key from its value: the logit's sigmoid, or the logit itself for kLogit.
NF_HOST_DEVICE inline float key_of_value(RoutingKey key, float value, float bias) {
  // Devices make NaNs of different bits, which would rank differently.
  return key == RoutingKey::kSigmoidPlusBias ? canonical_nan(add_rn(value, bias)) : value;
}

NF_HOST_DEVICE inline float routing_key(RoutingKey key, float logit, float bias) {
  return key_of_value(key, key == RoutingKey::kLogit ? logit : sigmoid_by_tanh(logit), bias);
}

// The score of a group of experts: its two largest keys together (moe spec 4.3).
NF_HOST_DEVICE inline float group_score(float largest, float second) {
  return canonical_nan(add_rn(largest, second));
}

// `maximum`: of the logits that a softmax runs over.
NF_HOST_DEVICE inline float softmax_term(float logit, float maximum) {
  return exp_portable(add_rn(logit, -maximum));
}

NF_HOST_DEVICE inline float raw_weight(RoutingWeight weight, float logit, float maximum) {
  if (weight == RoutingWeight::kLogit) return logit;
  // The weight never comes from key - bias: that cancels (moe spec 4.2).
  if (weight == RoutingWeight::kSigmoid) return sigmoid_by_tanh(logit);
  return softmax_term(logit, maximum);
}

// The divisor from the sum of the raw weights that count. NaN stays NaN.
NF_HOST_DEVICE inline float weight_divisor(const RoutingSpec& spec, float sum) {
  constexpr float kTiny = 1e-20F;
  if (spec.weight == RoutingWeight::kSoftmaxOverAll) return sum;
  if (spec.weight == RoutingWeight::kSoftmaxOverSelected) return sum;
  if (spec.divisor == RoutingDivisor::kSumPlusTiny) return add_rn(sum, kTiny);
  if (spec.divisor == RoutingDivisor::kSumAtLeastTiny) return sum < kTiny ? kTiny : sum;
  return 1.0F;
}

// The result is exact where scale or divisor is 1.
NF_HOST_DEVICE inline float final_weight(float raw, float scale, float divisor) {
  return canonical_nan(div_rn(mul_rn(raw, scale), divisor));
}

}  // namespace narrowfloat
