// The variables of launchers (docs/allreduce.md), a row each of rank and size, and one of local
// rank and ranks of the host:
//
//   torchrun   RANK, WORLD_SIZE
//              LOCAL_RANK, LOCAL_WORLD_SIZE
//   Open MPI   OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE
//              OMPI_COMM_WORLD_LOCAL_RANK, OMPI_COMM_WORLD_LOCAL_SIZE
//   MPICH      PMI_RANK, PMI_SIZE
//              MPI_LOCALRANKID, MPI_LOCALNRANKS
//   Slurm      SLURM_PROCID, SLURM_NTASKS
//              SLURM_LOCALID
//
// A batch script of Slurm sees SLURM_PROCID=0 and the number of tasks, but is none of them: only
// the tasks of srun have SLURM_STEP_ID. srun with PMI sets MPICH's variables as well.
#include "runtime/comm/rank_discovery.h"

#include <array>
#include <charconv>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <limits>
#include <sstream>
#include <string_view>
#include <unistd.h>
#include <vector>

#include "base/throw_error.h"
#include "runtime/comm/job_names.h"

namespace narrowfloat {
namespace {

constexpr int kMaxRanks = 1 << 20;

struct LauncherVariables {
  const char* launcher;
  const char* rank;
  const char* size;
  const char* local_rank;
  const char* local_size;  // Null where the launcher has none.
};
constexpr LauncherVariables kTorchrun{"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK",
                                      "LOCAL_WORLD_SIZE"};
constexpr LauncherVariables kOpenMpi{"Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
                                     "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"};
constexpr LauncherVariables kMpich{"MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID",
                                   "MPI_LOCALNRANKS"};
constexpr LauncherVariables kSlurm{"Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID",
                                   nullptr};

bool is_set(const char* name) { return environment_variable(name) != nullptr; }

std::string text_of(const char* name) {
  const char* const value = environment_variable(name);
  return value == nullptr ? std::string() : std::string(value);
}

RankInfo read_launcher(const LauncherVariables& names, const char* local_rank_name) {
  RankInfo info;
  info.launcher = names.launcher;
  info.size = environment_number(names.size, 1, kMaxRanks);
  info.rank = environment_number(names.rank, 0, info.size - 1);
  info.local_rank = environment_number(local_rank_name, 0, info.size - 1);
  return info;
}

// "none" is the id of all jobs that were started without one; their master's port tells them apart.
std::string torchrun_job_id() {
  const std::string run_id = text_of("TORCHELASTIC_RUN_ID");
  const std::string master =
      is_set("MASTER_PORT") ? text_of("MASTER_ADDR") + ":" + text_of("MASTER_PORT") : std::string();
  const std::string restart = text_of("TORCHELASTIC_RESTART_COUNT");
  std::string id = run_id;
  if ((run_id.empty() || run_id == "none") && !master.empty()) id += "@" + master;
  if (!id.empty() && !restart.empty()) id += "." + restart;
  return id;
}

std::string open_mpi_job_id() {
  const std::string name = text_of("PMIX_NAMESPACE");
  return name.empty() ? text_of("OMPI_MCA_ess_base_jobid") : name;
}

std::string slurm_job_id() {
  const std::string job = text_of("SLURM_JOB_ID");
  return job.empty() ? job : job + "." + text_of("SLURM_STEP_ID");
}

RankInfo read_mpich() {
  const std::optional<RankInfo> slurm = discover_slurm_rank();
  const bool has_local_rank = is_set(kMpich.local_rank) || !slurm;
  RankInfo info = read_launcher(kMpich, has_local_rank ? kMpich.local_rank : kSlurm.local_rank);
  info.job_id = text_of("PMI_JOBID");
  if (info.job_id.empty() && slurm) info.job_id = slurm->job_id;
  return info;
}

}  // namespace

const char* environment_variable(const char* name) { return std::getenv(name); }

std::optional<int> optional_environment_number(const char* name, int low, int high) {
  const char* const value = environment_variable(name);
  if (value == nullptr) return std::nullopt;
  const std::string_view text = value;
  int number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size() || number < low || number > high) {
    throw_invalid(
        "{}: expected a number from {} to {}, got \"{}\"; the launcher sets it, or unset the "
        "variables of that launcher",
        name, low, high, text);
  }
  return number;
}

int environment_number(const char* name, int low, int high) {
  const std::optional<int> number = optional_environment_number(name, low, high);
  if (number) return *number;
  throw_invalid(
      "{}: expected a number from {} to {}, but it is not set; the launcher sets it, or unset the "
      "variables of that launcher",
      name, low, high);
}

std::optional<RankInfo> discover_slurm_rank() {
  if (!is_set(kSlurm.rank) || !is_set("SLURM_STEP_ID")) return std::nullopt;
  RankInfo info = read_launcher(kSlurm, kSlurm.local_rank);
  info.job_id = slurm_job_id();
  return info;
}

std::optional<RankInfo> discover_rank() {
  // Scripts set one of these two for other purposes.
  if (is_set(kTorchrun.rank) && is_set(kTorchrun.size)) {
    RankInfo info = read_launcher(kTorchrun, kTorchrun.local_rank);
    info.job_id = torchrun_job_id();
    return info;
  }
  if (is_set(kOpenMpi.rank)) {
    RankInfo info = read_launcher(kOpenMpi, kOpenMpi.local_rank);
    info.job_id = open_mpi_job_id();
    return info;
  }
  if (is_set(kMpich.rank)) return read_mpich();
  return discover_slurm_rank();
}

std::string hydra_job_id() {
  pid_t pid = getppid();
  while (pid > 1) {
    // "4710 (name) S 1 ...", where the name may hold spaces and parentheses.
    std::ifstream file(fmt::format("/proc/{}/stat", pid));
    std::string line;
    std::getline(file, line);
    const size_t open = line.find('(');
    const size_t close = line.rfind(')');
    if (open == std::string::npos || close == std::string::npos) return {};
    std::istringstream rest(line.substr(close + 1));
    const std::vector<std::string> fields{std::istream_iterator<std::string>(rest), {}};
    constexpr size_t kParent = 1;
    constexpr size_t kStart = 19;
    if (fields.size() <= kStart) return {};
    if (line.substr(open + 1, close - open - 1) == "hydra_pmi_proxy") {
      return fmt::format("hydra {}.{}", pid, fields[kStart]);
    }
    pid = std::stoi(fields[kParent]);
  }
  return {};
}

std::optional<int> ranks_on_this_host(const RankInfo& info) {
  for (const LauncherVariables& names : {kTorchrun, kOpenMpi, kMpich}) {
    if (info.launcher == names.launcher) {
      return optional_environment_number(names.local_size, 1, info.size);
    }
  }
  return std::nullopt;
}

std::string first_host(const std::string& variable, const std::string& list) {
  std::string host;
  size_t at = 0;
  while (at < list.size() && list[at] != ',') {
    if (list[at] != '[') {
      host += list[at++];
      continue;
    }
    const size_t close = list.find(']', at);
    const size_t first_end = list.find_first_of(",-]", at);
    if (close == std::string::npos || first_end == at + 1) {
      throw_invalid("{}: expected hosts like node[003-007,9],other, got \"{}\"", variable, list);
    }
    host += list.substr(at + 1, first_end - at - 1);
    at = close + 1;
  }
  if (host.empty() || host.find(']') != std::string::npos) {
    throw_invalid("{}: expected hosts like node[003-007,9],other, got \"{}\"", variable, list);
  }
  return host;
}

HostAndPort parse_address(const std::string& variable, const std::string& text) {
  const size_t colon = text.rfind(':');
  std::string host = text.substr(0, colon);
  const bool is_bracketed = host.size() > 2 && host.front() == '[' && host.back() == ']';
  if (is_bracketed) host = host.substr(1, host.size() - 2);
  int port = 0;
  bool is_valid = colon != std::string::npos && !host.empty() &&
                  (is_bracketed || host.find_first_of(":[]") == std::string::npos);
  if (is_valid) {
    const char* const end = text.data() + text.size();
    const auto parsed = std::from_chars(text.data() + colon + 1, end, port);
    is_valid = parsed.ec == std::errc() && parsed.ptr == end && port >= 1 && port <= 65535;
  }
  if (!is_valid) {
    throw_invalid(
        "{}: expected host:port with a port from 1 to 65535, or [IPv6 address]:port, got \"{}\"",
        variable, text);
  }
  return {host, port};
}

int port_of_job(const std::string& job_id) {
  return 20000 + static_cast<int>(hash_text(job_id) % 10000);
}

}  // namespace narrowfloat
