// Two-shot all-reduce: reduce-scatter and all-gather through peer memory (allreduce spec 6.2).
//
//   stage    own addends -> own staging area               | tokens are divided into one contiguous
//   barrier                                                | range a rank
//   reduce   pull the own range from every staging area,   |
//            sum, push it to every rank's result area      |
//   barrier                                                |
//   finish   all tokens from the own result area           |
//
// The token at position p of its owner's range belongs to cluster p % num_clusters in all three
// steps, on all ranks. So a CTA reads only what CTAs of its own number staged or pushed, and the
// barriers of that number order these accesses. All ranks launch the same grid. One staging and
// one result area are enough: a rank enters the next call when its whole grid has ended.
//
// A Row is that of oneshot.h; stores_local_value() counts for nothing here.
#pragma once

#include "comm/oneshot.h"

namespace narrowfloat {

// The range of a rank: tokens [first, first + count). The first ranks own one more.
struct TokenRange {
  uint32_t first = 0;
  uint32_t count = 0;
};

NF_HOST_DEVICE constexpr TokenRange token_range(int64_t tokens, int ranks, int rank) {
  // Peer memory takes fewer than 2^31 tokens, and GPUs divide 32-bit numbers faster.
  const auto count = static_cast<uint32_t>(tokens);
  const auto number = static_cast<uint32_t>(rank);
  const uint32_t least = count / static_cast<uint32_t>(ranks);
  const uint32_t more = count % static_cast<uint32_t>(ranks);
  return {number * least + (number < more ? number : more), least + (number < more ? 1 : 0)};
}

inline constexpr uint32_t kTwoShotEpochs = 2;  // Barriers of a call.

template <int kMostRanks, class Elements, class Cta, class Row>
NF_HOST_DEVICE void twoshot_allreduce(Cta& cta, const RankMemory& memory, const RowExtents& extents,
                                      AllReduceAccumulation accumulation, Row& row) {
  using LeafType = typename Elements::LeafType;
  const uint32_t epoch = cta.load_relaxed(&memory.control->twoshot[cta.index()].epoch);
  const uint32_t abort_cell = enter_call(cta, memory);
  const auto area = [&](int rank, int64_t part, int64_t token) {
    return reinterpret_cast<LeafType*>(memory.regions[rank] + part) + token * extents.leaves;
  };
  // Calls f(token) for this cluster's tokens of a rank's range.
  const auto for_each_token = [&](int owner, auto&& f) {
    const TokenRange range = token_range(extents.tokens, memory.ranks, owner);
    const auto step = static_cast<uint32_t>(cta.num_clusters());
    for (auto i = static_cast<uint32_t>(cta.cluster()); i < range.count; i += step) {
      f(int64_t{range.first + i});
    }
  };

  for (int owner = 0; owner < memory.ranks; ++owner) {
    for_each_token(owner, [&](int64_t token) {
      LeafType* const staged = area(memory.rank, memory.layout.staging, token);
      cta.for_each_leaf(extents.leaves, [&](int64_t leaf, bool is_inside) {
        if (is_inside) staged[leaf] = without_negative_zeros(row.local_value(token, leaf));
      });
    });
  }
  cta.reached(ProtocolPoint::kStaged);
  row.clear_padding();
  heed_abort(cta, memory, abort_cell);
  barrier_over_ranks(cta, memory, epoch + 1);
  cta.reached(ProtocolPoint::kFirstBarrier);

  for_each_token(memory.rank, [&](int64_t token) {
    cta.for_each_leaf(extents.leaves, [&](int64_t leaf, bool is_inside) {
      // After a barrier that failed, other ranks may still write there.
      if (!is_inside || cta.aborted) return;
      LeafType values[kMostRanks] = {};
      NF_UNROLL
      for (int rank = 0; rank < kMostRanks; ++rank) {
        if (rank >= memory.ranks) continue;
        values[rank] = cta.pull(area(rank, memory.layout.staging, token) + leaf);
      }
      const LeafType sum =
          sum_in_rank_order<kMostRanks, Elements>(values, memory.ranks, accumulation);
      NF_UNROLL
      for (int rank = 0; rank < kMostRanks; ++rank) {
        if (rank >= memory.ranks) continue;
        area(rank, memory.layout.result, token)[leaf] = sum;
      }
    });
  });
  cta.reached(ProtocolPoint::kReduced);
  barrier_over_ranks(cta, memory, epoch + 2);
  cta.after_push();
  cta.reached(ProtocolPoint::kSecondBarrier);

  for (int owner = 0; owner < memory.ranks; ++owner) {
    for_each_token(owner, [&](int64_t token) {
      const LeafType* const result = area(memory.rank, memory.layout.result, token);
      cta.for_each_leaf(extents.leaves, [&](int64_t leaf, bool is_inside) {
        LeafType sum{};
        row.prepare(token, leaf, is_inside);
        if (is_inside && !cta.aborted) sum = cta.pull(result + leaf);
        row.accept(token, leaf, is_inside, sum);
      });
      row.finish(token);
    });
  }

  leave_call(cta, memory.control->twoshot, {.epoch = epoch + kTwoShotEpochs});
}

// One rank: the epilogue alone.
template <class Elements, class Cta, class Row>
NF_HOST_DEVICE void single_rank_allreduce(Cta& cta, const RowExtents& extents, Row& row) {
  using LeafType = typename Elements::LeafType;
  row.clear_padding();
  for (int64_t token = cta.cluster(); token < extents.tokens; token += cta.num_clusters()) {
    cta.for_each_leaf(extents.leaves, [&](int64_t leaf, bool is_inside) {
      LeafType value{};
      row.prepare(token, leaf, is_inside);
      if (is_inside) {
        // Rounding makes NaN canonical, as a sum over several ranks does.
        float x[kLeafElements];
        Elements::widen(without_negative_zeros(row.local_value(token, leaf)), x);
        value = Elements::narrow(x);
      }
      row.accept(token, leaf, is_inside, value);
    });
    row.finish(token);
  }
}

}  // namespace narrowfloat
