// Symmetric memory on the CPU: forked processes with POSIX shared memory, and ranks of one process.
#include "runtime/comm/symmetric_memory.h"

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>
#include <sys/resource.h>
#include <thread>

#include <gtest/gtest.h>

#include "support/expect_error.h"
#include "support/forked_ranks.h"

namespace narrowfloat::testing {
namespace {

using Memory = std::unique_ptr<SymmetricMemory>;

constexpr Device kCpu{};
constexpr int64_t kAbsurdBytes = int64_t{1} << 60;

Memory make_shared(Bootstrap& bootstrap, int64_t size_bytes,
                   AllReduceTransport transport = AllReduceTransport::kAuto) {
  return make_symmetric_memory(bootstrap, kCpu, transport, size_bytes);
}

uint8_t byte_of(int owner, int64_t index) {
  return static_cast<uint8_t>(index * 31 + index / 251 + owner * 7 + 1);
}

// The rank writes every byte of a region whose index is its own modulo the number of ranks.
void write_own_bytes(const SymmetricMemory& memory) {
  for (int owner = 0; owner < memory.ranks(); ++owner) {
    for (int64_t i = memory.rank(); i < memory.size_bytes(); i += memory.ranks()) {
      memory.region(owner)[i] = byte_of(owner, i);
    }
  }
}

void check_all_bytes(const SymmetricMemory& memory) {
  for (int owner = 0; owner < memory.ranks(); ++owner) {
    for (int64_t i = 0; i < memory.size_bytes(); ++i) {
      if (memory.region(owner)[i] == byte_of(owner, i)) continue;
      require(false, "region " + std::to_string(owner) + ", byte " + std::to_string(i));
    }
  }
}

void check_facts(const SymmetricMemory& memory, const Bootstrap& bootstrap, int64_t size_bytes) {
  require(memory.rank() == bootstrap.rank() && memory.ranks() == bootstrap.size(), "ranks");
  require(memory.size_bytes() == size_bytes && memory.device() == kCpu, "size or device");
  require(memory.transport() == AllReduceTransport::kSharedMemory, "transport");
  require(memory.own() == memory.region(bootstrap.rank()), "own");
  for (int rank = 0; rank < memory.ranks(); ++rank) {
    require(reinterpret_cast<uintptr_t>(memory.region(rank)) % 128 == 0, "alignment");
  }
}

void share_and_check(Bootstrap& bootstrap, int64_t size_bytes) {
  const Memory memory = make_shared(bootstrap, size_bytes);
  check_facts(*memory, bootstrap, size_bytes);
  write_own_bytes(*memory);
  bootstrap.barrier();
  check_all_bytes(*memory);
}

// Objects of this library that have a name now.
std::set<std::string> named_objects() {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with("narrowfloat-")) names.insert(name);
  }
  return names;
}

// Objects of other tests that run now lose their names soon; those that were left never do.
void expect_nothing_left() {
  std::set<std::string> left = named_objects();
  for (int i = 0; i < 1000 && !left.empty(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    std::erase_if(left,
                  [now = named_objects()](const std::string& name) { return !now.contains(name); });
  }
  EXPECT_TRUE(left.empty()) << *left.begin();
}

// From here on this process cannot make a file longer than this, nor shared memory.
void allow_file_size(rlim_t size_bytes) {
  const rlimit limit{.rlim_cur = size_bytes, .rlim_max = size_bytes};
  require(::setrlimit(RLIMIT_FSIZE, &limit) == 0, "setrlimit");
  require(std::signal(SIGXFSZ, SIG_IGN) != SIG_ERR, "signal");
}

// Changes the names of the peers' objects.
class WrongNamesBootstrap final : public ForwardingBootstrap {
 public:
  using ForwardingBootstrap::ForwardingBootstrap;
  void all_gather(std::span<const std::byte> mine, std::span<std::byte> all) override {
    ForwardingBootstrap::all_gather(mine, all);
    constexpr std::string_view kPrefix = "/narrowfloat-";
    if (mine.size() < kPrefix.size()) return;
    if (std::memcmp(mine.data(), kPrefix.data(), kPrefix.size()) != 0) return;
    for (size_t i = 1; i < all.size(); i += mine.size()) all[i] = std::byte{'N'};
  }
};

TEST(SharedMemory, EveryRankSeesWhatEveryRankWrites) {
  for (const int ranks : {1, 2, 3, 8}) {
    for (const int64_t size_bytes : {1, 127, 4097, 1'000'003}) {
      expect_success_on_all(ranks,
                            [&](Bootstrap& bootstrap) { share_and_check(bootstrap, size_bytes); });
    }
  }
}

TEST(SharedMemory, TakesRegionsOf64MiB) {
  expect_success_on_all(
      2, [](Bootstrap& bootstrap) { share_and_check(bootstrap, int64_t{64} << 20); });
}

TEST(SharedMemory, HasNoNamesOnceItIsMapped) {
  expect_success_on_all(3, [](Bootstrap& bootstrap) {
    const Memory memory = make_shared(bootstrap, 5000);
    int num_mapped = 0;
    std::ifstream maps("/proc/self/maps");
    for (std::string line; std::getline(maps, line);) {
      if (line.find("/narrowfloat-") == std::string::npos) continue;
      ++num_mapped;
      require(line.ends_with("(deleted)"), line);
    }
    require(num_mapped == 3, std::to_string(num_mapped) + " regions are mapped");
  });
  expect_nothing_left();
}

TEST(SharedMemory, ForgetsThePeersButNotItself) {
  expect_success_on_all(3, [](Bootstrap& bootstrap) {
    const Memory memory = make_shared(bootstrap, 5000);
    bootstrap.barrier();
    memory->unmap_peers();
    for (int rank = 0; rank < 3; ++rank) {
      require((memory->region(rank) != nullptr) == (rank == bootstrap.rank()), "region");
    }
    std::fill_n(memory->own(), 5000, uint8_t{1});
    memory->unmap_peers();
  });
}

TEST(SharedMemory, FailsOnAllRanksWhereOneCannotCreateIts) {
  expect_error_on_all(3, ErrorKind::kUnsupported,
                      {"shared_memory", "creating shared memory", "File too large"},
                      [](Bootstrap& bootstrap) {
                        if (bootstrap.rank() == 1) allow_file_size(4096);
                        make_shared(bootstrap, 5000);
                      });
  expect_nothing_left();
}

TEST(SharedMemory, FailsOnAllRanksWhereOneCannotMapAPeers) {
  expect_error_on_all(3, ErrorKind::kUnsupported,
                      {"shared_memory", "mapping the peers' shared memory", "No such file"},
                      [](Bootstrap& bootstrap) {
                        WrongNamesBootstrap wrong(bootstrap);
                        make_shared(bootstrap.rank() == 2 ? wrong : bootstrap, 5000,
                                    AllReduceTransport::kSharedMemory);
                      });
  expect_nothing_left();
}

TEST(SharedMemory, RefusesMoreThanThereIs) {
  expect_error_on_all(2, ErrorKind::kUnsupported, {"1152921504606846976", "--shm-size"},
                      [](Bootstrap& bootstrap) { make_shared(bootstrap, kAbsurdBytes); });
  expect_nothing_left();
}

TEST(SharedMemory, RefusesArgumentsThatDifferBetweenRanks) {
  expect_error_on_all(2, kInvalid, {"5000 bytes", "5001 bytes"}, [](Bootstrap& bootstrap) {
    make_shared(bootstrap, 5000 + bootstrap.rank());
  });
}

TEST(SharedMemory, RefusesBadSizesAndTransportsOnAllRanks) {
  for (const int64_t size_bytes : {int64_t{0}, int64_t{-1}, (int64_t{1} << 62) + 1}) {
    expect_error_on_all(2, kInvalid, {"size_bytes"}, [&](Bootstrap& bootstrap) {
      make_shared(bootstrap, bootstrap.rank() == 0 ? size_bytes : 4096);
    });
  }
  for (const AllReduceTransport transport :
       {AllReduceTransport::kThreads, AllReduceTransport::kCudaIpc, AllReduceTransport::kNone}) {
    expect_error_on_all(2, kInvalid, {"transport", "shared_memory", std::string(name(transport))},
                        [&](Bootstrap& bootstrap) { make_shared(bootstrap, 5000, transport); });
  }
}

TEST(SharedMemory, RefusesNineRanks) {
  expect_error_on_all(9, kInvalid, {"ranks", "1 to 8"},
                      [](Bootstrap& bootstrap) { make_shared(bootstrap, 5000); });
}

// Without CUDA, or without a GPU.
TEST(SymmetricMemory, SaysOnAllRanksWhyItCannotBeOnGpus) {
  const std::vector<std::string> reports = run_forked_ranks(2, [](Bootstrap& bootstrap) {
    if (!gpu_info().empty()) return;
    make_symmetric_memory(bootstrap, {DeviceType::kCuda, 0}, AllReduceTransport::kAuto, 5000);
    require(false, "there is memory on a GPU");
  });
  if (reports.front().empty()) GTEST_SKIP() << "there is a GPU";
  for (const std::string& report : reports) {
    EXPECT_TRUE(report.starts_with(to_string(ErrorKind::kUnsupported))) << report;
    const std::string reason = build_has_cuda() ? "there are no CUDA devices" : "has no CUDA";
    for (const std::string& fragment :
         {std::string("cuda_vmm: "), std::string("cuda_ipc: "), reason}) {
      EXPECT_NE(report.find(fragment), std::string::npos) << report;
    }
    EXPECT_EQ(report, reports.front());
  }
}

TEST(LocalMemory, GivesEveryRankTheSameRegions) {
  constexpr int64_t kBytes = 10'001;
  for (int ranks = 1; ranks <= SymmetricMemory::kMaxRanks; ++ranks) {
    std::vector<Memory> memories = make_local_memory(ranks, kCpu, kBytes);
    ASSERT_EQ(memories.size(), static_cast<size_t>(ranks));
    for (int rank = 0; rank < ranks; ++rank) {
      const SymmetricMemory& memory = *memories[static_cast<size_t>(rank)];
      EXPECT_EQ(memory.rank(), rank);
      EXPECT_EQ(memory.ranks(), ranks);
      EXPECT_EQ(memory.transport(), AllReduceTransport::kThreads);
      EXPECT_EQ(memory.size_bytes(), kBytes);
      EXPECT_EQ(reinterpret_cast<uintptr_t>(memory.own()) % 128, 0U);
      for (int peer = 0; peer < ranks; ++peer) {
        EXPECT_EQ(memory.region(peer), memories.front()->region(peer));
      }
      write_own_bytes(memory);
    }
    for (const Memory& memory : memories) check_all_bytes(*memory);
  }
}

TEST(LocalMemory, LivesAsLongAsAnyRank) {
  std::vector<Memory> memories = make_local_memory(3, kCpu, 5000);
  Memory last = std::move(memories[1]);
  memories.clear();
  for (int rank = 0; rank < 3; ++rank) std::fill_n(last->region(rank), 5000, uint8_t{7});
  last->unmap_peers();
  EXPECT_EQ(last->region(0), nullptr);
  EXPECT_EQ(last->own()[4999], 7);
}

TEST(LocalMemory, RefusesBadRanksAndSizes) {
  expect_error(kInvalid, {"ranks"}, [] { make_local_memory(0, kCpu, 4096); });
  expect_error(kInvalid, {"ranks", "9"}, [] { make_local_memory(9, kCpu, 4096); });
  expect_error(kInvalid, {"size_bytes"}, [] { make_local_memory(2, kCpu, 0); });
  expect_error(kInvalid, {"size_bytes"}, [] { make_local_memory(8, kCpu, int64_t{1} << 62); });
  expect_error(ErrorKind::kIo, {"memory"}, [] { make_local_memory(2, kCpu, kAbsurdBytes); });
}

TEST(AllReduceTransport, HasANameForEachEnumerator) {
  EXPECT_EQ(name(AllReduceTransport::kAuto), "auto");
  EXPECT_EQ(name(AllReduceTransport::kCudaIpc), "cuda_ipc");
  EXPECT_EQ(name(AllReduceTransport::kNone), "none");
  expect_error(kInvalid, {"AllReduceTransport"}, [] { name(static_cast<AllReduceTransport>(7)); });
}

}  // namespace
}  // namespace narrowfloat::testing
