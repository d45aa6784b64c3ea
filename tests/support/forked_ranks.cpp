// See forked_ranks.h.
#include "support/forked_ranks.h"

#include <chrono>
#include <stdexcept>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

#include <fmt/format.h>
#include <gtest/gtest.h>

namespace narrowfloat::testing {
namespace {

std::string result_of(const std::function<std::string(int)>& body, int rank) {
  std::string result;
  const std::string error = error_of([&] { result = body(rank); });
  return error.empty() ? result : error;
}

[[noreturn]] void run_child(const std::function<std::string(int)>& body, int rank, int pipe) {
  ::alarm(60);
  const std::string result = result_of(body, rank);
  const ssize_t written = ::write(pipe, result.data(), result.size());
  ::_exit(written == static_cast<ssize_t>(result.size()) ? 0 : 1);
}

struct Child {
  pid_t pid = 0;
  int pipe = -1;
};

std::string wait_for_child(const Child& child) {
  std::string result;
  char buffer[4096];
  for (ssize_t count = 0; (count = ::read(child.pipe, buffer, sizeof(buffer))) > 0;) {
    result.append(buffer, static_cast<size_t>(count));
  }
  ::close(child.pipe);
  int status = 0;
  ::waitpid(child.pid, &status, 0);
  if (WIFSIGNALED(status)) return fmt::format("signal {}", WTERMSIG(status));
  return WEXITSTATUS(status) == 0 ? result : fmt::format("exit status {}", WEXITSTATUS(status));
}

}  // namespace

std::vector<std::string> run_processes(int ranks, const std::function<std::string(int)>& body) {
  std::vector<Child> children;
  for (int rank = 0; rank < ranks; ++rank) {
    int ends[2];
    if (::pipe(ends) != 0) throw std::runtime_error("pipe failed");
    const pid_t pid = ::fork();
    if (pid == 0) run_child(body, rank, ends[1]);
    ::close(ends[1]);
    children.push_back({pid, ends[0]});
  }
  std::vector<std::string> results;
  for (const Child& child : children) results.push_back(wait_for_child(child));
  return results;
}

std::vector<std::string> run_threads(int ranks, const std::function<std::string(int)>& body) {
  std::vector<std::string> results(static_cast<size_t>(ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] { results[static_cast<size_t>(rank)] = result_of(body, rank); });
  }
  for (std::thread& thread : threads) thread.join();
  return results;
}

std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return fmt::format("{}: {}", to_string(error.kind()), error.what());
  } catch (const std::exception& error) {
    return fmt::format("exception: {}", error.what());
  }
  return {};
}

std::vector<std::string> run_forked_ranks(int ranks, const RankBody& body) {
  constexpr std::chrono::seconds kRankDeadline{20};
  SharedRendezvous rendezvous(ranks);
  return run_processes(ranks, [&](int rank) {
    body(*rendezvous.bootstrap(rank, kRankDeadline));
    return std::string();
  });
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
