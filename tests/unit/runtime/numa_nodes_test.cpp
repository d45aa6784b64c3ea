// Parts of nodes, and loops on several nodes: machines with one run them on arenas of any node.
#include "runtime/numa_nodes.h"

#include <array>
#include <atomic>
#include <cstdlib>
#include <sched.h>
#include <stdexcept>
#include <vector>

#include <gtest/gtest.h>

#include "narrowfloat/runtime.h"
#include "runtime/parallel.h"

namespace narrowfloat {
namespace {

TEST(NodePart, PartsFollowEachOtherInWholeUnits) {
  for (const int64_t count : {0, 1, 15, 16, 17, 180, 360, 1000}) {
    for (const int nodes : {1, 2, 3, 8}) {
      int64_t end = 0;
      for (int node = 0; node < nodes; ++node) {
        const NodePart part(count, 16, node, nodes);
        EXPECT_EQ(part.begin, end) << count << " by " << nodes;
        EXPECT_LE(part.begin, part.end);
        EXPECT_TRUE(part.end % 16 == 0 || part.end == count);
        EXPECT_LE(part.end - part.begin, (count / nodes / 16 + 2) * 16);
        end = part.end;
      }
      EXPECT_EQ(end, count);
    }
  }
}

TEST(NodePart, IsFoundByEachOfItsMembers) {
  for (const int64_t count : {1, 16, 17, 180, 1000}) {
    for (const int nodes : {1, 2, 3, 8}) {
      for (int64_t i = 0; i < count; ++i) {
        const NodePart part = NodePart::of(i, count, 16, nodes);
        ASSERT_TRUE(part.begin <= i && i < part.end) << i << " of " << count << " by " << nodes;
      }
    }
  }
}

// A loop over pairs is split where the loop over their members is.
TEST(NodePart, PairsHaveTheirMembersPart) {
  for (const int64_t count : {1, 16, 33, 180, 361}) {
    for (int node = 0; node < 3; ++node) {
      const NodePart members(count, 16, node, 3);
      const NodePart pairs((count + 1) / 2, 8, node, 3);
      EXPECT_EQ(pairs.begin, (members.begin + 1) / 2);
      EXPECT_EQ(pairs.end, (members.end + 1) / 2);
    }
  }
}

const std::vector<int> kThreeOfAnyNode{-1, -1, -1};

class OnNodes : public ::testing::Test {
 protected:
  ~OnNodes() override { set_num_threads(0); }
};

TEST_F(OnNodes, EveryNodeHasItsTurnWithAnyThreadCount) {
  const NumaNodes nodes(kThreeOfAnyNode);
  ASSERT_EQ(nodes.count(), 3);
  for (const int threads : {0, 1, 2, 5}) {
    set_num_threads(threads);
    std::array<std::atomic<int>, 3000> hits{};
    nodes.for_each([&](int node) {
      const NodePart part(3000, 16, node, 3);
      parallel_for(part.end - part.begin, 7, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) ++hits.at(static_cast<size_t>(part.begin + i));
      });
    });
    for (const auto& hit : hits) ASSERT_EQ(hit, 1) << threads << " threads";
  }
}

TEST_F(OnNodes, ExceptionsReachTheCallerWhenAllNodesAreDone) {
  const NumaNodes nodes(kThreeOfAnyNode);
  std::atomic<int> calls = 0;
  EXPECT_THROW(nodes.for_each([&](int node) {
    ++calls;
    if (node == 1) throw std::out_of_range("1");
  }),
               std::out_of_range);
  EXPECT_EQ(calls, 3);
}

TEST_F(OnNodes, MoreThanThereIsRoomForAreOne) {
  EXPECT_EQ(NumaNodes(std::vector<int>(17, -1)).count(), 1);
  EXPECT_GE(NumaNodes::all().count(), 1);
}

// oneTBB reads the mask of a process when it is first used, so this test is one of a new process.
TEST(ThreadsOfAProcess, AreAsManyAsItsProcessors) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        cpu_set_t one;
        CPU_ZERO(&one);
        CPU_SET(sched_getcpu(), &one);
        if (sched_setaffinity(0, sizeof(one), &one) != 0) std::exit(2);
        std::exit(num_threads() == 1 ? 0 : 1);
      },
      ::testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace narrowfloat
