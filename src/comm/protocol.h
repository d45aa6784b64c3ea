// The parts that the all-reduce protocols share: bounded waits, faults, barriers between ranks, and
// the end of a call (docs/allreduce.md). The protocols are templates over the CTA that runs a
// part of one rank's side: a CTA of a grid, or a thread of a process. So CPU tests run the text
// that GPUs run.
//
// A Cta has the functions below. All of its threads call them unless said otherwise.
//   index(), num_ctas()           this CTA in its grid
//   kMostCtas                     of all grids
//   cluster(), num_clusters()     the CTAs of a cluster share tokens
//   for_each_leaf(count, f)       f(leaf, is_inside) for the leaves of a row that belong to this
//                                 thread, in steps that all lanes of a warp take together
//   for_each_cell(count, f)       f(index) for this thread's share of `count` cells of the grid
//   sync()                        waits for the threads of the CTA
//   sync_any(condition)           the same; true if it holds for any of them. Barriers alone use it
//   is_leader()                   one thread of the CTA
//   thread(), num_threads()
//   send(to, leaf), poll(from)    relaxed accesses at system scope, atomic for 32-bit words
//   load_relaxed, load_acquire, store_release(uint32_t*)   at system scope
//   fence()                       acquire-release at system scope
//   end_call()                    orders all that this CTA has read and written before its rank's
//                                 next call
//   claim(uint32_t*)              true for the first caller of all (compare and swap 0 -> 1)
//   now_ns(), pause(spins)
//   after_push()                  data of this call are on their way: dependents may start, if the
//                                 caller allows it
//   reached(point)                a place where tests delay or kill a rank; nothing on a GPU
//   aborted                       this thread has given up: every further wait returns at once
#pragma once

#include <cstdint>

#include "comm/workspace_layout.h"

namespace narrowfloat {

enum class ProtocolPoint : int {
  kStart = 0,
  kPushed = 1,
  kCleared = 2,
  kPolled = 3,
  kStaged = 4,
  kReduced = 5,
  kFirstBarrier = 6,
  kSecondBarrier = 7,
  kFinished = 8,
};
inline constexpr int kNumProtocolPoints = 9;

struct WaitFor {
  AllReduceFault::Kind kind;
  uint32_t peer;
  uint32_t epoch;
};

NF_HOST_DEVICE inline uint32_t* abort_cell(const RankMemory& memory, int rank) {
  return reinterpret_cast<uint32_t*>(memory.regions[rank] + memory.layout.abort);
}

// Tells the host what went wrong. The first fault of a workspace counts.
template <class Cta>
NF_HOST_DEVICE void report_fault(Cta& cta, const RankMemory& memory, const WaitFor& what,
                                 uint32_t detail) {
  if (!cta.claim(&memory.control->fault_claim)) return;
  memory.fault->peer = what.peer;
  memory.fault->epoch = what.epoch;
  memory.fault->detail = detail;
  cta.fence();
  cta.store_release(&memory.fault->kind, what.kind);
}

// Ends all waits of this call on every rank.
template <class Cta>
NF_HOST_DEVICE void abort_call(Cta& cta, const RankMemory& memory, const WaitFor& what) {
  cta.aborted = true;
  report_fault(cta, memory, what, 0);
  for (int peer = 0; peer < memory.ranks; ++peer) {
    cta.store_release(abort_cell(memory, peer), 1U);
  }
}

// Calls attempt() until it returns true. Returns false if the deadline passes or a rank has given
// up; the caller then goes on without the data, so that every thread reaches every barrier. what()
// says what is missing.
template <class Cta, class What, class Attempt>
NF_HOST_DEVICE bool wait_until(Cta& cta, const RankMemory& memory, What&& what, Attempt&& attempt) {
  constexpr uint32_t kSpinsBetweenChecks = 256;
  if (cta.aborted) return false;
  uint64_t start = 0;
  for (uint32_t spins = 1; !attempt(); ++spins) {
    cta.pause(spins);
    if (spins % kSpinsBetweenChecks != 0) continue;
    if (cta.load_relaxed(abort_cell(memory, memory.rank)) != 0) {
      WaitFor aborted = what();
      aborted.kind = AllReduceFault::kAborted;
      abort_call(cta, memory, aborted);
      return false;
    }
    const uint64_t now = cta.now_ns();
    if (start == 0) start = now;
    if (memory.deadline_ns != 0 && now - start > memory.deadline_ns) {
      abort_call(cta, memory, what());
      return false;
    }
  }
  return true;
}

// The start of a call: the abort cell, which heed_abort() takes before the first wait. In between,
// the call sends its data while the cell is loaded.
template <class Cta>
NF_HOST_DEVICE uint32_t enter_call(Cta& cta, const RankMemory& memory) {
  cta.reached(ProtocolPoint::kStart);
  return cta.load_relaxed(abort_cell(memory, memory.rank));
}

// On a workspace where a rank has given up before, a call must not start to wait: in a replay of a
// graph the host does not look between calls. The fault is reported here, since this rank may have
// left the call that failed before it saw the abort cell.
template <class Cta>
NF_HOST_DEVICE void heed_abort(Cta& cta, const RankMemory& memory, uint32_t cell) {
  cta.aborted = cell != 0;
  if (!cta.aborted) return;
  report_fault(cta, memory,
               WaitFor{AllReduceFault::kAborted, static_cast<uint32_t>(memory.rank), 0}, 0);
}

// The reference on CPUs uses it. Waits for the CTA of the same number on every rank. What these
// CTAs wrote before is visible afterwards. `epoch` grows by one from barrier to barrier and wraps.
// The flag of a rank that has arrived is `epoch` or, where the rank has gone on to the next
// barrier, one more. No other number counts as arrived: a CTA that many calls did not launch finds
// flags that are far older, also by more than 2^31 barriers. (By 2^32 - 1 or 2^32 exactly would be
// too old.)
template <class Cta>
NF_HOST_DEVICE void barrier_over_ranks(Cta& cta, const RankMemory& memory, uint32_t epoch) {
  const auto word = [&](int rank, int source) {
    uint8_t* row = memory.regions[rank] + memory.layout.barriers + cta.index() * kControlLine;
    return reinterpret_cast<uint32_t*>(row) + source;
  };
  cta.sync();
  for (int peer = cta.thread(); peer < memory.ranks; peer += cta.num_threads()) {
    cta.store_release(word(peer, memory.rank), epoch);
  }
  for (int peer = cta.thread(); peer < memory.ranks; peer += cta.num_threads()) {
    const uint32_t* const flag = word(memory.rank, peer);
    const auto what = [&] {
      return WaitFor{AllReduceFault::kBarrierWait, static_cast<uint32_t>(peer), epoch};
    };
    wait_until(cta, memory, what, [&] { return cta.load_acquire(flag) - epoch <= 1U; });
    // A rank that has given up goes on without its data, and its flags are those of a rank that
    // has not. It marks all abort cells before it releases the next flag.
    if (!cta.aborted && cta.load_relaxed(abort_cell(memory, memory.rank)) != 0) {
      cta.aborted = true;
      report_fault(cta, memory, WaitFor{AllReduceFault::kAborted, what().peer, epoch}, 0);
    }
  }
  cta.aborted = cta.sync_any(cta.aborted);
}

// The last act of a CTA: its own history becomes `next`, and so does its share of the histories
// that belong to no CTA of this call. The first store of the rank's next call may let peers write
// to memory that this one has read or cleared.
template <class Cta>
NF_HOST_DEVICE void leave_call(Cta& cta, CallHistory* histories, const CallHistory& next) {
  cta.sync();
  cta.reached(ProtocolPoint::kFinished);
  cta.end_call();
  if (cta.is_leader()) histories[cta.index()] = next;
  cta.for_each_cell(Cta::kMostCtas - cta.num_ctas(),
                    [&](int64_t i) { histories[cta.num_ctas() + i] = next; });
}

}  // namespace narrowfloat
