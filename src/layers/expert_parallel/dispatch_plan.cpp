// See dispatch_plan.h.
#include "layers/expert_parallel/dispatch_plan.h"

#include "base/throw_error.h"

namespace narrowfloat {

ExpertShard expert_shard(int32_t experts, int ranks, int rank) {
  if (rank < 0 || rank >= ranks || ranks > experts) {
    throw_invalid("rank: expected 0 <= rank < ranks <= experts, got rank {} of {}, {} experts",
                  rank, ranks, experts);
  }
  const int32_t least = experts / ranks;
  const int32_t extra = experts % ranks;
  const int32_t before = rank < extra ? rank : extra;  // Ranks before this one with one more.
  return {.offset = rank * least + before, .count = least + (rank < extra ? 1 : 0)};
}

DispatchPlan plan_dispatch(const TensorView& ids, int32_t experts, int ranks) {
  DispatchPlan plan;
  plan.tokens = ids.shape[0];
  plan.ranks = ranks;
  plan.places.assign(static_cast<size_t>(plan.tokens * ranks), -1);
  plan.counts.assign(static_cast<size_t>(ranks), 0);
  const auto* id = static_cast<const int32_t*>(ids.data);
  for (int64_t token = 0; token < plan.tokens; ++token) {
    for (int64_t slot = 0; slot < ids.shape[1]; ++slot, ++id) {
      if (*id < 0 || *id >= experts) continue;
      const auto rank = static_cast<size_t>(rank_of_expert(experts, ranks, *id));
      int32_t& place = plan.places[static_cast<size_t>(token * ranks) + rank];
      if (place < 0) place = plan.counts[rank]++;
    }
  }
  return plan;
}

}  // namespace narrowfloat
