// The bootstrap that follows from the environment, in processes with the variables of launchers.
#include <algorithm>
#include <array>
#include <filesystem>
#include <sys/prctl.h>
#include <unistd.h>

#include <gtest/gtest.h>

#include "narrowfloat/bootstrap.h"
#include "narrowfloat/error.h"
#include "narrowfloat/runtime.h"
#include "support/expect_error.h"
#include "support/temp_dir.h"
#include "unit/runtime/comm/launcher_environment.h"
#include "unit/runtime/comm/rank_processes.h"

namespace narrowfloat::testing {
namespace {

using std::chrono::milliseconds;
using Variables = LauncherEnvironment::Variables;

Variables torchrun(int rank, int size, int local_size) {
  return {{"RANK", std::to_string(rank)},       {"WORLD_SIZE", std::to_string(size)},
          {"LOCAL_RANK", std::to_string(rank)}, {"LOCAL_WORLD_SIZE", std::to_string(local_size)},
          {"MASTER_ADDR", "127.0.0.1"},         {"MASTER_PORT", "1"}};
}

Variables slurm(int rank, int size) {
  return {{"SLURM_PROCID", std::to_string(rank)},
          {"SLURM_NTASKS", std::to_string(size)},
          {"SLURM_LOCALID", std::to_string(rank)},
          {"SLURM_JOB_ID", std::to_string(::getppid())},
          {"SLURM_STEP_ID", "0"},
          {"SLURM_STEP_NODELIST", "localhost,node[1-2]"}};
}

// Three processes meet, each in the environment that `variables` makes for its rank.
void expect_meeting(const std::function<Variables(int)>& variables) {
  const std::vector<std::string> results = run_processes(3, [&](int rank) {
    const LauncherEnvironment environment(variables(rank));
    std::string all;
    for (const std::string& text :
         make_environment_bootstrap(kLongDeadline)->gather_texts(std::to_string(rank))) {
      all += text;
    }
    return all;
  });
  for (const std::string& result : results) EXPECT_EQ(result, "012");
}

TEST(EnvironmentBootstrap, MeetsOverFilesOfTheJobOnOneHost) {
  const TempDir dir;
  const Variables temp = {{"TMPDIR", dir.path()}};
  expect_meeting([&](int rank) { return LauncherEnvironment::with(torchrun(rank, 3, 3), temp); });
  expect_meeting([&](int rank) {
    return LauncherEnvironment::with({{"OMPI_COMM_WORLD_RANK", std::to_string(rank)},
                                      {"OMPI_COMM_WORLD_SIZE", "3"},
                                      {"OMPI_COMM_WORLD_LOCAL_RANK", std::to_string(rank)},
                                      {"OMPI_COMM_WORLD_LOCAL_SIZE", "3"},
                                      {"PMIX_NAMESPACE", "job"}},
                                     temp);
  });
  EXPECT_TRUE(std::filesystem::is_empty(dir.path()));
}

// MPICH's mpirun names no job; the process that it starts on a host to be above the ranks tells
// jobs apart.
TEST(EnvironmentBootstrap, MeetsBelowTheProxyOfHydra) {
  const TempDir dir;
  std::array<char, 16> name{};
  ASSERT_EQ(prctl(PR_GET_NAME, name.data()), 0);
  ASSERT_EQ(prctl(PR_SET_NAME, "hydra_pmi_proxy"), 0);
  expect_meeting([&](int rank) {
    return Variables{{"PMI_RANK", std::to_string(rank)},
                     {"PMI_SIZE", "3"},
                     {"MPI_LOCALRANKID", std::to_string(rank)},
                     {"MPI_LOCALNRANKS", "3"},
                     {"TMPDIR", dir.path()}};
  });
  // In an allocation of Slurm, where mpirun's own step has as many tasks as there are ranks.
  expect_meeting([&](int rank) {
    return LauncherEnvironment::with({{"PMI_RANK", std::to_string(rank)},
                                      {"PMI_SIZE", "3"},
                                      {"MPI_LOCALRANKID", std::to_string(rank)},
                                      {"MPI_LOCALNRANKS", "3"},
                                      {"TMPDIR", dir.path()}},
                                     slurm(0, 3));
  });
  EXPECT_EQ(prctl(PR_SET_NAME, name.data()), 0);
  EXPECT_TRUE(std::filesystem::is_empty(dir.path()));
}

TEST(EnvironmentBootstrap, MeetsInSlurmOverTcp) {
  expect_meeting([](int rank) { return slurm(rank, 3); });
  // srun with PMI.
  expect_meeting([](int rank) {
    return LauncherEnvironment::with(slurm(rank, 3),
                                     {{"PMI_RANK", std::to_string(rank)}, {"PMI_SIZE", "3"}});
  });
}

TEST(EnvironmentBootstrap, MeetsWhereItsOwnVariablesSay) {
  const TempDir dir;
  const std::string address = "localhost:" + std::to_string(free_port());
  expect_meeting([&](int rank) {
    return LauncherEnvironment::with(torchrun(rank, 3, 1), {{"NARROWFLOAT_ADDRESS", address}});
  });
  expect_meeting([&](int rank) {
    return LauncherEnvironment::with(
        slurm(rank, 3), {{"NARROWFLOAT_ADDRESS", ""}, {"NARROWFLOAT_RENDEZVOUS", dir.path()}});
  });
  EXPECT_TRUE(std::filesystem::is_empty(dir.path()));
}

TEST(EnvironmentBootstrap, NeedsNothingForOneRank) {
  const LauncherEnvironment environment(
      {{"PMI_RANK", "0"}, {"PMI_SIZE", "1"}, {"MPI_LOCALRANKID", "0"}});
  const auto bootstrap = make_environment_bootstrap();
  bootstrap->barrier();
  EXPECT_EQ(bootstrap->info().launcher, "MPICH");
}

TEST(EnvironmentBootstrap, SaysWhichVariablesWouldHelp) {
  const auto make = [] { static_cast<void>(make_environment_bootstrap(milliseconds(50))); };
  const std::vector<std::pair<Variables, std::vector<std::string>>> cases = {
      {{}, {"no launcher", "RANK, WORLD_SIZE and LOCAL_RANK", "NARROWFLOAT_RENDEZVOUS=directory"}},
      {torchrun(0, 4, 2),
       {"torchrun", "4 ranks", "2 of them are on this host", "NARROWFLOAT_ADDRESS=host:port"}},
      {{{"PMI_RANK", "0"}, {"PMI_SIZE", "2"}, {"MPI_LOCALRANKID", "0"}},
       {"MPICH", "an unknown number", "NARROWFLOAT_RENDEZVOUS"}},
      {{{"PMI_RANK", "0"}, {"PMI_SIZE", "2"}, {"MPI_LOCALRANKID", "0"}, {"MPI_LOCALNRANKS", "2"}},
       {"MPICH has set no id of the job", "NARROWFLOAT_RENDEZVOUS"}},
      {{{"SLURM_PROCID", "0"},
        {"SLURM_NTASKS", "2"},
        {"SLURM_LOCALID", "0"},
        {"SLURM_STEP_ID", "0"}},
       {"SLURM_JOB_ID", "NARROWFLOAT_ADDRESS"}},
      {LauncherEnvironment::with(torchrun(0, 2, 2), {{"NARROWFLOAT_ADDRESS", "host"}}),
       {"NARROWFLOAT_ADDRESS: expected host:port", "\"host\""}},
  };
  for (const auto& [variables, fragments] : cases) {
    const LauncherEnvironment environment(variables);
    expect_error(kInvalid, fragments, make);
  }
}

TEST(EnvironmentBootstrap, ReadsVariablesThatTheSettingsList) {
  const LauncherEnvironment environment(
      {{"NARROWFLOAT_ADDRESS", "a:1"}, {"NARROWFLOAT_RENDEZVOUS", "b"}});
  const std::vector<std::string> settings = environment_settings();
  for (const char* setting : {"NARROWFLOAT_ADDRESS=a:1", "NARROWFLOAT_RENDEZVOUS=b"}) {
    EXPECT_EQ(std::count(settings.begin(), settings.end(), setting), 1) << setting;
  }
}

}  // namespace
}  // namespace narrowfloat::testing
