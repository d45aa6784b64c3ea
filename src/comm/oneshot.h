// One-shot all-reduce: every rank sends its message to all others; the data are their own flags
// (docs/allreduce.md, Protocols).
//
//   rank r, call f                           buffers of a rank, one slot for each source
//   push   own leaves -> slot r of           [f % 3]      arriving: sentinels turn into data
//          buffer f % 3 of every peer        [(f+1) % 3]  cleared, for the next call
//   clear  buffer (f+2) % 3                  [(f+2) % 3]  data of the previous call
//   poll   own buffer f % 3 until no
//          sentinel is left, then sum
//
// Three buffers are enough, and two are not: a rank that starts call f+2 has seen data of call f+1
// from every peer, which each pushed after its call f was over. A rank polls its own memory alone;
// calls of one rank do not overlap.
//
// A Row gives and takes the leaves of one rank:
//   local_value(token, leaf)               this rank's addend
//   stores_local_value()                   whether the addend is kept in the own slot, because
//                                          computing it again is expensive
//   clear_padding()                        called while data are on their way
//   prepare(token, leaf, is_inside)        called before the wait for the leaf's sum
//   accept(token, leaf, is_inside, sum)    called by all lanes; the sum counts where is_inside
//   finish(token)                          the row is complete; called by all threads of a cluster
#pragma once

#include "comm/leaf_sums.h"
#include "comm/protocol.h"

namespace narrowfloat {

struct RowExtents {
  int64_t tokens = 0;
  int64_t leaves = 0;  // A row has hidden / 8.
};

// The epochs of the one-shot wrap at a multiple of three, so that the buffers keep their order.
NF_HOST_DEVICE constexpr uint32_t next_oneshot_epoch(uint32_t epoch) {
  constexpr uint32_t kWrap = 0xFFFFFFFFU;
  static_assert(kWrap % kOneShotBuffers == 0);
  return epoch + 1 == kWrap ? 0 : epoch + 1;
}

template <class Elements>
NF_HOST_DEVICE constexpr int64_t slot_bytes(const RowExtents& extents) {
  return extents.tokens * extents.leaves *
         static_cast<int64_t>(sizeof(typename Elements::LeafType));
}

NF_HOST_DEVICE constexpr uint32_t lowest_bit(uint32_t mask) {
  uint32_t bit = 0;
  while (bit < 31 && (mask >> bit & 1U) == 0) ++bit;
  return bit;
}

// kMostRanks bounds memory.ranks; loops over ranks are unrolled to it.
template <int kMostRanks, class Elements, class Cta, class Row>
NF_HOST_DEVICE void oneshot_allreduce(Cta& cta, const RankMemory& memory, const RowExtents& extents,
                                      AllReduceAccumulation accumulation, Row& row) {
  using LeafType = typename Elements::LeafType;
  const uint32_t epoch = cta.load_relaxed(&memory.control->oneshot[cta.index()].epoch);
  const uint32_t used_leaves = cta.load_relaxed(&memory.control->oneshot[cta.index()].used_leaves);
  const uint32_t abort_cell = enter_call(cta, memory);
  const int64_t stride = slot_bytes<Elements>(extents);
  const int64_t buffer_bytes = memory.layout.slot_capacity * memory.ranks;
  // Numbers are taken modulo three before they are added: 2^32 is no multiple of three.
  const uint32_t present = epoch % kOneShotBuffers;
  const uint32_t previous = (present + kOneShotBuffers - 1) % kOneShotBuffers;
  const auto buffer = [&](int rank, uint32_t number) {
    return memory.regions[rank] + memory.layout.oneshot + number * buffer_bytes;
  };
  const auto cell = [&](int rank, int slot, int64_t token, int64_t leaf) {
    auto* const leaves = reinterpret_cast<LeafType*>(buffer(rank, present) + slot * stride);
    return leaves + (token * extents.leaves + leaf);
  };

  // All tokens are pushed before any is polled: slots are packed by the sizes of a call, so other
  // CTAs of a peer may wait for any of them.
  const bool stores_own = row.stores_local_value();
  for (int64_t token = cta.cluster(); token < extents.tokens; token += cta.num_clusters()) {
    cta.for_each_leaf(extents.leaves, [&](int64_t leaf, bool is_inside) {
      if (!is_inside) return;
      const LeafType value = without_negative_zeros(row.local_value(token, leaf));
      NF_UNROLL
      for (int peer = 0; peer < kMostRanks; ++peer) {
        if (peer >= memory.ranks || (peer == memory.rank && !stores_own)) continue;
        cta.send(cell(peer, memory.rank, token, leaf), value);
      }
    });
  }
  cta.reached(ProtocolPoint::kPushed);
  row.clear_padding();

  // Peers store to these cells in a later call, which is ordered by data alone: atomic words, too.
  auto* const cleared = reinterpret_cast<LeafType*>(buffer(memory.rank, previous));
  cta.for_each_cell(used_leaves, [&](int64_t index) {
    cta.send(cleared + index, leaf_of_sentinels<Elements::kBytes>());
  });
  cta.after_push();
  cta.reached(ProtocolPoint::kCleared);
  heed_abort(cta, memory, abort_cell);

  for (int64_t token = cta.cluster(); token < extents.tokens; token += cta.num_clusters()) {
    cta.for_each_leaf(extents.leaves, [&](int64_t leaf, bool is_inside) {
      LeafType total{};
      row.prepare(token, leaf, is_inside);
      if (is_inside) {
        LeafType values[kMostRanks] = {};
        uint32_t missing = (1U << memory.ranks) - 1U;
        if (!stores_own) {
          missing &= ~(1U << memory.rank);
          set_slot(values, memory.rank, without_negative_zeros(row.local_value(token, leaf)));
        }
        const auto what = [&] {
          return WaitFor{AllReduceFault::kOneShotWait, lowest_bit(missing), epoch};
        };
        wait_until(cta, memory, what, [&] {
          // All loads are issued before the first is looked at.
          NF_UNROLL
          for (int slot = 0; slot < kMostRanks; ++slot) {
            if ((missing >> slot & 1U) == 0) continue;
            values[slot] = cta.template poll<LeafType>(cell(memory.rank, slot, token, leaf));
          }
          NF_UNROLL
          for (int slot = 0; slot < kMostRanks; ++slot) {
            const bool arrives = (missing >> slot & 1U) != 0 && !has_sentinel(values[slot]);
            if (arrives) missing &= ~(1U << slot);
          }
          return missing == 0;
        });
        total = sum_in_rank_order<kMostRanks, Elements>(values, memory.ranks, accumulation);
      }
      row.accept(token, leaf, is_inside, total);
    });
    row.finish(token);
  }
  cta.reached(ProtocolPoint::kPolled);

  leave_call(
      cta, memory.control->oneshot,
      {.epoch = next_oneshot_epoch(epoch),
       .used_leaves = static_cast<uint32_t>(extents.tokens * extents.leaves * memory.ranks)});
}

}  // namespace narrowfloat
