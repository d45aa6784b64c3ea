// The ranks that narrowfloat-bench allreduce runs: threads or processes of the host, virtual ranks
// of one GPU, or a process for each GPU. Processes are forked before any use of CUDA and end by
// their numbers, with deadlines everywhere: nothing waits for ever for a rank that has died.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cli_common/timing/machine.h"
#include "narrowfloat/allreduce.h"
#include "narrowfloat/error.h"

namespace narrowfloat::cli {

enum class RankPlace : int { kThreads, kProcesses, kVirtual, kGpus };

struct RankSetup {
  RankPlace place = RankPlace::kThreads;
  int ranks = 2;
  int gpu = 0;  // kVirtual: the GPU. kGpus: rank r has GPU r, or all have GPU 0.
  bool is_one_gpu = false;
  AllReduceWorkspaceOptions workspace;  // The device is that of the place.
  std::chrono::seconds time_limit{3600};

  [[nodiscard]] bool uses_gpus() const {
    return place == RankPlace::kVirtual || place == RankPlace::kGpus;
  }
  // Ranks that have a workspace object and a body of their own: all, or one for virtual ranks.
  [[nodiscard]] int bodies() const { return place == RankPlace::kVirtual ? 1 : ranks; }
};

// One rank, or all virtual ranks of a GPU, while the body below runs.
class LocalRanks {
 public:
  // `group` is null for virtual ranks.
  LocalRanks(std::unique_ptr<Machine> machine, std::vector<AllReduceWorkspace> workspaces,
             std::shared_ptr<Bootstrap> group)
      : machine_(std::move(machine)),
        workspaces_(std::move(workspaces)),
        group_(std::move(group)) {}

  [[nodiscard]] Machine& machine() const { return *machine_; }
  [[nodiscard]] int first_rank() const { return workspaces_.front().rank(); }
  [[nodiscard]] int count() const { return static_cast<int>(workspaces_.size()); }
  [[nodiscard]] int ranks() const { return workspaces_.front().ranks(); }
  [[nodiscard]] bool is_virtual() const { return group_ == nullptr; }
  [[nodiscard]] bool has_nccl() const { return workspaces_.front().nccl_bytes() > 0; }
  [[nodiscard]] AllReduceTransport transport() const { return workspaces_.front().transport(); }
  [[nodiscard]] const std::shared_ptr<Bootstrap>& group() const { return group_; }

  // One argument for each rank here. Queues the call.
  AllReduceAlgorithm call(const AllReduceProblem& problem, std::span<const AllReduceArgs> args,
                          Stream stream);
  // Waits for the calls, and throws if one has failed.
  void wait_and_check();

  // Collectives; where all ranks are here they do nothing but run the step.
  void barrier() const;
  void broadcast(std::span<std::byte> data) const;  // From rank 0.
  void together(const std::string& step, const std::function<void()>& body) const;
  void destroy();

 private:
  std::unique_ptr<Machine> machine_;
  std::vector<AllReduceWorkspace> workspaces_;
  std::shared_ptr<Bootstrap> group_;
};

// Zeros that threads, and processes that are forked later, all see and write.
class SharedBytes {
 public:
  explicit SharedBytes(uint64_t size_bytes);
  ~SharedBytes();
  SharedBytes(const SharedBytes&) = delete;
  SharedBytes& operator=(const SharedBytes&) = delete;

  [[nodiscard]] std::span<std::byte> bytes() const { return bytes_; }
  // Objects that are in order when all their bytes are zero.
  template <typename Object>
  [[nodiscard]] std::span<Object> as(size_t count) const {
    return {reinterpret_cast<Object*>(bytes_.data()), count};
  }

 private:
  std::span<std::byte> bytes_;
};

// How a body ended.
struct RankEnd {
  bool is_reported = false;  // The body has returned or thrown.
  bool has_failed = false;
  ErrorKind kind{};
  int signal = 0;      // That killed its process.
  double seconds = 0;  // When it ended, on the clock of steady_seconds().
  char message[1024] = {};
};

// The clock of all processes.
double steady_seconds();

// Sets the variables that keep NVLink multicast off, also for children (docs/allreduce.md),
// before the first use of CUDA or NCCL. Throws kInvalidArgument where one has another value.
void turn_multicast_off();

using RankBody = std::function<void(LocalRanks& ranks)>;
// Runs the body once for each rank (once for all virtual ones) and waits for all; a process that
// does not end within the time limit, or within the deadline of the workspace and some seconds
// after another has failed, is killed. Throws kUnsupported where the place needs GPUs and the build
// has no CUDA.
std::vector<RankEnd> run_ranks(const RankSetup& setup, const RankBody& body);

// The first failure, if any: an error that names the rank.
std::optional<Error> first_failure(const RankSetup& setup, std::span<const RankEnd> ends);

}  // namespace narrowfloat::cli
