// The probe of peer memory: it must notice memory that is not shared and copies that do not arrive.
#include "runtime/comm/region_probe.h"

#include <algorithm>
#include <cstring>

#include <gtest/gtest.h>

#include "runtime/comm/phase.h"
#include "support/forked_ranks.h"

namespace narrowfloat::testing {
namespace {

constexpr int64_t kProbedBytes = 8192;

// Memory of this process alone, whatever the number of ranks: each region is a part of it.
class PrivateMemory final : public SymmetricMemory {
 public:
  PrivateMemory(int rank, int ranks)
      : SymmetricMemory(rank, {}, AllReduceTransport::kSharedMemory, kProbedBytes),
        bytes_(static_cast<size_t>(kProbedBytes * ranks)) {
    std::vector<uint8_t*> regions;
    regions.reserve(static_cast<size_t>(ranks));
    for (int i = 0; i < ranks; ++i) regions.push_back(bytes_.data() + i * kProbedBytes);
    set_regions(std::move(regions));
  }
  void unmap_peers() override { forget_peers(); }

 private:
  std::vector<uint8_t> bytes_;
};

class CopyingAccess : public RegionAccess {
 public:
  void write(uint8_t* region, const void* from, size_t size_bytes) override {
    std::memcpy(region, from, size_bytes);
  }
  void read(void* to, const uint8_t* region, size_t size_bytes) override {
    std::memcpy(to, region, size_bytes);
  }
};

class LosingAccess final : public CopyingAccess {
 public:
  void write(uint8_t* /*region*/, const void* /*from*/, size_t /*size_bytes*/) override {}
};

TEST(RegionProbe, AcceptsMemoryThatHoldsWhatWasWritten) {
  expect_success_on_all(1, [](Bootstrap& bootstrap) {
    const PrivateMemory memory(0, 1);
    CopyingAccess access;
    probe_regions(bootstrap, memory, kProbedBytes, access);
  });
}

TEST(RegionProbe, NoticesMemoryThatIsNotShared) {
  expect_error_on_all(2, ErrorKind::kDevice, {"does not arrive", "rank 1", "rank 0"},
                      [](Bootstrap& bootstrap) {
                        const PrivateMemory memory(bootstrap.rank(), 2);
                        CopyingAccess access;
                        probe_regions(bootstrap, memory, kProbedBytes, access);
                      });
}

TEST(RegionProbe, NoticesWritesThatAreLost) {
  expect_error_on_all(1, ErrorKind::kDevice, {"does not arrive"}, [](Bootstrap& bootstrap) {
    const PrivateMemory memory(0, 1);
    LosingAccess access;
    probe_regions(bootstrap, memory, kProbedBytes, access);
  });
}

TEST(RegionProbe, NeedsRoomForTheCellsOfEightRanks) {
  EXPECT_EQ(mapped_bytes(1, 4096), 4096);
  EXPECT_EQ(mapped_bytes(4097, 4096), 8192);
  EXPECT_GE(mapped_bytes(1, 1), 2 * 8 * 16);
}

TEST(Phase, GivesAllRanksTheErrorOfOne) {
  expect_error_on_all(3, ErrorKind::kIo, {"a test", "disk", "1"}, [](Bootstrap& bootstrap) {
    run_phase(bootstrap, "a test", [&] {
      if (bootstrap.rank() == 1) throw Error(ErrorKind::kIo, "disk");
    });
  });
}

TEST(Phase, CanBeFollowedByAnotherAttempt) {
  expect_success_on_all(3, [](Bootstrap& bootstrap) {
    bool has_failed = false;
    try {
      run_phase(bootstrap, "a test", [&] {
        if (bootstrap.rank() == 2) throw std::bad_alloc();
      });
    } catch (const PhaseError&) {
      has_failed = true;
    }
    require(has_failed, "the phase has failed on rank 2");
    run_phase(bootstrap, "another", [] {});
    require(gather_values(bootstrap, bootstrap.rank()) == std::vector<int>{0, 1, 2}, "ranks");
  });
}

}  // namespace
}  // namespace narrowfloat::testing
