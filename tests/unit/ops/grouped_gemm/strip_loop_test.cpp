// Strips on a machine of several NUMA nodes: threads of a strip's node have it, and its packed
// weights lie in the node's memory. tools/numa_check.sh emulates such a machine.
#include "ops/grouped_gemm/strip_loop.h"

#include <algorithm>
#include <atomic>
#include <fstream>
#include <sched.h>
#include <string>
#include <sys/syscall.h>
#include <unistd.h>
#include <vector>

#include <gtest/gtest.h>

#include "ops/grouped_gemm/gemm_shape.h"
#include "ops/grouped_gemm/pack_weights.h"
#include "ops/grouped_gemm/strip_weights.h"

namespace narrowfloat {
namespace {

class StripLoopOnNodes : public ::testing::Test {
 protected:
  void SetUp() override {
    if (NumaNodes::all().count() == 1) {
      GTEST_SKIP() << "needs several NUMA nodes and libtbbbind; tools/numa_check.sh has them";
    }
  }
};

size_t index(int64_t value) { return static_cast<size_t>(value); }

int node_of_strip(int64_t strip, int64_t strips) {
  const int nodes = NumaNodes::all().count();
  for (int node = 0; node < nodes; ++node) {
    if (strip < NodePart(strips, kNodeStrips, node, nodes).end) return node;
  }
  return -1;
}

// The node of the processor that runs the caller.
int node_of_thread() {
  unsigned processor = 0;
  unsigned node = 0;
  return getcpu(&processor, &node) == 0 ? static_cast<int>(node) : -1;
}

// The node whose memory holds a byte.
int node_of_byte(const uint8_t* byte) {
  const auto page_bytes = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  void* page = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(byte) / page_bytes * page_bytes);
  int node = -1;
  constexpr void* kNoMove = nullptr;
  return syscall(SYS_move_pages, 0, 1UL, &page, kNoMove, &node, 0) == 0 ? node : -1;
}

TEST_F(StripLoopOnNodes, ThreadsOfAStripsNodeHaveIt) {
  constexpr int64_t kBlocks = 8;
  constexpr int64_t kStrips = 180;
  std::vector<std::atomic<int>> nodes(index(kBlocks * kStrips));
  for (std::atomic<int>& node : nodes) node = -1;
  for_each_strip(kBlocks, kStrips, 1, [&](int64_t block, int64_t strip, int64_t /*most*/) {
    nodes[index(block * kStrips + strip)] = node_of_thread();
    return 1;
  });
  for (int64_t i = 0; i < kBlocks * kStrips; ++i) {
    ASSERT_EQ(nodes[index(i)], node_of_strip(i % kStrips, kStrips)) << "strip " << i % kStrips;
  }
}

TEST(StripPlaces, AreAllPlacesOnceWithTheStripsOfANodeTogether) {
  constexpr int64_t kExperts = 5;
  for (const int64_t strips : {1, 16, 40, 180}) {
    const StripPlaces places(kExperts, strips);
    std::vector<int> nodes(index(kExperts * strips), -1);
    for (int64_t expert = 0; expert < kExperts; ++expert) {
      for (int64_t strip = 0; strip < strips; ++strip) {
        int& node = nodes.at(index(places.of(expert, strip)));
        ASSERT_EQ(node, -1) << "expert " << expert << ", strip " << strip;
        node = node_of_strip(strip, strips);
      }
    }
    EXPECT_TRUE(std::is_sorted(nodes.begin(), nodes.end())) << strips << " strips";
  }
}

// Where pages are as large as they get, one of them may belong to two nodes.
TEST_F(StripLoopOnNodes, PackedWeightsLieInTheMemoryOfTheirStripsNode) {
  std::string moves_pages;
  std::ifstream("/proc/sys/kernel/numa_balancing") >> moves_pages;
  if (moves_pages == "1") {
    GTEST_SKIP() << "Linux may move pages meanwhile; needs sysctl kernel.numa_balancing=0";
  }
  constexpr int64_t kLargestPage = 2 << 20;
  // 66 MB: the allocator asks the system for so much, and gets pages that nobody has touched.
  const GroupedGemmProblem problem{
      .mode = MoeMode::kBf16, .experts = 4, .rows = 2880, .cols = 2880};
  const GemmShape shape(problem);
  const std::vector<uint16_t> values(index(shape.experts * shape.rows * shape.cols), 0x3F80);
  const auto source = [&](int64_t first) {
    return WeightSource{.values = reinterpret_cast<const uint8_t*>(values.data()) +
                                  first * shape.expert_code_bytes(),
                        .scales = {}};
  };
  const PackedWeightData packed =
      pack_weight_strips(problem, {.experts = shape.experts, .from = source}, {});

  const StripWeights weights(shape, packed.bytes.get());
  const int64_t strip_bytes = shape.cols * weights.step_bytes();
  int64_t elsewhere = 0;
  for (int64_t expert = 0; expert < shape.experts; ++expert) {
    for (int64_t strip = 0; strip < weights.strips(); ++strip) {
      const uint8_t* middle = weights.codes(expert, strip, 0) + strip_bytes / 2;
      const bool is_there = node_of_byte(middle) == node_of_strip(strip, weights.strips());
      elsewhere += is_there ? 0 : strip_bytes;
    }
  }
  EXPECT_LE(elsewhere, (NumaNodes::all().count() - 1) * kLargestPage);
}

}  // namespace
}  // namespace narrowfloat
