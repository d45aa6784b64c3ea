// The parts of an all-reduce workspace, their places, and their contents at the start
// (docs/allreduce.md). Everything is a pure function of the number of ranks and the capacities.
//
//   peer-visible region of a rank                        written by
//   | abort cell, 128 bytes                              | any rank, once
//   | barrier words, kMostCtas rows of 128 bytes         | word s of a row: rank s
//   | control words                                      | its own rank
//   | one-shot: 3 buffers of `ranks` slots               | slot s: rank s
//   | two-shot staging: 2 areas of `ranks` slots         | slot s: rank s
//   | two-shot result                                    | every rank, its range of leaves
//
// At the start one-shot buffers and staging hold sentinels, the result words without sums
// (comm/leaf.h), and everything before them is zero.
#pragma once

#include <cstdint>

#include "base/host_device.h"
#include "narrowfloat/allreduce.h"

namespace narrowfloat {

inline constexpr int kMaxRanks = kMostAllReduceRanks;
inline constexpr int kMostCtas = 1024;  // A grid has at most so many.
inline constexpr int kOneShotBuffers = 3;
inline constexpr int kTwoShotStagings = 2;
// Chunks of the two-shot are multiples of every number of ranks.
inline constexpr int64_t kChunkUnit = 840;
inline constexpr int64_t kControlLine = 128;

struct PeerRegion {
  int64_t abort = 0;
  int64_t barriers = 0;
  int64_t oneshot = 0;
  int64_t slot_capacity = 0;  // Bytes of one slot; a buffer has `ranks` of them.
  int64_t control = 0;        // LocalControl; no other rank touches it.
  int64_t staging = 0;
  int64_t result = 0;
  int64_t area_bytes = 0;    // The size of a staging area and of the result.
  int64_t chunk_leaves = 0;  // The two-shot exchanges so many at a time.
  int64_t size_bytes = 0;
};

// Leaves of a one-shot buffer and of a two-shot message have 32-bit numbers.
inline constexpr int64_t kMostOneShotBytes = int64_t{1} << 32;
inline constexpr int64_t kMostTwoShotBytes = int64_t{1} << 34;

// Throws kInvalidArgument for ranks outside 1 to 8, negative capacities, and those beyond
// kMostOneShotBytes and kMostTwoShotBytes.
PeerRegion peer_region(int ranks, const AllReduceCapacities& capacities);

// The calls before the present one, as a CTA finds them.
struct CallHistory {
  uint32_t epoch = 0;        // Calls or barriers so far; wraps.
  uint32_t used_leaves = 0;  // One-shot: leaves of a buffer that the previous call used.
};

// Every CTA has a history of its own for each protocol, so that no CTA waits for others before it
// may write it. They are equal: a call also writes those of the CTAs that it does not launch.
struct LocalControl {
  CallHistory oneshot[kMostCtas];
  CallHistory twoshot[kMostCtas];
  CallHistory barriers[kMostCtas];
  alignas(128) uint32_t fault_claim = 0;  // 1: a fault has been reported.
};

// The first thing that went wrong, in memory that the host sees. `kind` is written last.
struct AllReduceFault {
  enum Kind : uint32_t {
    kNone = 0,
    kOneShotWait = 1,
    kBarrierWait = 2,
    kAborted = 3,  // Another rank gave up.
    kBadIndex = 4,
    kTwoShotWait = 5,
  };
  uint32_t kind = kNone;
  uint32_t peer = 0;  // The rank that was waited for.
  uint32_t epoch = 0;
  uint32_t detail = 0;
};

// One rank's view of its group, as kernels and CPU ranks take it.
struct RankMemory {
  int32_t rank = 0;
  int32_t ranks = 1;
  uint8_t* regions[kMaxRanks] = {};  // Peer-visible regions, the own one included.
  LocalControl* control = nullptr;
  AllReduceFault* fault = nullptr;
  PeerRegion layout;
  uint64_t deadline_ns = 0;  // Bounds one wait; 0: nothing does.
};

}  // namespace narrowfloat
