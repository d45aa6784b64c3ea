// Two-shot all-reduce: a reduce-scatter and an all-gather by stores to peer memory; as in the
// one-shot, the data are their own flags (allreduce spec 6.1, 6.2).
//
//   rank r, call f                              areas of a rank
//   push    own addends -> slot r of staging    staging, 2: one slot for each source, of the leaves
//           f % 2 of the rank that owns them    that the rank owns
//   reduce  poll the slots of own leaves, sum,  result: the sums of all leaves
//           send the sum to every rank's result
//   finish  poll own result, token by token
//
// The leaves of all tokens are divided into one contiguous range a rank. Whoever takes a leaf
// empties its cell at once: in the call that filled it. So two staging areas and one result area
// are enough. A rank that stores to staging in call f+2 has a sum of call f+1, and a rank that
// sends a sum of call f+1 has its addends; either was made from addends of every rank, which each
// sent after its call f was over. Every CTA sends all of its addends before it waits for any, and
// all sums of its leaves before it waits for those of others, so no wait depends on itself.
//
// A Row is that of oneshot.h.
#pragma once

#include "comm/oneshot.h"

namespace narrowfloat {

// The range of a rank: leaves [first, first + count). The first ranks own one more.
struct LeafRange {
  uint32_t first = 0;
  uint32_t count = 0;
};

// leaves: of all tokens; fewer than 2^31 (kMostTwoShotBytes).
NF_HOST_DEVICE constexpr LeafRange leaf_range(int64_t leaves, int ranks, int rank) {
  // GPUs divide 32-bit numbers faster.
  const auto count = static_cast<uint32_t>(leaves);
  const auto number = static_cast<uint32_t>(rank);
  const uint32_t least = count / static_cast<uint32_t>(ranks);
  const uint32_t more = count % static_cast<uint32_t>(ranks);
  return {number * least + (number < more ? number : more), least + (number < more ? 1 : 0)};
}

template <int kMostRanks, class Elements, class Cta, class Row>
NF_HOST_DEVICE void twoshot_allreduce(Cta& cta, const RankMemory& memory, const RowExtents& extents,
                                      AllReduceAccumulation accumulation, Row& row) {
  using LeafType = typename Elements::LeafType;
  const uint32_t epoch = cta.load_relaxed(&memory.control->twoshot[cta.index()].epoch);
  const uint32_t abort_cell = enter_call(cta, memory);
  const auto leaves_of_row = static_cast<uint32_t>(extents.leaves);
  const auto range_of = [&](int owner) {
    return leaf_range(extents.tokens * extents.leaves, memory.ranks, owner);
  };
  const auto staged = [&](int owner, const LeafRange& range, int source) {
    uint8_t* const area = memory.regions[owner] + memory.layout.staging +
                          epoch % kTwoShotStagings * memory.layout.area_bytes;
    return reinterpret_cast<LeafType*>(area) + static_cast<int64_t>(source) * range.count;
  };
  const auto result = [&](int rank) {
    return reinterpret_cast<LeafType*>(memory.regions[rank] + memory.layout.result);
  };
  const auto addend = [&](uint32_t index) {
    return without_negative_zeros(row.local_value(index / leaves_of_row, index % leaves_of_row));
  };

  // The next rank first, so that no rank gets the addends of all others at the same time.
  const bool stores_own = row.stores_local_value();
  for (int distance = 1; distance <= memory.ranks; ++distance) {
    const int owner = (memory.rank + distance) % memory.ranks;
    if (owner == memory.rank && !stores_own) continue;
    const LeafRange range = range_of(owner);
    LeafType* const slot = staged(owner, range, memory.rank);
    cta.for_each_cell(range.count, [&](int64_t i) {
      cta.send(slot + i, addend(range.first + static_cast<uint32_t>(i)));
    });
  }
  cta.reached(ProtocolPoint::kStaged);
  row.clear_padding();
  heed_abort(cta, memory, abort_cell);

  const LeafRange own = range_of(memory.rank);
  cta.for_each_cell(own.count, [&](int64_t i) {
    LeafType values[kMostRanks] = {};
    uint32_t missing = (1U << memory.ranks) - 1U;
    if (!stores_own) {
      missing &= ~(1U << memory.rank);
      set_slot(values, memory.rank, addend(own.first + static_cast<uint32_t>(i)));
    }
    const uint32_t polled = missing;
    const auto what = [&] {
      return WaitFor{AllReduceFault::kTwoShotWait, lowest_bit(missing), epoch};
    };
    const bool has_all = wait_until(cta, memory, what, [&] {
      // All loads are issued before the first is looked at.
      NF_UNROLL
      for (int slot = 0; slot < kMostRanks; ++slot) {
        if ((missing >> slot & 1U) == 0) continue;
        values[slot] = cta.template poll<LeafType>(staged(memory.rank, own, slot) + i);
      }
      NF_UNROLL
      for (int slot = 0; slot < kMostRanks; ++slot) {
        const bool arrives = (missing >> slot & 1U) != 0 && !has_sentinel(values[slot]);
        if (arrives) missing &= ~(1U << slot);
      }
      return missing == 0;
    });
    // No rank may take a sum without all addends.
    if (!has_all) return;
    const LeafType sum =
        sum_in_rank_order<kMostRanks, Elements>(values, memory.ranks, accumulation);
    NF_UNROLL
    for (int rank = 0; rank < kMostRanks; ++rank) {
      if (rank < memory.ranks) cta.send(result(rank) + own.first + i, sum);
    }
    NF_UNROLL
    for (int slot = 0; slot < kMostRanks; ++slot) {
      if ((polled >> slot & 1U) == 0) continue;
      cta.send(staged(memory.rank, own, slot) + i, leaf_of_sentinels<Elements::kBytes>());
    }
  });
  cta.after_push();
  cta.reached(ProtocolPoint::kReduced);

  for (int64_t token = cta.cluster(); token < extents.tokens; token += cta.num_clusters()) {
    cta.for_each_leaf(extents.leaves, [&](int64_t leaf, bool is_inside) {
      LeafType sum{};
      row.prepare(token, leaf, is_inside);
      if (is_inside) {
        LeafType* const cell = result(memory.rank) + token * extents.leaves + leaf;
        const auto what = [&] {
          const auto index = static_cast<uint32_t>(token * extents.leaves + leaf);
          int owner = 0;
          while (index - range_of(owner).first >= range_of(owner).count) ++owner;
          return WaitFor{AllReduceFault::kTwoShotWait, static_cast<uint32_t>(owner), epoch};
        };
        const bool has_sum = wait_until(cta, memory, what, [&] {
          sum = cta.template poll<LeafType>(cell);
          return !lacks_sum(sum);
        });
        if (has_sum) cta.send(cell, leaf_without_sums<Elements::kBytes>());
      }
      row.accept(token, leaf, is_inside, sum);
    });
    row.finish(token);
  }

  leave_call(cta, memory.control->twoshot, {.epoch = epoch + 1});
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
