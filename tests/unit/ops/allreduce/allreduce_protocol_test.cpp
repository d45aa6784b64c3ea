// The protocols with ranks as threads: calls of all sizes and algorithms on one workspace, numbers
// that wrap, delays at every point, and waits that end.
#include <array>
#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "comm/twoshot.h"
#include "ops/allreduce/cpu_cta.h"
#include "support/allreduce_ranks.h"

namespace narrowfloat::testing {
namespace {

using std::chrono::milliseconds;

struct Step {
  const AllReduceImpl* impl = nullptr;
  GoldenInputs in;
  GoldenOutputs expected;
};

// Calls of random sizes, patterns and algorithms.
std::vector<Step> random_steps(int ranks, int count, Random& random) {
  std::vector<Step> steps;
  for (int i = 0; i < count; ++i) {
    AllReduceProblem problem{
        .tokens = random.pick({1, 2, 3, 7, 16, 33}),
        .hidden = random.pick({16, 64, 256, 1024}),
        .element = random.pick({DType::kBF16, DType::kF16}),
        .pattern = random.pick({AllReducePattern::kAllReduce, AllReducePattern::kNormNvfp4,
                                AllReducePattern::kMoeReduction})};
    Step& step = steps.emplace_back();
    step.impl = kCpuImpls[static_cast<size_t>(random.range(0, 2))];
    step.in = random_inputs(problem, ranks, Fill::kNormal, random.bits());
    step.expected = allreduce_golden(step.in);
  }
  return steps;
}

// Every rank makes all calls without waiting for the others between them.
void expect_model_bytes(const RankGroup& group, const std::vector<Step>& steps) {
  run_as_threads(group.ranks(), [&](int rank) {
    for (size_t i = 0; i < steps.size(); ++i) {
      const Step& step = steps[i];
      const RankTensors tensors(step.in, rank);
      run_rank(group, rank, *step.impl, step.in.problem, tensors.args());
      EXPECT_EQ(tensors.difference(step.expected), "")
          << "call " << i << " (" << step.impl->name << ") on rank " << rank << " of "
          << group.ranks() << ": " << to_string(step.in.problem);
      if (::testing::Test::HasFailure()) break;
    }
    EXPECT_EQ(group.fault(rank).kind, AllReduceFault::kNone) << "rank " << rank;
  });
  EXPECT_TRUE(group.intact());
}

AllReduceCapacities capacities() { return {33 * 1024 * 2, 33 * 1024 * 2}; }

class TestHooks {
 public:
  explicit TestHooks(ProtocolPointFunction function, int ctas = 1) {
    set_protocol_point_function(function);
    set_cpu_ctas_per_rank(ctas);
  }
  ~TestHooks() {
    set_protocol_point_function(nullptr);
    set_cpu_ctas_per_rank(1);
  }
  TestHooks(const TestHooks&) = delete;
  TestHooks& operator=(const TestHooks&) = delete;
};

TEST(AllReduceProtocol, TakesCallsOfAllSizesAndAlgorithmsOnOneWorkspace) {
  Random random(1);
  for (const int ranks : {2, 3, 4, 8}) {
    for (const int ctas : {1, 3}) {
      const TestHooks hooks(nullptr, ctas);
      const RankGroup group(ranks, capacities(), DType::kBF16);
      expect_model_bytes(group, random_steps(ranks, 40, random));
    }
  }
}

// Epochs wrap, in the middle of a sequence: as if billions of calls had been made before.
TEST(AllReduceProtocol, GoesOnWhereItsEpochsWrap) {
  Random random(2);
  for (const int ranks : {2, 3}) {
    for (uint32_t before = 1; before <= 6; ++before) {
      const RankGroup group(ranks, capacities(), DType::kBF16);
      for (int rank = 0; rank < ranks; ++rank) {
        for (CallHistory& one : group.control(rank).oneshot) one.epoch = 0xFFFFFFFFU - before;
        for (CallHistory& one : group.control(rank).twoshot) one.epoch = 0U - before;
        for (CallHistory& one : group.control(rank).barriers) one.epoch = 0U - 2 * before;
        const RankMemory memory = group.memory(rank);
        for (int row = 0; row < kMostCtas; ++row) {
          auto* const flags = reinterpret_cast<uint32_t*>(
              memory.regions[rank] + memory.layout.barriers + row * kControlLine);
          std::fill_n(flags, ranks, 0U - 2 * before);
        }
      }
      std::vector<Step> steps = random_steps(ranks, 36, random);
      for (size_t i = 0; i < steps.size(); ++i) steps[i].impl = kCpuImpls[i / 12];
      expect_model_bytes(group, steps);
      EXPECT_LT(group.control(0).oneshot[0].epoch, 12U);
      EXPECT_LT(group.control(0).twoshot[0].epoch, 12U);
      EXPECT_LT(group.control(0).barriers[0].epoch, 36U);
    }
  }
}

TEST(AllReduceProtocol, CountsOneShotEpochsByBuffers) {
  EXPECT_EQ(next_oneshot_epoch(0), 1U);
  // The number after the last one is the first of a buffer's cycle.
  EXPECT_EQ(next_oneshot_epoch(0xFFFFFFFEU), 0U);
  EXPECT_EQ(0xFFFFFFFEU % kOneShotBuffers, 2U);
}

// A CTA that a small grid has not launched for 2^31 barriers still waits for its peers.
TEST(AllReduceProtocol, DoesNotTakeAnOldBarrierForAPresentOne) {
  Random random(3);
  const RankGroup group(2, capacities(), DType::kBF16);
  const auto slow_rank = [](int rank, int cta, ProtocolPoint point) {
    if (rank == 1 && cta == 2 && point == ProtocolPoint::kStart) {
      std::this_thread::sleep_for(milliseconds(20));
    }
  };
  const TestHooks hooks(slow_rank, 3);
  for (const uint32_t jump : {0U, 0x80000000U, 0x7FFFFFFAU, 0xF0000000U}) {
    for (int rank = 0; rank < 2; ++rank) {
      for (CallHistory& one : group.control(rank).barriers) one.epoch += jump;
    }
    std::vector<Step> steps = random_steps(2, 2, random);
    for (Step& step : steps) step.impl = &kAllReduceCpuReference;
    expect_model_bytes(group, steps);
  }
}

TEST(AllReduceProtocol, CountsTheLeavesOfACallForTheNextClear) {
  const RankGroup group(2, capacities(), DType::kF32);
  for (const int64_t tokens : {7, 2}) {
    const AllReduceProblem problem{.tokens = tokens, .hidden = 24, .element = DType::kF32};
    const GoldenInputs in = random_inputs(problem, 2, Fill::kNormal, 1);
    expect_model_bytes(group, {{&kAllReduceCpuOneShot, in, allreduce_golden(in)}});
    for (int cta = 0; cta < CpuCta::kMostCtas; ++cta) {
      EXPECT_EQ(group.control(1).oneshot[cta].used_leaves, 2 * tokens * 24 / 8);
    }
  }
  for (int cta = 0; cta < CpuCta::kMostCtas; ++cta) {
    EXPECT_EQ(group.control(1).oneshot[cta].epoch, 2U);
    EXPECT_EQ(group.control(1).twoshot[cta].epoch, 0U);
  }
}

// Every cell of the two buffers that are not of the last call holds the sentinel or is about to be
// cleared: after one more call, two buffers are clear.
TEST(AllReduceProtocol, ClearsAllThatACallHasUsed) {
  Random random(4);
  const RankGroup group(3, capacities(), DType::kBF16);
  std::vector<Step> steps = random_steps(3, 30, random);
  for (Step& step : steps) step.impl = &kAllReduceCpuOneShot;
  for (const Step& step : steps) {
    expect_model_bytes(group, {step});
    for (int rank = 0; rank < 3; ++rank) {
      const RankMemory memory = group.memory(rank);
      const int64_t buffer_bytes = memory.layout.slot_capacity * 3;
      // The buffer of the next call.
      const uint32_t next = memory.control->oneshot[0].epoch % kOneShotBuffers;
      const auto* const words = reinterpret_cast<const uint32_t*>(
          memory.regions[rank] + memory.layout.oneshot + next * buffer_bytes);
      EXPECT_TRUE(std::all_of(words, words + buffer_bytes / 4,
                              [](uint32_t word) { return word == sentinel_word<2>(); }));
    }
  }
}

// ---- Delays

std::atomic<uint64_t> delay_seed{0};

void delay_at_random(int rank, int cta, ProtocolPoint point) {
  const uint64_t seed = delay_seed.fetch_add(1, std::memory_order_relaxed);
  Random random(seed ^ static_cast<uint64_t>(rank * 64 + cta * 16 + static_cast<int>(point)));
  if (random.chance(40)) return;
  std::this_thread::sleep_for(std::chrono::microseconds(random.range(0, 150)));
}

TEST(AllReduceProtocol, BearsDelaysAtEveryPoint) {
  Random random(5);
  for (const int ranks : {2, 3, 8}) {
    const TestHooks hooks(delay_at_random, 2);
    const RankGroup group(ranks, capacities(), DType::kBF16);
    expect_model_bytes(group, random_steps(ranks, 24, random));
  }
}

TEST(AllReduceProtocol, BearsARankThatIsAHundredTimesSlower) {
  Random random(6);
  for (const int slow : {0, 2}) {
    static std::atomic<int> slow_rank;
    slow_rank = slow;
    const auto sleep = [](int rank, int /*cta*/, ProtocolPoint /*point*/) {
      if (rank == slow_rank) std::this_thread::sleep_for(milliseconds(3));
    };
    const TestHooks hooks(sleep);
    const RankGroup group(3, capacities(), DType::kBF16);
    expect_model_bytes(group, random_steps(3, 12, random));
  }
}

// ---- Faults

// Runs a call without rank 1; returns when the others have given up.
void run_without_rank_1(const RankGroup& group, const AllReduceImpl& impl, const GoldenInputs& in) {
  run_as_threads(group.ranks(), [&](int rank) {
    if (rank == 1) return;
    const RankTensors tensors(in, rank);
    run_rank(group, rank, impl, in.problem, tensors.args());
  });
}

TEST(AllReduceProtocol, ReportsTheRankThatIsMissing) {
  const AllReduceProblem problem{.tokens = 3, .hidden = 64};
  const GoldenInputs in = random_inputs(problem, 3, Fill::kNormal, 1);
  for (const AllReduceImpl* impl : kCpuImpls) {
    const RankGroup group(3, capacities(), DType::kBF16, milliseconds(60));
    run_without_rank_1(group, *impl, in);
    const bool has_barriers = impl == &kAllReduceCpuReference;
    const auto wait = impl == &kAllReduceCpuOneShot   ? AllReduceFault::kOneShotWait
                      : impl == &kAllReduceCpuTwoShot ? AllReduceFault::kTwoShotWait
                                                      : AllReduceFault::kBarrierWait;
    int timeouts = 0;
    for (const int rank : {0, 2}) {
      const AllReduceFault fault = group.fault(rank);
      // The first to give up tells the other.
      EXPECT_TRUE(fault.kind == wait || fault.kind == AllReduceFault::kAborted) << fault.kind;
      EXPECT_EQ(fault.peer, 1U) << impl->name;
      EXPECT_EQ(fault.epoch, has_barriers ? 1U : 0U);
      if (fault.kind == wait) ++timeouts;
    }
    EXPECT_GE(timeouts, 1);
    EXPECT_EQ(group.fault(1).kind, AllReduceFault::kNone);
  }
}

// Rank 1 sees in its next call that others have given up, waits for nobody, and reports it.
TEST(AllReduceProtocol, ReportsAnEarlierFaultAtTheEntryOfACall) {
  const AllReduceProblem problem{.tokens = 3, .hidden = 64};
  const GoldenInputs in = random_inputs(problem, 3, Fill::kNormal, 1);
  for (const AllReduceImpl* impl : kCpuImpls) {
    const RankGroup group(3, capacities(), DType::kBF16, milliseconds(60));
    run_without_rank_1(group, *impl, in);
    const RankTensors tensors(in, 1);
    run_rank(group, 1, *impl, problem, tensors.args());
    EXPECT_EQ(group.fault(1).kind, AllReduceFault::kAborted) << impl->name;
  }
}

// The group whose ranks 0 and 2 have to give up before rank 1 goes on.
const RankGroup* awaited_group = nullptr;

// Rank 1 enters the call and comes to its first barrier after the others have given up: their flags
// look like those of ranks that have arrived. (In the two-shot it has all data, and computes.)
TEST(AllReduceProtocol, ALateRankReportsThatOthersHaveGivenUp) {
  const AllReduceProblem problem{.tokens = 3, .hidden = 64};
  const GoldenInputs in = random_inputs(problem, 3, Fill::kNormal, 1);
  const TestHooks late([](int rank, int /*cta*/, ProtocolPoint point) {
    if (rank != 1 || point != ProtocolPoint::kStaged) return;
    const auto is_waiting = [](int other) {
      return awaited_group->fault(other).kind == AllReduceFault::kNone;
    };
    while (is_waiting(0) || is_waiting(2)) std::this_thread::sleep_for(milliseconds(1));
  });
  const RankGroup group(3, capacities(), DType::kBF16, milliseconds(60));
  awaited_group = &group;
  run_as_threads(3, [&](int rank) {
    const RankTensors tensors(in, rank);
    run_rank(group, rank, kAllReduceCpuReference, problem, tensors.args());
  });
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_NE(group.fault(rank).kind, AllReduceFault::kNone) << "rank " << rank;
  }
}

TEST(AllReduceProtocol, KeepsTheFirstFault) {
  const AllReduceProblem problem{.tokens = 3, .hidden = 64};
  const GoldenInputs in = random_inputs(problem, 2, Fill::kNormal, 1);
  const RankGroup group(2, capacities(), DType::kBF16, milliseconds(30));
  run_without_rank_1(group, kAllReduceCpuTwoShot, in);
  run_without_rank_1(group, kAllReduceCpuOneShot, in);
  EXPECT_EQ(group.fault(0).kind, AllReduceFault::kTwoShotWait);
}

// A rank that has given up sends no sums that lack an addend.
TEST(AllReduceProtocol, SendsNoSumsThatLackAnAddend) {
  const AllReduceProblem problem{.tokens = 6, .hidden = 64};
  const GoldenInputs in = random_inputs(problem, 3, Fill::kNormal, 1);
  const RankGroup group(3, capacities(), DType::kBF16, milliseconds(40));
  run_without_rank_1(group, kAllReduceCpuTwoShot, in);
  for (const int rank : {0, 2}) {
    const RankMemory memory = group.memory(rank);
    const auto* const sums =
        reinterpret_cast<const uint32_t*>(memory.regions[rank] + memory.layout.result);
    EXPECT_TRUE(std::all_of(sums, sums + memory.layout.area_bytes / 4,
                            [](uint32_t word) { return word == kWordWithoutSums; }));
  }
}

// A call leaves all cells of the two-shot empty, and so does the reference, which uses some.
TEST(AllReduceProtocol, EmptiesAllThatATwoShotHasUsed) {
  Random random(7);
  for (const DType element : {DType::kBF16, DType::kF32}) {
    const AllReduceProblem problem{.tokens = 33, .hidden = 512, .element = element};
    const RankGroup group(3, {64, 33 * 512 * 4}, element);
    const uint32_t sentinel = element == DType::kF32 ? sentinel_word<4>() : sentinel_word<2>();
    for (const AllReduceImpl* impl : {&kAllReduceCpuTwoShot, &kAllReduceCpuReference}) {
      const GoldenInputs in = random_inputs(problem, 3, Fill::kNormal, random.bits());
      expect_model_bytes(group, {{impl, in, allreduce_golden(in)}});
      const RankMemory memory = group.memory(1);
      const auto* const staging =
          reinterpret_cast<const uint32_t*>(memory.regions[1] + memory.layout.staging);
      const auto* const sums = staging + kTwoShotStagings * memory.layout.area_bytes / 4;
      const auto* const end = sums + memory.layout.area_bytes / 4;
      EXPECT_TRUE(std::all_of(staging, sums, [&](uint32_t word) { return word == sentinel; }));
      EXPECT_TRUE(std::all_of(sums, end, [](uint32_t word) { return word == kWordWithoutSums; }));
    }
  }
}

// ---- Ranges of leaves

TEST(LeafRange, DividesLeavesWithoutGaps) {
  for (const int64_t leaves : {0, 1, 2, 7, 33, 128}) {
    for (int ranks = 1; ranks <= kMaxRanks; ++ranks) {
      int64_t next = 0;
      for (int rank = 0; rank < ranks; ++rank) {
        const LeafRange range = leaf_range(leaves, ranks, rank);
        EXPECT_EQ(range.first, next);
        // The first ranks own one more.
        EXPECT_EQ(range.count, leaves / ranks + (rank < leaves % ranks ? 1 : 0));
        next += range.count;
      }
      EXPECT_EQ(next, leaves);
    }
  }
}

}  // namespace
}  // namespace narrowfloat::testing
