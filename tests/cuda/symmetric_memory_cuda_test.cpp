// Symmetric memory on GPUs: ranks in processes of their own, by CUDA IPC and CUDA VMM, on one GPU
// and on as many as there are; virtual ranks in one process.
#include <gtest/gtest.h>

#include "cuda/gpu_test.h"
#include "narrowfloat/runtime.h"
#include "runtime/comm/symmetric_memory.h"
#include "runtime/cuda/device_memory.h"
#include "support/multicast_off.h"
#include "support/spawned_ranks.h"

namespace narrowfloat::testing {
namespace {

constexpr int64_t kOddBytes = 1'000'003;

class PeerMemory : public GpuTest {
 protected:
  void SetUp() override {
    const std::string multicast = turn_multicast_off();
    ASSERT_EQ(multicast, "");
    GpuTest::SetUp();
  }
};

int num_gpus() { return static_cast<int>(gpu_info().size()); }

// Rank r is on GPU devices[r].
std::vector<std::string> share_memory(const std::vector<int>& devices, AllReduceTransport transport,
                                      int64_t size_bytes) {
  const auto ranks = static_cast<int>(devices.size());
  return run_spawned_ranks(
      sibling_executable("peer_rank"), ranks, [&](int rank, const std::string& directory) {
        return std::vector<std::string>{"memory",
                                        std::to_string(rank),
                                        std::to_string(ranks),
                                        std::to_string(devices[static_cast<size_t>(rank)]),
                                        directory,
                                        std::string(name(transport)),
                                        std::to_string(size_bytes)};
      });
}

std::vector<int> devices_of(int ranks, int gpus) {
  std::vector<int> devices(static_cast<size_t>(ranks));
  for (int rank = 0; rank < ranks; ++rank) devices[static_cast<size_t>(rank)] = rank % gpus;
  return devices;
}

void expect_shared(int ranks, int gpus, AllReduceTransport transport, int64_t size_bytes) {
  const std::vector<std::string> expected(static_cast<size_t>(ranks),
                                          "ok " + std::string(name(transport)));
  EXPECT_EQ(share_memory(devices_of(ranks, gpus), transport, size_bytes), expected)
      << ranks << " ranks on " << gpus << " GPUs, " << size_bytes << " bytes";
}

TEST_F(PeerMemory, IsSharedByProcessesOnOneGpuOverIpc) {
  for (const int ranks : {1, 2, 4})
    expect_shared(ranks, 1, AllReduceTransport::kCudaIpc, kOddBytes);
  expect_shared(2, 1, AllReduceTransport::kCudaIpc, int64_t{64} << 20);
}

TEST_F(PeerMemory, IsSharedByProcessesOnOneGpuOverVmm) {
  for (const int ranks : {1, 2, 4})
    expect_shared(ranks, 1, AllReduceTransport::kCudaVmm, kOddBytes);
  expect_shared(2, 1, AllReduceTransport::kCudaVmm, int64_t{64} << 20);
}

TEST_F(PeerMemory, IsSharedBetweenAllGpus) {
  const int gpus = num_gpus();
  if (gpus < 2) GTEST_SKIP() << "skipped: there is one GPU";
  for (int ranks = 2; ranks <= std::min(gpus, SymmetricMemory::kMaxRanks); ++ranks) {
    expect_shared(ranks, gpus, AllReduceTransport::kCudaIpc, kOddBytes);
    expect_shared(ranks, gpus, AllReduceTransport::kCudaVmm, kOddBytes);
  }
}

TEST_F(PeerMemory, HasTheSameTransportOnAllRanksWhereNoneIsNamed) {
  const std::vector<std::string> results =
      share_memory(devices_of(3, num_gpus()), AllReduceTransport::kAuto, kOddBytes);
  for (const std::string& result : results) {
    EXPECT_TRUE(result == "ok cuda_vmm" || result == "ok cuda_ipc") << result;
    EXPECT_EQ(result, results.front());
  }
}

TEST_F(PeerMemory, FailsOnAllRanksForMoreThanTheGpuHas) {
  for (const auto transport :
       {AllReduceTransport::kCudaIpc, AllReduceTransport::kCudaVmm, AllReduceTransport::kAuto}) {
    const std::vector<std::string> results = share_memory({0, 0}, transport, int64_t{1} << 60);
    for (const std::string& result : results) {
      EXPECT_TRUE(result.starts_with(to_string(ErrorKind::kUnsupported))) << result;
      EXPECT_NE(result.find("1152921504606846976"), std::string::npos) << result;
      EXPECT_EQ(result, results.front());
    }
  }
}

TEST_F(PeerMemory, FailsOnAllRanksWhereOneHasNoGpu) {
  const std::vector<std::string> results =
      share_memory({0, num_gpus()}, AllReduceTransport::kAuto, kOddBytes);
  for (const std::string& result : results) {
    EXPECT_TRUE(result.starts_with(to_string(ErrorKind::kUnsupported))) << result;
    EXPECT_NE(result.find("cuda:" + std::to_string(num_gpus())), std::string::npos) << result;
    EXPECT_EQ(result, results.front());
  }
}

TEST_F(PeerMemory, LeavesNoMemoryAllocated) {
  expect_shared(2, 1, AllReduceTransport::kCudaVmm, kOddBytes);  // Loads what stays loaded.
  const int64_t before = free_device_memory();
  expect_shared(2, 1, AllReduceTransport::kCudaVmm, int64_t{64} << 20);
  expect_shared(2, 1, AllReduceTransport::kCudaIpc, int64_t{64} << 20);
  EXPECT_GE(free_device_memory(), before - (int64_t{8} << 20));
}

TEST_F(PeerMemory, OfVirtualRanksIsOneAllocation) {
  std::vector<std::unique_ptr<SymmetricMemory>> memories = make_local_memory(4, gpu(), kOddBytes);
  ASSERT_EQ(memories.size(), 4U);
  const auto bytes = static_cast<size_t>(kOddBytes);
  for (const auto& memory : memories) {
    EXPECT_EQ(memory->transport(), AllReduceTransport::kVirtual);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(memory->own()) % 128, 0U);
    const std::vector<uint8_t> values(bytes, static_cast<uint8_t>(memory->rank() + 1));
    copy_to_device(memory->own(), values.data(), kOddBytes, gpu(), {});
  }
  const std::unique_ptr<SymmetricMemory> last = std::move(memories.back());
  memories.clear();
  for (int rank = 0; rank < 4; ++rank) {
    std::vector<uint8_t> found(bytes);
    copy_to_host(found.data(), last->region(rank), kOddBytes, gpu(), {});
    EXPECT_EQ(found, std::vector<uint8_t>(bytes, static_cast<uint8_t>(rank + 1)));
  }
}

}  // namespace
}  // namespace narrowfloat::testing
