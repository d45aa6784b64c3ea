// The protocols between processes that share memory: results, and ranks that are killed.
#include <algorithm>
#include <array>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <unistd.h>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include "ops/allreduce/cpu_cta.h"
#include "support/allreduce_ranks.h"

namespace narrowfloat::testing {
namespace {

using std::chrono::milliseconds;

TEST(AllReduceProcesses, GiveTheModelsBytes) {
  for (const int ranks : {2, 3, 8}) {
    Random random(static_cast<uint64_t>(ranks));
    std::vector<GoldenInputs> inputs;
    std::vector<GoldenOutputs> expected;
    for (int call = 0; call < 18; ++call) {
      AllReduceProblem problem{
          .tokens = random.pick({1, 2, 7, 33}),
          .hidden = random.pick({64, 192}),
          .element = DType::kF32,
          .pattern = random.pick({AllReducePattern::kNormNvfp4, AllReducePattern::kFp8Token,
                                  AllReducePattern::kAllReduce})};
      inputs.push_back(random_inputs(problem, ranks, Fill::kNormal, random.bits()));
      expected.push_back(allreduce_golden(inputs.back()));
    }
    const RankGroup group(ranks, {33 * 192 * 4, 33 * 192 * 4}, DType::kF32);
    const std::vector<int> statuses = run_as_processes(ranks, [&](int rank) {
      for (size_t call = 0; call < inputs.size(); ++call) {
        const RankTensors tensors(inputs[call], rank);
        run_rank(group, rank, *kCpuImpls[call % 3], inputs[call].problem, tensors.args());
        const std::string difference = tensors.difference(expected[call]);
        if (!difference.empty()) {
          std::fprintf(stderr, "rank %d, call %zu: %s\n", rank, call, difference.c_str());
          return 1;
        }
      }
      return group.fault(rank).kind == AllReduceFault::kNone ? 0 : 2;
    });
    EXPECT_EQ(statuses, std::vector<int>(static_cast<size_t>(ranks), 0));
    EXPECT_TRUE(group.intact());
  }
}

// ---- A rank that dies

constexpr int kVictim = 1;
constexpr int kFatalCall = 1;
std::atomic<int> present_call{0};
std::atomic<ProtocolPoint> fatal_point{ProtocolPoint::kStart};

void die_at_point(int rank, int /*cta*/, ProtocolPoint point) {
  if (rank != kVictim || present_call != kFatalCall || point != fatal_point) return;
  kill(getpid(), SIGKILL);
}

struct Death {
  const AllReduceImpl* impl;
  ProtocolPoint point;
};

std::vector<Death> all_deaths() {
  using Point = ProtocolPoint;
  std::vector<Death> deaths;
  for (const Point point :
       {Point::kStart, Point::kPushed, Point::kCleared, Point::kPolled, Point::kFinished}) {
    deaths.push_back({&kAllReduceCpuOneShot, point});
  }
  for (const Point point : {Point::kStart, Point::kStaged, Point::kReduced, Point::kFinished}) {
    deaths.push_back({&kAllReduceCpuTwoShot, point});
  }
  for (const Point point : {Point::kStart, Point::kStaged, Point::kFirstBarrier, Point::kReduced,
                            Point::kSecondBarrier, Point::kFinished}) {
    deaths.push_back({&kAllReduceCpuReference, point});
  }
  return deaths;
}

// The ranks that live make calls until one reports a fault: at the latest the second after the
// death, as a rank that dies late has sent all that the peers need.
TEST(AllReduceProcesses, ReportAFaultWhereARankDiesAtAnyPoint) {
  const AllReduceProblem problem{.tokens = 5, .hidden = 64};
  const GoldenInputs in = random_inputs(problem, 3, Fill::kNormal, 1);
  for (const Death& death : all_deaths()) {
    SCOPED_TRACE(fmt::format("{} at point {}", death.impl->name, static_cast<int>(death.point)));
    const RankGroup group(3, {8192, 8192}, DType::kBF16, milliseconds(150));
    fatal_point = death.point;
    set_protocol_point_function(die_at_point);
    const std::vector<int> statuses = run_as_processes(3, [&](int rank) {
      const RankTensors tensors(in, rank);
      for (int call = 0; call <= kFatalCall + 2; ++call) {
        present_call = call;
        run_rank(group, rank, *death.impl, problem, tensors.args());
        if (group.fault(rank).kind != AllReduceFault::kNone) return 10 + call;
      }
      return 1;
    });
    set_protocol_point_function(nullptr);
    EXPECT_EQ(statuses[kVictim], -SIGKILL);
    for (const int rank : {0, 2}) {
      const int status = statuses[static_cast<size_t>(rank)];
      EXPECT_TRUE(status >= 10 + kFatalCall && status <= 10 + kFatalCall + 2)
          << "statuses of the ranks: " << fmt::format("{}", fmt::join(statuses, ", "));
    }
  }
}

}  // namespace
}  // namespace narrowfloat::testing
