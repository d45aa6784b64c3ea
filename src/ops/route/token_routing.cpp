// See token_routing.h. Sums run in the order of the specification: over all experts ascending, over
// the selected ones in slot order (moe spec 4.1).
#include "ops/route/token_routing.h"

#include <algorithm>
#include <limits>

#include "formats/float16.h"
#include "tensor/element_io.h"

namespace narrowfloat {
namespace {

// A softmax's maximum and the sum of raw weights, over all experts or over the selected ones.
struct Totals {
  float maximum = -std::numeric_limits<float>::infinity();
  float sum = 0.0F;
};

// Calls logit_at(i) for i in [0, count). NaN never is the maximum and always enters the sum.
template <typename LogitAt>
Totals totals_of(RoutingWeight weight, int32_t count, const LogitAt& logit_at) {
  Totals totals;
  for (int32_t i = 0; i < count; ++i) totals.maximum = std::max(totals.maximum, logit_at(i));
  for (int32_t i = 0; i < count; ++i) {
    totals.sum = add_rn(totals.sum, raw_weight(weight, logit_at(i), totals.maximum));
  }
  return totals;
}

// The common end of every routing, computed or given: rounding, shared experts, replay.
void finish_row(const RouteProblem& problem, const RouteArgs& args, int64_t token) {
  const RoutingConfig& config = problem.config;
  int32_t* const ids = args.ids + token * problem.slots();
  float* const weights = args.weights + token * problem.slots();
  if (config.options.weights_bf16) round_through(DType::kBF16, weights, config.top_k);
  for (int32_t s = 0; s < config.shared_experts; ++s) {
    ids[config.top_k + s] = config.experts + s;
    weights[config.top_k + s] = 1.0F;
  }
  if (args.replay == nullptr) return;
  int16_t* const replay = args.replay + token * config.top_k;
  for (int32_t s = 0; s < config.top_k; ++s) replay[s] = static_cast<int16_t>(ids[s]);
}

}  // namespace

void load_bias(const RouteProblem& problem, const RouteArgs& args, ExpertRow* bias) {
  if (args.bias == nullptr) {
    bias->fill(0.0F);
    return;
  }
  widen(problem.bias, args.bias, problem.config.experts, bias->data());
  if (problem.grouped() && problem.config.options.grouped_bias_bf16) {
    round_through(DType::kBF16, bias->data(), problem.config.experts);
  }
}

void load_logits(const RouteProblem& problem, const RouteArgs& args, int64_t token,
                 ExpertRow* logits) {
  widen(problem.dtype, element_pointer(args.logits, problem.dtype, token * args.logits_stride),
        problem.config.experts, logits->data());
}

void finish_token(const RouteProblem& problem, const RouteArgs& args, int64_t token,
                  const ExpertRow& logits) {
  const RoutingSpec& spec = problem.spec;
  const int32_t top_k = problem.config.top_k;
  const int32_t* const ids = args.ids + token * problem.slots();
  float* const weights = args.weights + token * problem.slots();
  const auto logit_of_expert = [&](int32_t e) { return logits[static_cast<size_t>(e)]; };
  const auto logit_of_slot = [&](int32_t s) { return logit_of_expert(ids[s]); };
  const Totals totals = spec.weight == RoutingWeight::kSoftmaxOverAll
                            ? totals_of(spec.weight, problem.config.experts, logit_of_expert)
                            : totals_of(spec.weight, top_k, logit_of_slot);
  const float divisor = weight_divisor(spec, totals.sum);
  for (int32_t s = 0; s < top_k; ++s) {
    const float raw = raw_weight(spec.weight, logit_of_slot(s), totals.maximum);
    weights[s] = final_weight(raw, problem.config.routed_scale, divisor);
  }
  finish_row(problem, args, token);
}

void copy_precomputed(const RouteProblem& problem, const RouteArgs& args, int64_t token) {
  const int32_t top_k = problem.config.top_k;
  const int64_t first = token * top_k;
  int32_t* const ids = args.ids + token * problem.slots();
  float* const weights = args.weights + token * problem.slots();
  for (int32_t s = 0; s < top_k; ++s) ids[s] = given_id(args, first + s);
  if (args.packed != nullptr) {
    for (int32_t s = 0; s < top_k; ++s) {
      weights[s] = bf16_to_float(static_cast<uint16_t>(args.packed[first + s] & 0xFFFF));
    }
  } else if (args.given_weights != nullptr) {
    widen(problem.dtype, element_pointer(args.given_weights, problem.dtype, first), top_k, weights);
  } else {
    std::fill_n(weights, top_k, 1.0F);
  }
  finish_row(problem, args, token);
}

}  // namespace narrowfloat
