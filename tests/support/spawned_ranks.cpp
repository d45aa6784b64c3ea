// See spawned_ranks.h.
#include "support/spawned_ranks.h"

#include <chrono>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <spawn.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

#include "support/temp_dir.h"

namespace narrowfloat::testing {
namespace {

using Clock = std::chrono::steady_clock;

// The process, or the negative code of an error.
pid_t spawn(std::vector<std::string> command) {
  std::vector<char*> pointers;
  pointers.reserve(command.size() + 1);
  for (std::string& word : command) pointers.push_back(word.data());
  pointers.push_back(nullptr);
  pid_t process = 0;
  const int code =
      ::posix_spawn(&process, pointers.front(), nullptr, nullptr, pointers.data(), ::environ);
  return code == 0 ? process : -code;
}

// "" for a process that has ended with status 0.
std::string wait_for(pid_t process, Clock::time_point end) {
  if (process < 0) return std::string("cannot be started: ") + strerror(-process);
  int status = 0;
  while (::waitpid(process, &status, WNOHANG) == 0) {
    if (Clock::now() > end) {
      ::kill(process, SIGKILL);
      ::waitpid(process, &status, 0);
      return "has not ended in time";
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  if (WIFSIGNALED(status)) return std::string("ended by signal: ") + strsignal(WTERMSIG(status));
  return WEXITSTATUS(status) == 0 ? "" : "exit status " + std::to_string(WEXITSTATUS(status));
}

}  // namespace

std::vector<std::string> run_spawned_ranks(
    const std::string& executable, int ranks,
    const std::function<std::vector<std::string>(int rank, const std::string& directory)>&
        arguments_of,
    int seconds) {
  const TempDir directory;
  std::vector<pid_t> processes;
  for (int rank = 0; rank < ranks; ++rank) {
    std::vector<std::string> command = arguments_of(rank, directory.path());
    command.insert(command.begin(), executable);
    processes.push_back(spawn(std::move(command)));
  }
  std::vector<std::string> results;
  const auto end = Clock::now() + std::chrono::seconds(seconds);
  for (int rank = 0; rank < ranks; ++rank) {
    std::string result = wait_for(processes[static_cast<size_t>(rank)], end);
    if (result.empty()) {
      std::ifstream file(directory / ("result." + std::to_string(rank)));
      result = {std::istreambuf_iterator<char>(file), {}};
    }
    results.push_back(result);
  }
  return results;
}

std::string sibling_executable(const std::string& name) {
  return (std::filesystem::read_symlink("/proc/self/exe").parent_path() / name).string();
}

}  // namespace narrowfloat::testing
