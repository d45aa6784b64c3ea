// Expert parallelism between processes on GPUs: on as many as there are, two to eight, by each
// transport, and two ranks on one.
#include <algorithm>

#include <gtest/gtest.h>

#include "cuda/gpu_test.h"
#include "narrowfloat/allreduce.h"
#include "narrowfloat/expert_parallel.h"
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
void expect_exchange(int ranks, int gpus, int calls, ExpertTransport transport) {
  const std::vector<std::string> results = run_spawned_ranks(
      sibling_executable("peer_rank"), ranks, [&](int rank, const std::string& directory) {
        return std::vector<std::string>{"experts",
                                        std::to_string(rank),
                                        std::to_string(ranks),
                                        std::to_string(rank % gpus),
                                        directory,
                                        std::to_string(calls),
                                        std::string(name(transport))};
      });
  const std::string last = "rank " + std::to_string(ranks - 1);
  for (int rank = 0; rank < ranks - 1; ++rank) {
    const std::string& result = results[static_cast<size_t>(rank)];
    const auto says = [&](const std::string& text) {
      return result.find(text) != std::string::npos;
    };
    // Over NCCL a rank knows that its call did not end, and not which rank is missing.
    EXPECT_TRUE(transport == ExpertTransport::kPeerMemory
                    ? says(last + " sent no tokens within 300 ms") || says("a rank gave up")
                    : says("over NCCL on cuda:") && says("did not end within 300 ms"))
        << name(transport) << ", rank " << rank << ": " << result;
  }
  EXPECT_EQ(results.back(), last + " stayed away");
}

// The GPU runs the kernels of one process at a time.
TEST_F(ExpertRanks, OnOneGpuGiveTheSums) { expect_exchange(2, 1, 3, ExpertTransport::kPeerMemory); }

TEST_F(ExpertRanks, OnAllGpusGiveTheSums) {
  if (gpus_of_host() < 2) GTEST_SKIP() << "skipped: there is one GPU";
  for (int ranks = 2; ranks <= std::min(gpus_of_host(), 8); ++ranks) {
    expect_exchange(ranks, gpus_of_host(), 50, ExpertTransport::kPeerMemory);
  }
}

TEST_F(ExpertRanks, GiveTheSumsOverNccl) {
  if (gpus_of_host() < 2) GTEST_SKIP() << "skipped: there is one GPU";
  if (const NcclInfo nccl = nccl_info(); !nccl.found) GTEST_SKIP() << "skipped: " << nccl.reason;
  for (const auto transport : {ExpertTransport::kAllToAll, ExpertTransport::kAllGather}) {
    expect_exchange(std::min(gpus_of_host(), 8), gpus_of_host(), 20, transport);
  }
}

}  // namespace
}  // namespace narrowfloat::testing
