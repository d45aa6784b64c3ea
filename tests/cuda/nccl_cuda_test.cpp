// NCCL's communicator on GPUs, in processes of their own, and what is known about the links.
#include <algorithm>

#include <gtest/gtest.h>

#include "cuda/gpu_test.h"
#include "narrowfloat/allreduce.h"
#include "support/multicast_off.h"
#include "support/spawned_ranks.h"

namespace narrowfloat::testing {
namespace {

class NcclOnGpus : public GpuTest {
 protected:
  void SetUp() override {
    const std::string multicast = turn_multicast_off();
    ASSERT_EQ(multicast, "");
    GpuTest::SetUp();
    if (const NcclInfo info = nccl_info(); !info.found) GTEST_SKIP() << "skipped: " << info.reason;
  }
};

// Rank r is on GPU r modulo `gpus`.
std::vector<std::string> use_nccl(int ranks, int gpus) {
  return run_spawned_ranks(
      sibling_executable("peer_rank"), ranks, [&](int rank, const std::string& directory) {
        return std::vector<std::string>{"nccl", std::to_string(rank), std::to_string(ranks),
                                        std::to_string(rank % gpus), directory};
      });
}

TEST_F(NcclOnGpus, SumsGathersAndExchanges) {
  const int gpus = static_cast<int>(gpu_info().size());
  for (int ranks = 1; ranks <= std::min(gpus, 8); ++ranks) {
    const std::vector<std::string> expected(static_cast<size_t>(ranks), "ok");
    EXPECT_EQ(use_nccl(ranks, gpus), expected) << ranks << " ranks";
  }
}

TEST_F(NcclOnGpus, FailsOnAllRanksWhereTwoShareAGpu) {
  const std::vector<std::string> results = use_nccl(2, 1);
  for (const std::string& result : results) {
    EXPECT_TRUE(result.starts_with(to_string(ErrorKind::kDevice))) << result;
    EXPECT_NE(result.find("ncclCommInitRankConfig"), std::string::npos) << result;
    EXPECT_EQ(result, results.front());
  }
}

TEST_F(NcclOnGpus, AreLinkedInOrderedPairs) {
  const auto gpus = gpu_info().size();
  const std::vector<GpuLink> links = gpu_links();
  EXPECT_EQ(links.size(), gpus * (gpus - 1));
  for (const GpuLink& link : links) EXPECT_NE(link.from, link.to);
}

}  // namespace
}  // namespace narrowfloat::testing
