// Expert parallelism between processes on GPUs: on as many as there are, two to eight, and two
// ranks on one.
#include <gtest/gtest.h>

#include "cuda/gpu_test.h"
#include "narrowfloat/runtime.h"
#include "support/multicast_off.h"
#include "support/spawned_ranks.h"

namespace narrowfloat::testing {
namespace {

class ExpertRanks : public OwnCodeTest {
 protected:
  void SetUp() override {
    const std::string multicast = turn_multicast_off();
    ASSERT_EQ(multicast, "");
    OwnCodeTest::SetUp();
  }
};

int gpus_of_host() { return static_cast<int>(gpu_info().size()); }

// All ranks get right sums, then an error of the call that the last one stays away from.
void expect_exchange(int ranks, int gpus, int calls) {
  const std::vector<std::string> results = run_spawned_ranks(
      sibling_executable("peer_rank"), ranks, [&](int rank, const std::string& directory) {
        return std::vector<std::string>{
            "experts", std::to_string(rank), std::to_string(ranks), std::to_string(rank % gpus),
            directory, std::to_string(calls)};
      });
  const std::string last = "rank " + std::to_string(ranks - 1);
  for (int rank = 0; rank < ranks - 1; ++rank) {
    const std::string& result = results[static_cast<size_t>(rank)];
    const bool names_it = result.find(last + " sent no tokens within 300 ms") != std::string::npos;
    const bool heard_of_it = result.find("a rank gave up") != std::string::npos;
    EXPECT_TRUE(names_it || heard_of_it) << "rank " << rank << ": " << result;
  }
  EXPECT_EQ(results.back(), last + " stayed away");
}

// The GPU runs the kernels of one process at a time.
TEST_F(ExpertRanks, OnOneGpuGiveTheSums) { expect_exchange(2, 1, 3); }

TEST_F(ExpertRanks, OnAllGpusGiveTheSums) {
  if (gpus_of_host() < 2) GTEST_SKIP() << "skipped: there is one GPU";
  for (int ranks = 2; ranks <= std::min(gpus_of_host(), 8); ++ranks) {
    expect_exchange(ranks, gpus_of_host(), 50);
  }
}

}  // namespace
}  // namespace narrowfloat::testing
