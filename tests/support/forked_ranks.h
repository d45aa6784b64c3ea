// Ranks that are processes of their own, forked from the test, alone or with a bootstrap over
// memory that they share. The test must not have threads, nor have used CUDA.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "narrowfloat/bootstrap.h"

namespace narrowfloat::testing {

// Forks `ranks` children, in each runs body(rank), and returns what they return, or "signal 9" for
// a child that was killed. An exception of a child is a result "error kind: message". Children
// never run a test's code after the body, and end after 60 seconds in any case.
std::vector<std::string> run_processes(int ranks, const std::function<std::string(int)>& body);

// The same in threads.
std::vector<std::string> run_threads(int ranks, const std::function<std::string(int)>& body);

// "" if the body throws nothing, else "error kind: message".
std::string error_of(const std::function<void()>& body);

// The bootstrap of a rank with another deadline; tests that meddle with messages derive from it.
class ForwardingBootstrap : public Bootstrap {
 public:
  explicit ForwardingBootstrap(Bootstrap& inner, Milliseconds deadline = kDefaultDeadline)
      : Bootstrap(inner.info(), deadline), inner_(inner) {}
  void all_gather(std::span<const std::byte> mine, std::span<std::byte> all) override {
    inner_.all_gather(mine, all);
  }

 private:
  Bootstrap& inner_;
};

using RankBody = std::function<void(Bootstrap&)>;

// Runs `body` on each rank as run_processes() does; the result is "" where the body returned. Ranks
// wait for each other for 20 seconds at most.
std::vector<std::string> run_forked_ranks(int ranks, const RankBody& body);

// Expects that all ranks return.
void expect_success_on_all(int ranks, const RankBody& body);

// Expects that all ranks throw an Error of the kind whose message has the fragments.
void expect_error_on_all(int ranks, ErrorKind kind, const std::vector<std::string>& fragments,
                         const RankBody& body);

// Throws an Error for a rank's report unless `condition` holds.
void require(bool condition, const std::string& what);

}  // namespace narrowfloat::testing
