// The destinations of the tokens of one rank (docs/parallel.md) depend on their ids alone.
#pragma once

#include <cstdint>
#include <vector>

#include "comm/expert_ranks.h"
#include "narrowfloat/expert_parallel.h"

namespace narrowfloat {

struct DispatchPlan {
  int64_t tokens = 0;
  int ranks = 0;
  // [tokens, ranks]: the place of the token among those that this rank sends there, in the order of
  // tokens; -1: none of its experts is there.
  std::vector<int32_t> places;
  std::vector<int32_t> counts;  // [ranks]: tokens sent there.

  [[nodiscard]] int32_t place(int64_t token, int rank) const {
    return places[static_cast<size_t>(token * ranks + rank)];
  }
};

// ids: dense I32 [tokens, k] on the CPU. Ids that name no expert go nowhere.
DispatchPlan plan_dispatch(const TensorView& ids, int32_t experts, int ranks);

}  // namespace narrowfloat
