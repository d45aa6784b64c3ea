// Ranks of a group as forked processes or as threads, for tests of bootstraps.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "narrowfloat/bootstrap.h"
#include "support/forked_ranks.h"

namespace narrowfloat::testing {

void expect_contains(const std::string& text, const std::vector<std::string>& fragments);

// A deadline that no test reaches.
inline constexpr std::chrono::milliseconds kLongDeadline{20'000};

RankInfo place_in_job(int rank, int size, const std::string& job_id);

// A TCP port that nobody listens on.
int free_port();

// A way to meet, made before the ranks start: a directory, a port, a page.
class Meeting {
 public:
  virtual ~Meeting() = default;
  virtual std::unique_ptr<Bootstrap> bootstrap(int rank, Bootstrap::Milliseconds deadline) = 0;
  virtual std::vector<std::string> run(int ranks, const std::function<std::string(int)>& body) {
    return run_processes(ranks, body);
  }
};

// "file", "tcp", "shared" and "callback" for processes, "threads" and "tcp_threads" for threads.
std::unique_ptr<Meeting> make_meeting(const std::string& kind, int ranks);

}  // namespace narrowfloat::testing
