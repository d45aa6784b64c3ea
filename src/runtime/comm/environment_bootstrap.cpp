// The bootstrap that the environment asks for, or that suits the launcher (docs/allreduce.md).
#include <filesystem>

#include "base/throw_error.h"
#include "runtime/comm/file_bootstrap.h"
#include "runtime/comm/rank_discovery.h"

namespace narrowfloat {
namespace {

constexpr const char* kAddress = "NARROWFLOAT_ADDRESS";
constexpr const char* kRendezvous = "NARROWFLOAT_RENDEZVOUS";

// An empty variable counts as one that is not set.
std::string own_setting(const char* name) {
  const char* const value = environment_variable(name);
  return value == nullptr ? std::string() : std::string(value);
}

// srun with PMI sets MPICH's variables as well, but not the local rank, which Hydra's mpirun sets.
// In an allocation that starts its ranks by a step of its own, whose tasks are not the ranks.
bool is_step_of_slurm(const RankInfo& info) {
  if (info.launcher == "Slurm") return true;
  return info.launcher == "MPICH" && environment_variable("MPI_LOCALRANKID") == nullptr &&
         discover_slurm_rank().has_value();
}

std::unique_ptr<Bootstrap> make_slurm_bootstrap(const RankInfo& info,
                                                Bootstrap::Milliseconds deadline) {
  for (const char* variable : {"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"}) {
    const char* const list = environment_variable(variable);
    if (list != nullptr && !info.job_id.empty()) {
      return make_tcp_bootstrap(first_host(variable, list), port_of_job(info.job_id), info,
                                deadline);
    }
  }
  throw_invalid(
      "bootstrap: Slurm has set no SLURM_JOB_ID, or neither SLURM_STEP_NODELIST nor "
      "SLURM_JOB_NODELIST; set {}=host:port or {}=directory",
      kAddress, kRendezvous);
}

std::unique_ptr<Bootstrap> make_one_host_bootstrap(RankInfo info,
                                                   Bootstrap::Milliseconds deadline) {
  const std::optional<int> here = ranks_on_this_host(info);
  if (here != info.size) {
    throw_invalid(
        "bootstrap: {} has started {} ranks and says that {} of them are on this host; where they "
        "are not all on one, set {}=host:port of rank 0 (not MASTER_PORT, which torchrun uses), or "
        "{}=directory that all hosts see, or pass a function that gathers",
        info.launcher, info.size,
        here ? fmt::format("{}", *here) : std::string("an unknown number"), kAddress, kRendezvous);
  }
  if (info.launcher == "MPICH") {
    // Two of its jobs in one step of Slurm have that step's id.
    const std::string own_id = hydra_job_id();
    if (!own_id.empty()) info.job_id = own_id;
  }
  if (info.job_id.empty()) {
    throw_invalid(
        "bootstrap: {} has set no id of the job; set {}=directory of this job alone, or "
        "{}=host:port",
        info.launcher, kRendezvous, kAddress);
  }
  std::error_code error;
  const std::string parent = std::filesystem::temp_directory_path(error).string();
  if (error) {
    throw_error(ErrorKind::kIo, "bootstrap: no temporary directory: {}; set TMPDIR or {}=directory",
                error.message(), kRendezvous);
  }
  return make_job_file_bootstrap(parent, info, deadline);
}

}  // namespace

std::unique_ptr<Bootstrap> make_environment_bootstrap(Bootstrap::Milliseconds deadline) {
  const std::optional<RankInfo> info = discover_rank();
  if (!info) {
    throw_invalid(
        "bootstrap: no launcher has started this process; use torchrun, mpirun or srun, or set "
        "RANK, WORLD_SIZE and LOCAL_RANK, and {}=host:port or {}=directory",
        kAddress, kRendezvous);
  }
  // A single rank exchanges nothing.
  if (info->size == 1) return make_callback_bootstrap(*info, [](auto, auto) {});
  const std::string address = own_setting(kAddress);
  if (!address.empty()) {
    const HostAndPort parsed = parse_address(kAddress, address);
    return make_tcp_bootstrap(parsed.host, parsed.port, *info, deadline);
  }
  const std::string directory = own_setting(kRendezvous);
  if (!directory.empty()) return make_file_bootstrap(directory, *info, deadline);
  if (is_step_of_slurm(*info)) return make_slurm_bootstrap(*info, deadline);
  return make_one_host_bootstrap(*info, deadline);
}

}  // namespace narrowfloat
