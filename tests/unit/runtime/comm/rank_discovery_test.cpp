// The variables of launchers, as tables of environments.
#include "runtime/comm/rank_discovery.h"

#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "narrowfloat/error.h"
#include "runtime/comm/job_names.h"
#include "runtime/comm/rank_groups.h"
#include "support/expect_error.h"
#include "unit/runtime/comm/launcher_environment.h"

namespace narrowfloat::testing {
namespace {

using Variables = LauncherEnvironment::Variables;

struct Case {
  Variables variables;
  std::string launcher;
  int rank;
  int size;
  int local_rank;
  std::string job_id;
};

const Variables kTorchrun = {{"RANK", "5"}, {"WORLD_SIZE", "8"}, {"LOCAL_RANK", "1"}};
const Variables kOpenMpi = {{"OMPI_COMM_WORLD_RANK", "3"},
                            {"OMPI_COMM_WORLD_SIZE", "4"},
                            {"OMPI_COMM_WORLD_LOCAL_RANK", "2"}};
const Variables kMpich = {{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"MPI_LOCALRANKID", "0"}};
const Variables kSlurm = {{"SLURM_PROCID", "6"},
                          {"SLURM_NTASKS", "16"},
                          {"SLURM_LOCALID", "2"},
                          {"SLURM_JOB_ID", "77"},
                          {"SLURM_STEP_ID", "3"}};

TEST(DiscoverRank, ReadsEveryLauncher) {
  const Variables elastic = {{"TORCHELASTIC_RUN_ID", "run"}, {"TORCHELASTIC_RESTART_COUNT", "2"}};
  const Variables no_id = {{"TORCHELASTIC_RUN_ID", "none"},
                           {"TORCHELASTIC_RESTART_COUNT", "0"},
                           {"MASTER_ADDR", "node1"},
                           {"MASTER_PORT", "29500"}};
  const Variables pmi_of_slurm = {{"PMI_RANK", "6"}, {"PMI_SIZE", "16"}};
  const std::vector<Case> cases = {
      {kTorchrun, "torchrun", 5, 8, 1, ""},
      {LauncherEnvironment::with(kTorchrun, elastic), "torchrun", 5, 8, 1, "run.2"},
      {LauncherEnvironment::with(kTorchrun, no_id), "torchrun", 5, 8, 1, "none@node1:29500.0"},
      {LauncherEnvironment::with(kTorchrun, {{"MASTER_ADDR", "n"}, {"MASTER_PORT", "1"}}),
       "torchrun", 5, 8, 1, "@n:1"},
      {kOpenMpi, "Open MPI", 3, 4, 2, ""},
      {LauncherEnvironment::with(kOpenMpi, {{"OMPI_MCA_ess_base_jobid", "99"}}), "Open MPI", 3, 4,
       2, "99"},
      {LauncherEnvironment::with(
           kOpenMpi, {{"OMPI_MCA_ess_base_jobid", "99"}, {"PMIX_NAMESPACE", "prterun-a-7@1"}}),
       "Open MPI", 3, 4, 2, "prterun-a-7@1"},
      {kMpich, "MPICH", 1, 2, 0, ""},
      {LauncherEnvironment::with(kMpich, {{"PMI_JOBID", "12"}}), "MPICH", 1, 2, 0, "12"},
      {LauncherEnvironment::with(kSlurm, pmi_of_slurm), "MPICH", 6, 16, 2, "77.3"},
      {kSlurm, "Slurm", 6, 16, 2, "77.3"},
      // The first in this order counts.
      {LauncherEnvironment::with(
           LauncherEnvironment::with(LauncherEnvironment::with(kTorchrun, kOpenMpi), kMpich),
           kSlurm),
       "torchrun", 5, 8, 1, ""},
      {LauncherEnvironment::with(LauncherEnvironment::with(kOpenMpi, kMpich), kSlurm), "Open MPI",
       3, 4, 2, ""},
      // The size alone is no sign of torchrun.
      {LauncherEnvironment::with(kOpenMpi, {{"WORLD_SIZE", "4"}}), "Open MPI", 3, 4, 2, ""},
  };
  for (const Case& expected : cases) {
    const LauncherEnvironment environment(expected.variables);
    const std::optional<RankInfo> info = discover_rank();
    ASSERT_TRUE(info.has_value()) << expected.launcher;
    EXPECT_EQ(info->launcher, expected.launcher);
    EXPECT_EQ(info->rank, expected.rank);
    EXPECT_EQ(info->size, expected.size);
    EXPECT_EQ(info->local_rank, expected.local_rank);
    EXPECT_EQ(info->job_id, expected.job_id);
  }
}

TEST(DiscoverRank, IsEmptyWithoutALauncher) {
  // The last one is a batch script of Slurm, which is no task.
  for (const Variables& variables :
       {Variables{}, Variables{{"RANK", "0"}}, Variables{{"WORLD_SIZE", "4"}},
        Variables{{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "8"}, {"SLURM_JOB_ID", "1"}}}) {
    const LauncherEnvironment environment(variables);
    EXPECT_FALSE(discover_rank().has_value());
  }
}

TEST(DiscoverRank, NamesTheVariableThatIsWrong) {
  struct Wrong {
    Variables base;
    std::string variable;
    std::string value;
    std::string expected;
  };
  const std::vector<Wrong> cases = {
      {kTorchrun, "RANK", "x", "0 to 7"},
      {kTorchrun, "RANK", "", "0 to 7"},
      {kTorchrun, "RANK", "8", "0 to 7"},
      {kTorchrun, "RANK", "-1", "0 to 7"},
      {kTorchrun, "RANK", "1 ", "0 to 7"},
      {kTorchrun, "RANK", "99999999999", "0 to 7"},
      {kTorchrun, "WORLD_SIZE", "0", "1 to"},
      {kTorchrun, "WORLD_SIZE", "8.0", "1 to"},
      {kTorchrun, "LOCAL_RANK", "8", "0 to 7"},
      {kOpenMpi, "OMPI_COMM_WORLD_RANK", "four", "0 to 3"},
      {kOpenMpi, "OMPI_COMM_WORLD_SIZE", "", "1 to"},
      {kOpenMpi, "OMPI_COMM_WORLD_LOCAL_RANK", "4", "0 to 3"},
      {kMpich, "PMI_RANK", "2", "0 to 1"},
      {kMpich, "PMI_SIZE", "-2", "1 to"},
      {kMpich, "MPI_LOCALRANKID", "a", "0 to 1"},
      {kSlurm, "SLURM_PROCID", "16", "0 to 15"},
      {kSlurm, "SLURM_NTASKS", "16(x2)", "1 to"},
      {kSlurm, "SLURM_LOCALID", "0x1", "0 to 15"},
  };
  for (const Wrong& wrong : cases) {
    const LauncherEnvironment environment(
        LauncherEnvironment::with(wrong.base, {{wrong.variable, wrong.value}}));
    expect_error(kInvalid, {wrong.variable + ":", wrong.expected, "got \"" + wrong.value + "\""},
                 [] { static_cast<void>(discover_rank()); });
  }
  for (const auto& [base, missing] :
       std::vector<std::pair<Variables, std::string>>{{kTorchrun, "LOCAL_RANK"},
                                                      {kOpenMpi, "OMPI_COMM_WORLD_SIZE"},
                                                      {kOpenMpi, "OMPI_COMM_WORLD_LOCAL_RANK"},
                                                      {kMpich, "PMI_SIZE"},
                                                      {kMpich, "MPI_LOCALRANKID"},
                                                      {kSlurm, "SLURM_NTASKS"},
                                                      {kSlurm, "SLURM_LOCALID"}}) {
    const LauncherEnvironment environment(base);
    unsetenv(missing.c_str());
    expect_error(kInvalid, {missing + ":", "it is not set"},
                 [] { static_cast<void>(discover_rank()); });
  }
}

TEST(FirstHost, ExpandsNodeLists) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"node", "node"},
      {"node1,node2", "node1"},
      {"node[003-007,9],other", "node003"},
      {"node[9,003-007]", "node9"},
      {"node[12]", "node12"},
      {"a,node[1-2]", "a"},
      {"rack[1-2]node[05-06].example,x", "rack1node05.example"},
      {"gpu-a100-1.site,gpu-a100-2.site", "gpu-a100-1.site"},
  };
  for (const auto& [list, host] : cases) EXPECT_EQ(first_host("LIST", list), host) << list;
}

TEST(FirstHost, RefusesWhatIsNoList) {
  for (const std::string list : {"", ",node", "node[1-2", "node[]", "node[,1]", "node]"}) {
    expect_error(kInvalid, {"SLURM_JOB_NODELIST:", "\"" + list + "\""},
                 [&] { first_host("SLURM_JOB_NODELIST", list); });
  }
}

TEST(ParseAddress, TakesHostsAndPorts) {
  const HostAndPort name = parse_address("A", "node1.example:29400");
  EXPECT_EQ(name.host, "node1.example");
  EXPECT_EQ(name.port, 29400);
  const HostAndPort six = parse_address("A", "[fe80::1]:1");
  EXPECT_EQ(six.host, "fe80::1");
  EXPECT_EQ(six.port, 1);
}

TEST(ParseAddress, RefusesWhatIsNone) {
  for (const std::string text : {"", "node", "node:", ":1", "node:0", "node:65536", "node:1x",
                                 "node:-1", "fe80::1:80", "[fe80::1]", "[]:1"}) {
    expect_error(kInvalid, {"NARROWFLOAT_ADDRESS:", "host:port", "\"" + text + "\""},
                 [&] { parse_address("NARROWFLOAT_ADDRESS", text); });
  }
}

TEST(PortOfJob, IsTheSameForAJobAndInItsRange) {
  EXPECT_EQ(port_of_job("77.3"), port_of_job("77.3"));
  EXPECT_NE(port_of_job("77.3"), port_of_job("77.4"));
  for (int job = 0; job < 1000; ++job) {
    const int port = port_of_job(std::to_string(job) + ".0");
    EXPECT_GE(port, 20000);
    EXPECT_LE(port, 29999);
  }
}

TEST(HashText, IsFnv1a) {
  EXPECT_EQ(hash_text(""), 0xCBF29CE484222325ULL);
  EXPECT_EQ(hash_text("a"), 0xAF63DC4C8601EC8CULL);
  EXPECT_EQ(hash_text("foobar"), 0x85944171F73967E8ULL);
}

TEST(JobFileName, FitsInAFileNameAndTellsJobsApart) {
  EXPECT_EQ(job_file_name("prterun-a@1/x"),
            "prterun-a_1_x-" + job_file_name("prterun-a@1/x").substr(14));
  EXPECT_NE(job_file_name("a/b"), job_file_name("a_b"));
  EXPECT_EQ(job_file_name(std::string(300, 'a')).size(), 48U + 1 + 16);
  EXPECT_NE(job_file_name(std::string(300, 'a')), job_file_name(std::string(301, 'a')));
  EXPECT_EQ(job_file_name("").size(), 17U);
}

TEST(NameRanks, ShortensRuns) {
  EXPECT_EQ(name_ranks({2}), "rank 2");
  EXPECT_EQ(name_ranks({0, 1}), "ranks 0, 1");
  EXPECT_EQ(name_ranks({0, 3, 4, 5, 7, 8}), "ranks 0, 3 to 5, 7, 8");
  EXPECT_EQ(name_ranks({0, 1, 2, 3}), "ranks 0 to 3");
}

}  // namespace
}  // namespace narrowfloat::testing
