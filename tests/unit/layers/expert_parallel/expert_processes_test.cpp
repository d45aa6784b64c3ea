// Expert parallelism of forked processes, which share memory: results, and ranks that disagree or
// die. Apart from the other tests, since a process with threads of oneTBB cannot be forked.
#include <csignal>
#include <memory>
#include <string>
#include <unistd.h>
#include <vector>

#include <gtest/gtest.h>

#include "ops/allreduce/cpu_cta.h"
#include "support/expect_error.h"
#include "support/forked_ranks.h"
#include "unit/layers/expert_parallel/expert_case.h"

namespace narrowfloat::testing {
namespace {

using std::chrono::milliseconds;

TEST(ExpertParallelProcesses, GiveTheSameBytes) {
  const ExpertCase c({.mode = MoeMode::kFp8Block,
                      .ranks = 4,
                      .tokens = {8, 0, 3, 5},
                      .payload = RowFormat::kFp8Group,
                      .order = CombineOrder::kTopK},
                     90);
  SharedRendezvous rendezvous(4);
  const std::vector<std::string> results = run_processes(4, [&](int rank) {
    ExpertParallel group = ExpertParallel::create(rendezvous.bootstrap(rank), c.config());
    require(group.transport() == ExpertTransport::kPeerMemory, "expected peer memory");
    require(c.run(group, 3) == c.expected(rank), "other bytes");
    group.destroy();
    return std::string();
  });
  for (const std::string& result : results) EXPECT_EQ(result, "");
}

TEST(ExpertParallelProcesses, AllRefuseWhatOneAskedForDifferently) {
  expect_error_on_all(
      2, kInvalid, {"expert parallelism: options", "top_k 2", "top_k 3"}, [](Bootstrap& bootstrap) {
        ExpertParallelConfig config{.hidden = 128, .experts = 8, .top_k = 2, .max_tokens = 4};
        config.top_k += bootstrap.rank();
        const std::shared_ptr<Bootstrap> shared(&bootstrap, [](Bootstrap*) {});
        ExpertParallel::create(shared, config);
      });
}

ProtocolPoint point_of_death = ProtocolPoint::kPushed;

// A rank dies before it says that its tokens are sent, or that its results are ready.
TEST(ExpertParallelProcesses, ADeadRankIsAnErrorOnAllOthers) {
  const ExpertCase c({.ranks = 3, .tokens = {4, 4, 4}}, 95);
  for (const ProtocolPoint point : {ProtocolPoint::kPushed, ProtocolPoint::kReduced}) {
    point_of_death = point;
    SharedRendezvous rendezvous(3);
    const std::vector<std::string> results = run_processes(3, [&](int rank) {
      ExpertParallel group = ExpertParallel::create(rendezvous.bootstrap(rank), c.config(),
                                                    {.device = {},
                                                     .transport = ExpertTransport::kPeerMemory,
                                                     .all_to_all = {},
                                                     .deadline = milliseconds(500)});
      static_cast<void>(c.run(group));
      if (rank == 1) {
        set_protocol_point_function([](int, int, ProtocolPoint reached) {
          if (reached == point_of_death) kill(getpid(), SIGKILL);
        });
      }
      std::string error = error_of([&] { static_cast<void>(c.run(group)); });
      // It stays so, and so does what the object says.
      require(error_of([&] { static_cast<void>(c.run(group)); }) == error, "another error");
      return error;
    });
    EXPECT_EQ(results[1], "signal 9");
    for (const size_t rank : {size_t{0}, size_t{2}}) {
      EXPECT_NE(results[rank].find("expert parallelism: call 2 failed on rank"), std::string::npos)
          << results[rank];
    }
    // The first one whose deadline passes says what is missing, and ends the wait of the other.
    const std::string missing = point == ProtocolPoint::kPushed
                                    ? "rank 1 sent no tokens within 500 ms"
                                    : "rank 1 sent no results within 500 ms";
    EXPECT_NE((results[0] + results[2]).find(missing), std::string::npos) << results[0] << "\n"
                                                                          << results[2];
  }
}

}  // namespace
}  // namespace narrowfloat::testing
