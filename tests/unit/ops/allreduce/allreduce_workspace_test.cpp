// The public all-reduce on the CPU: workspaces of threads and of processes, agreement of the ranks,
// and errors, after which a workspace refuses calls until it is reset.
#include <array>
#include <csignal>
#include <cstdio>
#include <string>
#include <unistd.h>
#include <vector>

#include <gtest/gtest.h>

#include "narrowfloat/bootstrap.h"
#include "ops/allreduce/cpu_cta.h"
#include "ops/allreduce/workspace.h"
#include "support/allreduce_ranks.h"
#include "support/expect_error.h"

namespace narrowfloat::testing {
namespace {

using std::chrono::milliseconds;

constexpr int64_t kCapacity = 1 << 16;

AllReduceWorkspaceOptions options_with(milliseconds deadline = std::chrono::seconds(60)) {
  return {.oneshot_bytes = kCapacity / 2, .twoshot_bytes = kCapacity, .deadline = deadline};
}

GoldenInputs inputs_with(AllReduceAlgorithm algorithm, int ranks, int64_t tokens = 7) {
  const AllReduceProblem problem{.tokens = tokens,
                                 .hidden = 64,
                                 .pattern = AllReducePattern::kNormNvfp4,
                                 .algorithm = algorithm};
  return random_inputs(problem, ranks, Fill::kNormal, 3);
}

// Calls allreduce() on every rank in a thread, and returns what ran on rank 0.
AllReduceAlgorithm expect_model_bytes(std::vector<AllReduceWorkspace>& workspaces,
                                      const GoldenInputs& in) {
  const GoldenOutputs expected = allreduce_golden(in);
  std::vector<AllReduceAlgorithm> ran(workspaces.size());
  run_as_threads(static_cast<int>(workspaces.size()), [&](int rank) {
    const auto index = static_cast<size_t>(rank);
    const RankTensors tensors(in, rank);
    ran[index] = allreduce(workspaces[index], in.problem, tensors.args());
    EXPECT_EQ(tensors.difference(expected), "") << "rank " << rank;
  });
  for (const AllReduceAlgorithm algorithm : ran) EXPECT_EQ(algorithm, ran[0]);
  return ran[0];
}

uint32_t epochs_of(const AllReduceWorkspace& workspace) {
  const LocalControl& control = *workspace.impl().view().control;
  return control.oneshot[0].epoch + control.twoshot[0].epoch;
}

TEST(AllReduceWorkspace, RunsTheAlgorithmThatIsNamed) {
  auto workspaces = AllReduceWorkspace::create_local(3, options_with());
  for (const auto algorithm : {AllReduceAlgorithm::kOneShot, AllReduceAlgorithm::kTwoShot,
                               AllReduceAlgorithm::kReference}) {
    EXPECT_EQ(expect_model_bytes(workspaces, inputs_with(algorithm, 3)), algorithm);
  }
}

TEST(AllReduceWorkspace, ChoosesByTheSizeOfTheMessage) {
  auto workspaces = AllReduceWorkspace::create_local(2, options_with());
  // 32 KiB are 256 tokens of 64 columns.
  EXPECT_EQ(expect_model_bytes(workspaces, inputs_with(AllReduceAlgorithm::kAuto, 2, 256)),
            AllReduceAlgorithm::kOneShot);
  EXPECT_EQ(expect_model_bytes(workspaces, inputs_with(AllReduceAlgorithm::kAuto, 2, 257)),
            AllReduceAlgorithm::kTwoShot);
  const GoldenInputs in = inputs_with(AllReduceAlgorithm::kAuto, 2, 513);
  const RankTensors tensors(in, 0);
  EXPECT_TRUE(workspaces[0].fits(512, 64, DType::kBF16));
  EXPECT_FALSE(workspaces[0].fits(513, 64, DType::kBF16));
  expect_error(ErrorKind::kUnsupported, {"cpu_oneshot", "cpu_reference", "twoshot_bytes"},
               [&] { allreduce(workspaces[0], in.problem, tensors.args()); });
}

TEST(AllReduceWorkspace, OfOneRankTakesAnyMessage) {
  auto workspaces = AllReduceWorkspace::create_local(1, options_with());
  expect_model_bytes(workspaces, inputs_with(AllReduceAlgorithm::kAuto, 1, 600));
}

TEST(AllReduceWorkspace, LeavesItsStateAloneWithoutTokens) {
  auto workspaces = AllReduceWorkspace::create_local(2, options_with());
  expect_model_bytes(workspaces, inputs_with(AllReduceAlgorithm::kOneShot, 2));
  const uint32_t epochs = epochs_of(workspaces[1]);
  const GoldenInputs in = inputs_with(AllReduceAlgorithm::kAuto, 2, 0);
  const RankTensors tensors(in, 1);
  // One rank alone: nothing is waited for.
  EXPECT_EQ(allreduce(workspaces[1], in.problem, tensors.args()), AllReduceAlgorithm::kOneShot);
  EXPECT_EQ(epochs_of(workspaces[1]), epochs);
  expect_model_bytes(workspaces, inputs_with(AllReduceAlgorithm::kOneShot, 2));
}

TEST(AllReduceWorkspace, LeavesItsStateAloneWhereACheckFails) {
  auto workspaces = AllReduceWorkspace::create_local(2, options_with());
  GoldenInputs in = inputs_with(AllReduceAlgorithm::kAuto, 2);
  const RankTensors tensors(in, 0);
  AllReduceArgs args = tensors.args();
  args.gamma = {};
  expect_error(kInvalid, {"gamma"}, [&] { allreduce(workspaces[0], in.problem, args); });
  EXPECT_EQ(epochs_of(workspaces[0]), 0U);
  expect_model_bytes(workspaces, in);
}

TEST(AllReduceWorkspace, RefusesTheOtherClassOfElements) {
  auto workspaces = AllReduceWorkspace::create_local(2, options_with());
  AllReduceProblem problem{.tokens = 1, .hidden = 8, .element = DType::kF32};
  const RankTensors tensors(random_inputs(problem, 2, Fill::kNormal, 1), 0);
  expect_error(kInvalid, {"16-bit", "F32"},
               [&] { allreduce(workspaces[0], problem, tensors.args()); });
  EXPECT_FALSE(workspaces[0].fits(1, 8, DType::kF32));
}

TEST(AllReduceWorkspace, RefusesOptionsThatCannotWork) {
  expect_error(kInvalid, {"ranks", "9"},
               [] { AllReduceWorkspace::create_local(9, options_with()); });
  AllReduceWorkspaceOptions options = options_with();
  options.element = DType::kU8;
  expect_error(kInvalid, {"element", "U8"}, [&] { AllReduceWorkspace::create_local(2, options); });
  options = options_with();
  options.oneshot_bytes = -1;
  expect_error(kInvalid, {"oneshot_bytes", "-1"},
               [&] { AllReduceWorkspace::create_local(2, options); });
  expect_error(kInvalid, {"bootstrap"}, [] { AllReduceWorkspace::create(nullptr, {}); });
}

TEST(AllReduceWorkspace, IsEmptyOnceItIsDestroyed) {
  auto workspaces = AllReduceWorkspace::create_local(1, options_with());
  EXPECT_EQ(workspaces[0].ranks(), 1);
  EXPECT_EQ(workspaces[0].transport(), AllReduceTransport::kThreads);
  workspaces[0].destroy();
  expect_error(kInvalid, {"workspace", "destroyed"}, [&] { workspaces[0].check_error(); });
}

TEST(AllReduceWorkspace, RefusesCallsAfterAFaultUntilItIsReset) {
  auto workspaces = AllReduceWorkspace::create_local(3, options_with(milliseconds(50)));
  for (const auto algorithm : {AllReduceAlgorithm::kOneShot, AllReduceAlgorithm::kTwoShot,
                               AllReduceAlgorithm::kReference}) {
    const GoldenInputs in = inputs_with(algorithm, 3);
    run_as_threads(3, [&](int rank) {
      if (rank == 1) return;
      const RankTensors tensors(in, rank);
      AllReduceWorkspace& workspace = workspaces[static_cast<size_t>(rank)];
      expect_error(ErrorKind::kDevice, {"rank " + std::to_string(rank)},
                   [&] { allreduce(workspace, in.problem, tensors.args()); });
      expect_error(ErrorKind::kDevice, {"reset()"}, [&] { workspace.check_error(); });
      expect_error(ErrorKind::kDevice, {"earlier call"},
                   [&] { allreduce(workspace, in.problem, tensors.args()); });
    });
    // The rank that was late learns of it in its call.
    const RankTensors tensors(in, 1);
    EXPECT_NO_THROW(workspaces[1].check_error());
    expect_error(ErrorKind::kDevice, {"gave up"},
                 [&] { allreduce(workspaces[1], in.problem, tensors.args()); });
    for (AllReduceWorkspace& workspace : workspaces) workspace.reset();
    EXPECT_NO_THROW(workspaces[1].check_error());
    expect_model_bytes(workspaces, in);
    expect_model_bytes(workspaces, inputs_with(AllReduceAlgorithm::kAuto, 3, 33));
  }
}

TEST(AllReduceWorkspace, ReportsARowThatDoesNotExist) {
  auto workspaces = AllReduceWorkspace::create_local(2, options_with());
  const AllReduceProblem problem{
      .tokens = 4, .hidden = 32, .pattern = AllReducePattern::kMoeFinalize};
  GoldenInputs in = random_inputs(problem, 2, Fill::kNormal, 5);
  in.ranks[1].slot_to_row[0] = -7;
  run_as_threads(2, [&](int rank) {
    const RankTensors tensors(in, rank);
    AllReduceWorkspace& workspace = workspaces[static_cast<size_t>(rank)];
    if (rank == 0) {
      EXPECT_NO_THROW(allreduce(workspace, problem, tensors.args()));
    } else {
      expect_error(ErrorKind::kDevice, {"slot_to_row of token 0", "-7"},
                   [&] { allreduce(workspace, problem, tensors.args()); });
    }
  });
}

TEST(AllReduceWorkspace, RunsVirtualRanksAsThreads) {
  auto workspaces = AllReduceWorkspace::create_local(4, options_with());
  const GoldenInputs in = inputs_with(AllReduceAlgorithm::kTwoShot, 4);
  const GoldenOutputs expected = allreduce_golden(in);
  std::vector<RankTensors> tensors;
  std::vector<AllReduceArgs> args;
  for (int rank = 0; rank < 4; ++rank) args.push_back(tensors.emplace_back(in, rank).args());
  EXPECT_EQ(allreduce_virtual_ranks(workspaces, in.problem, args), AllReduceAlgorithm::kTwoShot);
  for (const RankTensors& one : tensors) EXPECT_EQ(one.difference(expected), "");
  args.pop_back();
  expect_error(kInvalid, {"args", "4", "3"},
               [&] { allreduce_virtual_ranks(workspaces, in.problem, args); });
}

TEST(AllReduceExplain, SaysWhyAnImplementationIsNotTaken) {
  const Explanation explanation =
      explain_allreduce({.ranks = 4, .problem = {.tokens = 128, .hidden = 8192}});
  EXPECT_EQ(explanation.op, "allreduce");
  EXPECT_EQ(explanation.chosen, "cpu_twoshot");
  for (const Candidate& candidate : explanation.candidates) {
    if (candidate.name != "cpu_oneshot") continue;
    EXPECT_EQ(candidate.reason, "message of 2.0 MiB exceeds oneshot_bytes of 256.0 KiB");
  }
}

// ---- Processes

// Creates a workspace in a process for each rank and calls body(workspace, rank), which returns the
// status of the process.
template <typename Body>
std::vector<int> run_workspaces(int ranks, const AllReduceWorkspaceOptions& options,
                                const Body& body) {
  SharedRendezvous rendezvous(ranks);
  return run_as_processes(ranks, [&](int rank) {
    AllReduceWorkspace workspace =
        AllReduceWorkspace::create(rendezvous.bootstrap(rank, std::chrono::seconds(30)), options);
    return body(workspace, rank);
  });
}

TEST(AllReduceWorkspace, GivesTheModelsBytesBetweenProcesses) {
  std::vector<GoldenInputs> inputs;
  for (const auto algorithm : {AllReduceAlgorithm::kOneShot, AllReduceAlgorithm::kTwoShot,
                               AllReduceAlgorithm::kReference, AllReduceAlgorithm::kAuto}) {
    inputs.push_back(inputs_with(algorithm, 3, 33));
  }
  AllReduceWorkspaceOptions options = options_with();
  for (const auto agreement : {AllReduceAgreement::kFirstCall, AllReduceAgreement::kEveryCall,
                               AllReduceAgreement::kNever}) {
    options.agreement = agreement;
    const auto statuses = run_workspaces(3, options, [&](AllReduceWorkspace& workspace, int rank) {
      if (workspace.transport() != AllReduceTransport::kSharedMemory) return 2;
      for (const GoldenInputs& in : inputs) {
        const RankTensors tensors(in, rank);
        allreduce(workspace, in.problem, tensors.args());
        if (!tensors.difference(allreduce_golden(in)).empty()) return 1;
      }
      workspace.reset();
      workspace.destroy();
      return 0;
    });
    EXPECT_EQ(statuses, std::vector<int>(3, 0));
  }
}

// The status of a process for the error of a call: its kind, or 100 where there was none.
int status_of(const std::function<void()>& call, const std::string& fragment) {
  try {
    call();
  } catch (const Error& error) {
    if (std::string(error.what()).find(fragment) == std::string::npos) {
      std::fprintf(stderr, "no \"%s\" in: %s\n", fragment.c_str(), error.what());
      return 101;
    }
    return static_cast<int>(error.kind());
  }
  return 100;
}

TEST(AllReduceWorkspace, RefusesProblemsThatDiffer) {
  const GoldenInputs in = inputs_with(AllReduceAlgorithm::kAuto, 3);
  const auto statuses =
      run_workspaces(3, options_with(), [&](AllReduceWorkspace& workspace, int rank) {
        AllReduceProblem problem = in.problem;
        const RankTensors tensors(in, rank);
        AllReduceArgs args = tensors.args();
        if (rank == 2) problem.accumulation = AllReduceAccumulation::kElement;
        const int status = status_of([&] { allreduce(workspace, problem, args); }, "element sums");
        if (status != static_cast<int>(kInvalid)) return status;
        // A failed check of one rank is an error of all.
        AllReduceArgs wrong = args;
        if (rank == 0) wrong.gamma = {};
        const int second = status_of([&] { allreduce(workspace, in.problem, wrong); }, "gamma");
        if (second != static_cast<int>(kInvalid)) return second + 50;
        // Nothing has happened to the workspace.
        allreduce(workspace, in.problem, args);
        return tensors.difference(allreduce_golden(in)).empty() ? 0 : 1;
      });
  EXPECT_EQ(statuses, std::vector<int>(3, 0));
}

TEST(AllReduceWorkspace, RefusesOptionsThatDiffer) {
  SharedRendezvous rendezvous(2);
  const auto statuses = run_as_processes(2, [&](int rank) {
    AllReduceWorkspaceOptions options = options_with();
    if (rank == 1) options.oneshot_bytes = 4096;
    return status_of(
        [&] {
          AllReduceWorkspace::create(rendezvous.bootstrap(rank, std::chrono::seconds(30)), options);
        },
        "4096");
  });
  EXPECT_EQ(statuses, std::vector<int>(2, static_cast<int>(kInvalid)));
}

TEST(AllReduceWorkspace, ReportsARankThatDies) {
  const GoldenInputs in = inputs_with(AllReduceAlgorithm::kAuto, 3);
  const auto statuses = run_workspaces(
      3, options_with(milliseconds(1000)), [&](AllReduceWorkspace& workspace, int rank) {
        const RankTensors tensors(in, rank);
        allreduce(workspace, in.problem, tensors.args());
        if (rank == 1) kill(getpid(), SIGKILL);
        return status_of([&] { allreduce(workspace, in.problem, tensors.args()); }, "all-reduce");
      });
  const int device = static_cast<int>(ErrorKind::kDevice);
  EXPECT_EQ(statuses, (std::vector<int>{device, -SIGKILL, device}));
}

}  // namespace
}  // namespace narrowfloat::testing
