// How each rank ended stands in memory that is mapped before they start.
#include "bench_cli/allreduce_ranks.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <utility>

#include <fmt/format.h>

#include "cli_common/output.h"
#include "narrowfloat/bootstrap.h"
#include "narrowfloat/runtime.h"

namespace narrowfloat::cli {
namespace {

using Clock = std::chrono::steady_clock;

// Ranks notice a failure of another one by their deadlines, then they end.
constexpr std::chrono::seconds kGrace{30};
constexpr std::chrono::milliseconds kPoll{2};
constexpr std::chrono::seconds kBootstrapDeadline{300};

// State that all ranks have in common while they run.
struct Run {
  const RankSetup& setup;
  const RankBody& body;
  SharedRendezvous rendezvous;
  SharedBytes memory;
  std::span<RankEnd> ends;
  std::vector<AllReduceWorkspace> local;  // Those of threads.

  Run(const RankSetup& of, const RankBody& what)
      : setup(of),
        body(what),
        rendezvous(of.ranks),
        memory(sizeof(RankEnd) * static_cast<size_t>(of.ranks)),
        ends(memory.as<RankEnd>(static_cast<size_t>(of.ranks))) {}

  [[nodiscard]] RankEnd& end(int rank) const { return ends[static_cast<size_t>(rank)]; }
};

Device device_of(const RankSetup& setup, int rank) {
  if (!setup.uses_gpus()) return {};
  const bool has_own = setup.place == RankPlace::kGpus && !setup.is_one_gpu;
  return {DeviceType::kCuda, has_own ? rank : setup.gpu};
}

void require_gpus(const RankSetup& setup) {
  const auto found = static_cast<int>(gpu_info().size());
  const int wanted = setup.place == RankPlace::kGpus && !setup.is_one_gpu ? setup.ranks : 1;
  if (found >= wanted) return;
  throw Error(ErrorKind::kUnsupported,
              fmt::format("--on: {} ranks need {} {}, found {}; --one-gpu needs one, --on cpu none",
                          setup.ranks, wanted, wanted == 1 ? "GPU" : "GPUs", found));
}

// The part of a body's life that may throw.
void run_body(Run& run, int rank) {
  const RankSetup& setup = run.setup;
  AllReduceWorkspaceOptions options = setup.workspace;
  options.device = device_of(setup, rank);
  if (setup.place == RankPlace::kVirtual) {
    require_gpus(setup);
    LocalRanks ranks(open_machine(options.device),
                     AllReduceWorkspace::create_local(setup.ranks, options), nullptr);
    return run.body(ranks);
  }
  const std::shared_ptr<Bootstrap> group = run.rendezvous.bootstrap(rank, kBootstrapDeadline);
  std::optional<Error> error;
  std::unique_ptr<Machine> machine;
  try {
    if (setup.uses_gpus()) require_gpus(setup);
    machine = open_machine(options.device);
  } catch (const Error& failure) {
    error = failure;
  }
  group->agree("devices", error ? &*error : nullptr);
  std::vector<AllReduceWorkspace> workspaces;
  if (setup.place == RankPlace::kThreads) {
    workspaces.push_back(std::move(run.local[static_cast<size_t>(rank)]));
  } else {
    workspaces.push_back(AllReduceWorkspace::create(group, options));
  }
  LocalRanks ranks(std::move(machine), std::move(workspaces), group);
  run.body(ranks);
  ranks.destroy();
}

void report_failure(RankEnd& end, ErrorKind kind, std::string_view message) {
  end.has_failed = true;
  end.kind = kind;
  message = message.substr(0, sizeof(end.message) - 1);
  std::copy(message.begin(), message.end(), end.message);
}

void run_rank(Run& run, int rank) {
  RankEnd& end = run.end(rank);
  try {
    run_body(run, rank);
  } catch (const Error& error) {
    report_failure(end, error.kind(), error.what());
  } catch (const std::exception& error) {
    report_failure(end, ErrorKind::kIo, error.what());
  }
  end.seconds = steady_seconds();
  end.is_reported = true;
}

[[noreturn]] void run_child(Run& run, int rank) {
  // A child does not outlive its parent.
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  std::signal(SIGINT, SIG_DFL);
  run_rank(run, rank);
  const RankEnd& end = run.end(rank);
  ::_exit(end.has_failed ? static_cast<int>(exit_code(end.kind)) : 0);
}

class Children {
 public:
  Children() = default;
  // Ends those that are left.
  ~Children() {
    for (size_t i = 0; i < processes_.size(); ++i) kill(i);
    while (is_any_left()) std::this_thread::sleep_for(kPoll);
  }
  Children(const Children&) = delete;
  Children& operator=(const Children&) = delete;

  void start(Run& run, int rank) {
    const pid_t process = ::fork();
    if (process == 0) run_child(run, rank);
    if (process < 0) {
      throw Error(ErrorKind::kIo,
                  fmt::format("rank {} cannot be started: {}", rank, std::strerror(errno)));
    }
    processes_.push_back(process);
    signals_.push_back(0);
  }

  // Collects those that have ended; whether one of them has failed.
  bool collect() {
    bool has_failed = false;
    for (size_t i = 0; i < processes_.size(); ++i) {
      int status = 0;
      if (processes_[i] == 0 || ::waitpid(processes_[i], &status, WNOHANG) == 0) continue;
      processes_[i] = 0;
      if (WIFSIGNALED(status)) signals_[i] = WTERMSIG(status);
      has_failed |= status != 0;
    }
    return has_failed;
  }
  bool is_any_left() {
    collect();
    return std::any_of(processes_.begin(), processes_.end(), [](pid_t one) { return one != 0; });
  }
  void kill(size_t i) {
    if (processes_[i] != 0) ::kill(processes_[i], SIGKILL);
  }
  void kill_all() {
    for (size_t i = 0; i < processes_.size(); ++i) kill(i);
  }
  [[nodiscard]] int signal(size_t i) const { return signals_[i]; }

 private:
  std::vector<pid_t> processes_;  // 0: has ended.
  std::vector<int> signals_;
};

void run_processes(Run& run) {
  const RankSetup& setup = run.setup;
  Children children;
  for (int rank = 0; rank < setup.ranks; ++rank) children.start(run, rank);
  auto end = Clock::now() + setup.time_limit;
  const auto after_failure = kGrace + setup.workspace.deadline;
  bool was_killed = false;
  while (true) {
    const bool has_failed = children.collect();
    if (!children.is_any_left()) break;
    if (has_failed) end = std::min(end, Clock::now() + after_failure);
    if (Clock::now() > end && !was_killed) {
      children.kill_all();
      was_killed = true;
    }
    std::this_thread::sleep_for(kPoll);
  }
  for (int rank = 0; rank < setup.ranks; ++rank) {
    run.end(rank).signal = children.signal(static_cast<size_t>(rank));
  }
}

void run_threads(Run& run) {
  run.local = AllReduceWorkspace::create_local(run.setup.ranks, run.setup.workspace);
  std::vector<std::jthread> threads;
  for (int rank = 1; rank < run.setup.ranks; ++rank) {
    threads.emplace_back([&run, rank] { run_rank(run, rank); });
  }
  run_rank(run, 0);
}

}  // namespace

AllReduceAlgorithm LocalRanks::call(const AllReduceProblem& problem,
                                    std::span<const AllReduceArgs> args, Stream stream) {
  if (is_virtual()) return allreduce_virtual_ranks(workspaces_, problem, args, stream);
  return allreduce(workspaces_.front(), problem, args.front(), stream);
}

void LocalRanks::wait_and_check() {
  machine_->wait();
  for (const AllReduceWorkspace& workspace : workspaces_) workspace.check_error();
}

void LocalRanks::barrier() const {
  if (group_ != nullptr) group_->barrier();
}

void LocalRanks::broadcast(std::span<std::byte> data) const {
  if (group_ != nullptr) group_->broadcast(data, 0);
}

void LocalRanks::together(const std::string& step, const std::function<void()>& body) const {
  if (group_ == nullptr) return body();
  std::optional<Error> error;
  try {
    body();
  } catch (const Error& failure) {
    error = failure;
  }
  group_->agree(step, error ? &*error : nullptr);
}

void LocalRanks::destroy() {
  for (AllReduceWorkspace& workspace : workspaces_) workspace.destroy();
}

SharedBytes::SharedBytes(uint64_t size_bytes) {
  const size_t size = std::max<size_t>(size_bytes, 1);
  void* const memory = ::mmap(nullptr, size, PROT_READ | PROT_WRITE,
                              MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    throw Error(ErrorKind::kIo, fmt::format("no room for {} bytes that the ranks share: {}", size,
                                            std::strerror(errno)));
  }
  bytes_ = {static_cast<std::byte*>(memory), size};
}

SharedBytes::~SharedBytes() { ::munmap(bytes_.data(), bytes_.size()); }

double steady_seconds() {
  return std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
}

void turn_multicast_off() {
  constexpr std::array<std::pair<const char*, const char*>, 3> kVariables{
      {{"NCCL_NVLS_ENABLE", "0"},
       {"TORCH_SYMM_MEM_DISABLE_MULTICAST", "1"},
       {"NVSHMEM_DISABLE_NVLS", "1"}}};
  for (const auto& [variable, wanted] : kVariables) {
    ::setenv(variable, wanted, /*overwrite=*/0);
    const std::string value = std::getenv(variable);
    if (value == wanted) continue;
    throw Error(ErrorKind::kInvalidArgument,
                fmt::format("{} is {}, expected {} or nothing: NVLink multicast must stay off",
                            variable, value, wanted));
  }
}

std::vector<RankEnd> run_ranks(const RankSetup& setup, const RankBody& body) {
  if (setup.uses_gpus() && !build_info().cuda_enabled) static_cast<void>(open_gpu(0));  // Throws.
  Run run(setup, body);
  switch (setup.place) {
    case RankPlace::kThreads:
      run_threads(run);
      break;
    case RankPlace::kVirtual:
      run_rank(run, 0);
      break;
    case RankPlace::kProcesses:
    case RankPlace::kGpus:
      run_processes(run);
      break;
  }
  const std::span<RankEnd> ends = run.ends.first(static_cast<size_t>(setup.bodies()));
  return {ends.begin(), ends.end()};
}

std::optional<Error> first_failure(const RankSetup& setup, std::span<const RankEnd> ends) {
  const RankEnd* first = nullptr;
  for (const RankEnd& end : ends) {
    if (end.is_reported && !end.has_failed) continue;
    // Who has died is the reason for what the others report.
    const bool is_earlier = first == nullptr || !end.is_reported ||
                            (first->is_reported && end.seconds < first->seconds);
    if (is_earlier) first = &end;
  }
  if (first == nullptr) return {};
  if (first->is_reported && setup.bodies() == 1) return Error(first->kind, first->message);
  const auto rank = first - ends.data();
  if (first->is_reported) {
    return Error(first->kind, fmt::format("rank {}: {}", rank, first->message));
  }
  return Error(ErrorKind::kDevice,
               first->signal != 0
                   ? fmt::format("rank {} was killed by signal {}", rank, first->signal)
                   : fmt::format("rank {} has ended without a report", rank));
}

}  // namespace narrowfloat::cli
