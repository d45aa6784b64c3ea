// Routing on all cores: tokens in parallel, each token's k best by one pass over its experts with a
// heap of the best so far. Keys carry their id, so no two are equal and any selection algorithm
// gives the order of the specification (moe spec 4.1).
#include <algorithm>
#include <array>
#include <functional>

#include "ops/route/token_routing.h"
#include "runtime/parallel.h"

namespace narrowfloat {
namespace {

// The ordered bits of a key above the complement of its index: larger first, equal keys by lower
// index.
using RankedKey = uint64_t;
using RankedKeys = std::array<RankedKey, kMaxExperts>;

RankedKey ranked(float key, int32_t index) {
  return (static_cast<uint64_t>(ordered_bits(key)) << 32) | ~static_cast<uint32_t>(index);
}
int32_t index_of(RankedKey key) { return static_cast<int32_t>(~static_cast<uint32_t>(key)); }

// Sorts the `count` best to the beginning.
void select_best(RankedKey* keys, int32_t of, int32_t count) {
  std::partial_sort(keys, keys + count, keys + of, std::greater<>());
}

// Moves the experts of the kept groups to the beginning and returns their number.
int32_t keep_groups(const RouteProblem& problem, const ExpertRow& keys, RankedKeys* experts) {
  const int32_t size = problem.group_size();
  RankedKeys groups;
  for (int32_t j = 0; j < problem.config.n_group; ++j) {
    RankedKey* const members = experts->data() + static_cast<int64_t>(j) * size;
    select_best(members, size, 2);
    const auto largest = static_cast<size_t>(index_of(members[0]));
    const auto second = static_cast<size_t>(index_of(members[1]));
    groups[static_cast<size_t>(j)] = ranked(group_score(keys[largest], keys[second]), j);
  }
  select_best(groups.data(), problem.config.n_group, problem.config.topk_group);
  RankedKey* end = experts->data();
  for (int32_t i = 0; i < problem.config.topk_group; ++i) {
    const int32_t first = index_of(groups[static_cast<size_t>(i)]) * size;
    for (int32_t e = first; e < first + size; ++e) *end++ = ranked(keys[static_cast<size_t>(e)], e);
  }
  return static_cast<int32_t>(end - experts->data());
}

void route_token(const RouteProblem& problem, const RouteArgs& args, int64_t token,
                 const ExpertRow& bias) {
  int32_t candidates = problem.config.experts;
  ExpertRow logits;
  ExpertRow keys;
  RankedKeys experts;
  load_logits(problem, args, token, &logits);
  for (int32_t e = 0; e < candidates; ++e) {
    const auto at = static_cast<size_t>(e);
    keys[at] = routing_key(problem.spec.key, logits[at], bias[at]);
    experts[at] = ranked(keys[at], e);
  }
  if (problem.grouped()) candidates = keep_groups(problem, keys, &experts);
  const int32_t top_k = problem.config.top_k;
  select_best(experts.data(), candidates, top_k);
  int32_t* const ids = args.ids + token * problem.slots();
  for (int32_t s = 0; s < top_k; ++s) ids[s] = index_of(experts[static_cast<size_t>(s)]);
  finish_token(problem, args, token, logits);
}

void run(const RouteProblem& problem, const RouteArgs& args, Stream /*stream*/) {
  constexpr int64_t kTaskElements = 4096;
  const bool from_logits = problem.input == RoutingInput::kLogits;
  ExpertRow bias;
  load_bias(problem, args, &bias);
  const int64_t row = from_logits ? problem.config.experts : problem.slots();
  const int64_t grain = row_grain(kTaskElements, row);
  parallel_for(problem.tokens, grain, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      if (from_logits) {
        route_token(problem, args, token, bias);
      } else {
        copy_precomputed(problem, args, token);
      }
    }
  });
  if (args.errors != nullptr) *args.errors = {};
}

Support supports(const RouteProblem& problem) { return cpu_only(problem.device); }

}  // namespace

const RouteImpl kRouteCpuBaseline{"cpu_baseline", supports, run};

}  // namespace narrowfloat
