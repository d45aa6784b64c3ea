// Two-shot all-reduce: a reduce-scatter and an all-gather by stores to peer memory; as in the
// one-shot, the data are their own flags (docs/allreduce.md, Protocols).
//
//   rank r, call f                              areas of a rank
//   push    own addends -> slot r of staging    staging, 2: one slot for each source, of the leaves
//           f % 2 of the rank that owns them    that the rank owns
//   reduce  poll the slots of own leaves, sum,  result: the sums of all leaves
//           send the sum to every rank's result
//   finish  poll own result, token by token
//
// The leaves of all tokens go in chunks, each of which is divided into one contiguous range a rank.
// While the addends of a chunk are on their way, the one before it is summed and finished; so links
// and memory work at the same time, and what is polled and emptied is in the L2 cache.
//
// Whoever takes a leaf empties its cell at once: in the call that filled it. So two staging areas
// and one result area are enough. A rank that stores to staging in call f+2 has a sum of call f+1,
// and a rank that sends a sum of call f+1 has its addends; either was made from addends of every
// rank, which each sent after its call f was over. No wait depends on itself: every CTA sends its
// addends of a chunk before it waits for those of others, and its sums of a chunk before it waits
// for sums, and both before it waits for anything of a later chunk.
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

NF_HOST_DEVICE constexpr LeafRange leaf_range(int64_t leaves, int ranks, int rank) {
  // Fewer than 2^31 (kMostTwoShotBytes), and GPUs divide 32-bit numbers faster.
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
  const int64_t num_leaves = extents.tokens * extents.leaves;
  const int64_t chunk_leaves = memory.layout.chunk_leaves;
  // The range of a rank in the chunk that begins at `begin`, counted from there.
  const auto range_of = [&](int64_t begin, int owner) {
    const int64_t left = num_leaves - begin;
    return leaf_range(left < chunk_leaves ? left : chunk_leaves, memory.ranks, owner);
  };
  // Whole chunks are multiples of all numbers of ranks: their slots have no gaps.
  const auto staged = [&](int64_t begin, int owner, const LeafRange& range, int source) {
    uint8_t* const area = memory.regions[owner] + memory.layout.staging +
                          epoch % kTwoShotStagings * memory.layout.area_bytes;
    return reinterpret_cast<LeafType*>(area) + begin + static_cast<int64_t>(source) * range.count;
  };
  const auto result = [&](int rank) {
    return reinterpret_cast<LeafType*>(memory.regions[rank] + memory.layout.result);
  };
  const auto addend = [&](int64_t leaf) {
    const auto index = static_cast<uint32_t>(leaf);
    return without_negative_zeros(row.local_value(index / leaves_of_row, index % leaves_of_row));
  };
  const bool stores_own = row.stores_local_value();

  const auto push = [&](int64_t begin) {
    // The next rank first, so that no rank gets the addends of all others at the same time.
    for (int distance = 1; distance <= memory.ranks; ++distance) {
      const int owner = (memory.rank + distance) % memory.ranks;
      if (owner == memory.rank && !stores_own) continue;
      const LeafRange range = range_of(begin, owner);
      LeafType* const slot = staged(begin, owner, range, memory.rank);
      cta.for_each_cell(range.count,
                        [&](int64_t i) { cta.send(slot + i, addend(begin + range.first + i)); });
    }
  };

  const auto reduce = [&](int64_t begin) {
    const LeafRange own = range_of(begin, memory.rank);
    cta.for_each_cell(own.count, [&](int64_t i) {
      const int64_t leaf = begin + own.first + i;
      LeafType values[kMostRanks] = {};
      uint32_t polled = (1U << memory.ranks) - 1U;
      if (!stores_own) {
        polled &= ~(1U << memory.rank);
        set_slot(values, memory.rank, addend(leaf));
      }
      uint32_t missing = polled;
      const auto what = [&] {
        return WaitFor{AllReduceFault::kTwoShotWait, lowest_bit(missing), epoch};
      };
      const bool has_all = wait_until(cta, memory, what, [&] {
        // All loads are issued before the first is looked at.
        NF_UNROLL
        for (int slot = 0; slot < kMostRanks; ++slot) {
          if ((missing >> slot & 1U) == 0) continue;
          values[slot] = cta.template poll<LeafType>(staged(begin, memory.rank, own, slot) + i);
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
        if (rank < memory.ranks) cta.send(result(rank) + leaf, sum);
      }
      NF_UNROLL
      for (int slot = 0; slot < kMostRanks; ++slot) {
        if ((polled >> slot & 1U) == 0) continue;
        cta.send(staged(begin, memory.rank, own, slot) + i, leaf_of_sentinels<Elements::kBytes>());
      }
    });
  };

  const auto take_sum = [&](int64_t index) {
    LeafType* const cell = result(memory.rank) + index;
    LeafType sum{};
    const auto what = [&] {
      const int64_t begin = index / chunk_leaves * chunk_leaves;
      const auto place = static_cast<uint32_t>(index - begin);
      int owner = 0;
      while (place - range_of(begin, owner).first >= range_of(begin, owner).count) ++owner;
      return WaitFor{AllReduceFault::kTwoShotWait, static_cast<uint32_t>(owner), epoch};
    };
    const bool has_sum = wait_until(cta, memory, what, [&] {
      sum = cta.template poll<LeafType>(cell);
      return !lacks_sum(sum);
    });
    if (has_sum) cta.send(cell, leaf_without_sums<Elements::kBytes>());
    return sum;
  };

  int64_t token = cta.cluster();
  for (int64_t begin = 0; begin < num_leaves + chunk_leaves; begin += chunk_leaves) {
    if (begin < num_leaves) push(begin);
    if (begin == 0) {
      cta.reached(ProtocolPoint::kStaged);
      row.clear_padding();
      heed_abort(cta, memory, abort_cell);
      continue;
    }
    reduce(begin - chunk_leaves);
    if (begin >= num_leaves) {
      cta.after_push();
      cta.reached(ProtocolPoint::kReduced);
    }
    // Tokens that are complete with this chunk.
    for (; token < extents.tokens && (token + 1) * extents.leaves <= begin;
         token += cta.num_clusters()) {
      cta.for_each_leaf(extents.leaves, [&](int64_t leaf, bool is_inside) {
        row.prepare(token, leaf, is_inside);
        LeafType sum{};
        if (is_inside) sum = take_sum(token * extents.leaves + leaf);
        row.accept(token, leaf, is_inside, sum);
      });
      row.finish(token);
    }
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
