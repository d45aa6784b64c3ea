// The oracle, token after token (moe spec 4.1 to 4.3):
//
//   key_e = x_e | sigmoid(x_e) | sigmoid(x_e) + b_e
//   G_j   = largest + second largest key of group j;   keep the topk_group largest G
//   ids   = the k largest keys among experts of kept groups, equal keys by the lower id
//   w_e   = raw_e * c / divisor;   raw and divisor as the method's row of routing_spec.h says
//
// Each maximum is one pass over the values that are not taken yet.
#include <array>

#include "ops/route/token_routing.h"
#include "runtime/float_environment.h"

namespace narrowfloat {
namespace {

using Flags = std::array<bool, kMaxExperts>;

// The index in [begin, end) of the largest value that may be taken, the first of equal ones.
int32_t take_largest(const ExpertRow& values, int32_t begin, int32_t end, Flags* may_take) {
  int32_t best = -1;
  for (int32_t i = begin; i < end; ++i) {
    const auto at = static_cast<size_t>(i);
    if (!(*may_take)[at]) continue;
    const bool is_larger =
        best < 0 || ordered_bits(values[at]) > ordered_bits(values[static_cast<size_t>(best)]);
    if (is_larger) best = i;
  }
  (*may_take)[static_cast<size_t>(best)] = false;
  return best;
}

// Experts outside the kept groups may not be taken, whatever their keys: no key value could stand
// for that, as -Inf and NaN are keys too.
void mask_groups(const RouteProblem& problem, const ExpertRow& keys, Flags* may_take) {
  const int32_t groups = problem.config.n_group;
  const int32_t size = problem.group_size();
  ExpertRow scores;
  Flags group_left;
  for (int32_t j = 0; j < groups; ++j) {
    const int32_t largest = take_largest(keys, j * size, (j + 1) * size, may_take);
    const int32_t second = take_largest(keys, j * size, (j + 1) * size, may_take);
    scores[static_cast<size_t>(j)] =
        group_score(keys[static_cast<size_t>(largest)], keys[static_cast<size_t>(second)]);
    group_left[static_cast<size_t>(j)] = true;
  }
  may_take->fill(false);
  for (int32_t kept = 0; kept < problem.config.topk_group; ++kept) {
    const int32_t group = take_largest(scores, 0, groups, &group_left);
    for (int32_t e = group * size; e < (group + 1) * size; ++e) {
      (*may_take)[static_cast<size_t>(e)] = true;
    }
  }
}

void route_token(const RouteProblem& problem, const RouteArgs& args, int64_t token,
                 const ExpertRow& bias) {
  const int32_t experts = problem.config.experts;
  ExpertRow logits;
  ExpertRow keys;
  Flags may_take;
  load_logits(problem, args, token, &logits);
  for (size_t e = 0; e < static_cast<size_t>(experts); ++e) {
    keys[e] = routing_key(problem.spec.key, logits[e], bias[e]);
  }
  may_take.fill(true);
  if (problem.grouped()) mask_groups(problem, keys, &may_take);
  int32_t* const ids = args.ids + token * problem.slots();
  for (int32_t s = 0; s < problem.config.top_k; ++s) {
    ids[s] = take_largest(keys, 0, experts, &may_take);
  }
  finish_token(problem, args, token, logits);
}

void run(const RouteProblem& problem, const RouteArgs& args, Stream /*stream*/) {
  const FloatEnvironmentGuard guard;
  ExpertRow bias;
  load_bias(problem, args, &bias);
  for (int64_t token = 0; token < problem.tokens; ++token) {
    if (problem.input == RoutingInput::kLogits) {
      route_token(problem, args, token, bias);
    } else {
      copy_precomputed(problem, args, token);
    }
  }
  if (args.errors != nullptr) *args.errors = {};
}

Support supports(const RouteProblem& problem) { return cpu_only(problem.device); }

}  // namespace

const RouteImpl kRouteCpuReference{"cpu_reference", supports, run};

}  // namespace narrowfloat
