// See forked_ranks.h.
#include "support/forked_ranks.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstring>
#include <memory>
#include <new>
#include <sys/mman.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

#include <gtest/gtest.h>

namespace narrowfloat::testing {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr size_t kMessageBytes = size_t{1} << 20;
constexpr auto kRankDeadline = 20s;

// One rank's part of the shared memory. A rank alternates between two messages: when it writes the
// one of call n + 2, all ranks have begun call n + 1 and so have read call n.
struct RankCell {
  struct Message {
    std::atomic<uint32_t> call{0};
    std::byte bytes[kMessageBytes];
  };
  Message messages[2];
  char report[4096];
};

class ForkedBootstrap final : public Bootstrap {
 public:
  ForkedBootstrap(int rank, int ranks, RankCell* cells)
      : Bootstrap({.rank = rank, .size = ranks, .local_rank = rank, .launcher = {}, .job_id = {}},
                  kRankDeadline),
        cells_(cells) {}

  void all_gather(std::span<const std::byte> mine, std::span<std::byte> all) override {
    require(mine.size() <= kMessageBytes, "the message is too long for the test");
    require(all.size() == mine.size() * static_cast<size_t>(size()), "all has another size");
    const uint32_t call = ++calls_;
    RankCell::Message& own = cells_[rank()].messages[call % 2];
    std::copy(mine.begin(), mine.end(), own.bytes);
    own.call.store(call, std::memory_order_release);
    const auto end = Clock::now() + deadline();
    for (int peer = 0; peer < size(); ++peer) {
      const RankCell::Message& message = cells_[peer].messages[call % 2];
      while (message.call.load(std::memory_order_acquire) != call) {
        if (Clock::now() > end) {
          throw Error(ErrorKind::kDevice, "no message of rank " + std::to_string(peer));
        }
        std::this_thread::sleep_for(50us);
      }
      std::copy_n(message.bytes, mine.size(),
                  all.begin() + static_cast<ptrdiff_t>(mine.size()) * peer);
    }
  }

 private:
  RankCell* cells_;
  uint32_t calls_ = 0;
};

std::string report_of(const RankBody& body, Bootstrap& bootstrap) {
  try {
    body(bootstrap);
    return {};
  } catch (const Error& error) {
    return std::string(to_string(error.kind())) + ": " + error.what();
  } catch (const std::exception& error) {
    return std::string("no Error: ") + error.what();
  }
}

[[noreturn]] void run_rank(int rank, int ranks, RankCell* cells, const RankBody& body) {
  ForkedBootstrap bootstrap(rank, ranks, cells);
  const std::string report = report_of(body, bootstrap);
  std::strncpy(cells[rank].report, report.c_str(), sizeof(cells[rank].report) - 1);
  ::_exit(0);
}

// "" for a process that has left its report.
std::string wait_for_rank(pid_t process, Clock::time_point end) {
  int status = 0;
  while (::waitpid(process, &status, WNOHANG) == 0) {
    if (Clock::now() > end) {
      ::kill(process, SIGKILL);
      ::waitpid(process, &status, 0);
      return "has not ended in time";
    }
    std::this_thread::sleep_for(1ms);
  }
  if (WIFSIGNALED(status)) return std::string("ended by signal: ") + strsignal(WTERMSIG(status));
  return WEXITSTATUS(status) == 0 ? "" : "exit status " + std::to_string(WEXITSTATUS(status));
}

}  // namespace

std::vector<std::string> run_forked_ranks(int ranks, const RankBody& body) {
  const size_t bytes = sizeof(RankCell) * static_cast<size_t>(ranks);
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return {"mmap has failed"};
  auto* cells = static_cast<RankCell*>(memory);
  std::uninitialized_default_construct_n(cells, ranks);
  std::vector<pid_t> processes;
  for (int rank = 0; rank < ranks; ++rank) {
    const pid_t process = ::fork();
    if (process == 0) run_rank(rank, ranks, cells, body);
    processes.push_back(process);
  }
  std::vector<std::string> reports;
  const auto end = Clock::now() + 3 * kRankDeadline;
  for (int rank = 0; rank < ranks; ++rank) {
    const std::string ended = wait_for_rank(processes[static_cast<size_t>(rank)], end);
    reports.push_back(ended.empty() ? cells[rank].report : ended);
  }
  ::munmap(memory, bytes);
  return reports;
}

void expect_success_on_all(int ranks, const RankBody& body) {
  const std::vector<std::string> reports = run_forked_ranks(ranks, body);
  for (size_t rank = 0; rank < reports.size(); ++rank) {
    EXPECT_EQ(reports[rank], "") << "rank " << rank << " of " << ranks;
  }
}

void expect_error_on_all(int ranks, ErrorKind kind, const std::vector<std::string>& fragments,
                         const RankBody& body) {
  const std::vector<std::string> reports = run_forked_ranks(ranks, body);
  EXPECT_EQ(reports.size(), static_cast<size_t>(ranks));
  for (const std::string& report : reports) {
    EXPECT_TRUE(report.starts_with(std::string(to_string(kind)) + ": ")) << report;
    for (const std::string& fragment : fragments) {
      EXPECT_NE(report.find(fragment), std::string::npos)
          << "no \"" << fragment << "\" in: " << report;
    }
    EXPECT_EQ(report, reports.front());
  }
}

void require(bool condition, const std::string& what) {
  if (!condition) throw Error(ErrorKind::kCorruptData, what);
}

}  // namespace narrowfloat::testing
