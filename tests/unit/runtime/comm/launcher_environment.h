// The environment variables of a launcher, and none of another one's, while a test runs.
#pragma once

#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

namespace narrowfloat::testing {

class LauncherEnvironment {
 public:
  using Variables = std::vector<std::pair<std::string, std::string>>;

  static Variables with(Variables variables, const Variables& more) {
    variables.insert(variables.end(), more.begin(), more.end());
    return variables;
  }

  explicit LauncherEnvironment(const Variables& variables) {
    for (const char* name : kNames) {
      const char* const value = std::getenv(name);
      if (value != nullptr) saved_.emplace_back(name, value);
    }
    clear();
    set(variables);
  }
  ~LauncherEnvironment() {
    clear();
    set(saved_);
  }
  LauncherEnvironment(const LauncherEnvironment&) = delete;
  LauncherEnvironment& operator=(const LauncherEnvironment&) = delete;

 private:
  static constexpr const char* kNames[] = {"RANK",
                                           "WORLD_SIZE",
                                           "LOCAL_RANK",
                                           "LOCAL_WORLD_SIZE",
                                           "MASTER_ADDR",
                                           "MASTER_PORT",
                                           "TORCHELASTIC_RUN_ID",
                                           "TORCHELASTIC_RESTART_COUNT",
                                           "OMPI_COMM_WORLD_RANK",
                                           "OMPI_COMM_WORLD_SIZE",
                                           "OMPI_COMM_WORLD_LOCAL_RANK",
                                           "OMPI_COMM_WORLD_LOCAL_SIZE",
                                           "OMPI_MCA_ess_base_jobid",
                                           "PMIX_NAMESPACE",
                                           "PMI_RANK",
                                           "PMI_SIZE",
                                           "PMI_JOBID",
                                           "MPI_LOCALRANKID",
                                           "MPI_LOCALNRANKS",
                                           "SLURM_PROCID",
                                           "SLURM_NTASKS",
                                           "SLURM_LOCALID",
                                           "SLURM_JOB_ID",
                                           "SLURM_STEP_ID",
                                           "SLURM_STEP_NODELIST",
                                           "SLURM_JOB_NODELIST",
                                           "NARROWFLOAT_ADDRESS",
                                           "NARROWFLOAT_RENDEZVOUS",
                                           "TMPDIR"};

  static void clear() {
    for (const char* name : kNames) unsetenv(name);
  }
  static void set(const Variables& variables) {
    for (const auto& [name, value] : variables) setenv(name.c_str(), value.c_str(), 1);
  }

  Variables saved_;
};

}  // namespace narrowfloat::testing
