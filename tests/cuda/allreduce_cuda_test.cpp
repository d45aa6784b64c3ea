// The all-reduce on a GPU, with all ranks on one: every pattern, element type, layout and algorithm
// gives the bytes of the CPU's oracle, also in graphs, in any order on one workspace, and after a
// rank was late.
#include <array>
#include <chrono>
#include <cstring>
#include <memory>
#include <thread>

#include <fmt/format.h>

#include "cuda/gpu_test.h"
#include "cuda/late_copy.h"
#include "narrowfloat/allreduce.h"
#include "narrowfloat/quantize.h"
#include "ops/allreduce/allreduce_problem.h"
#include "support/allreduce_case.h"
#include "support/expect_error.h"

namespace narrowfloat::testing {
namespace {

using Spec = AllReduceCaseSpec;

class AllReduceCuda : public GpuTest {};

// Capacities of exactly `bytes`.
AllReduceWorkspaceOptions options_of(Device device, DType element, int64_t bytes) {
  return {.device = device,
          .element = element,
          .oneshot_bytes = bytes,
          .twoshot_bytes = bytes,
          .deadline = std::chrono::milliseconds(20'000)};
}

int64_t message_bytes(const AllReduceProblem& problem) {
  return std::max<int64_t>(problem.tokens * problem.hidden * bits(problem.element) / 8, 16);
}

std::vector<AllReduceWorkspace> workspaces_on(Device device, const Spec& spec) {
  return AllReduceWorkspace::create_local(
      spec.ranks, options_of(device, spec.problem.element, message_bytes(spec.problem)));
}

void run_oracle(const AllReduceCase& expected) {
  auto workspaces = workspaces_on({}, expected.spec());
  AllReduceProblem problem = expected.spec().problem;
  problem.algorithm = AllReduceAlgorithm::kReference;
  allreduce_virtual_ranks(workspaces, problem, expected.all_args());
}

// Runs the case on all ranks at once and compares it with the oracle.
void expect_oracles_bytes(const Spec& spec, std::span<AllReduceWorkspace> workspaces) {
  const AllReduceCase expected(spec);
  run_oracle(expected);
  Spec other_poison = spec;
  other_poison.poison = 0x5A;
  const AllReduceCase actual(other_poison);
  const DeviceCopies copies(actual.buffers(), {.programmatic_launch = false});
  const AllReduceAlgorithm ran =
      allreduce_virtual_ranks(workspaces, spec.problem, actual.all_args(copies), copies.stream());
  if (spec.problem.algorithm != AllReduceAlgorithm::kAuto) {
    EXPECT_EQ(ran, spec.problem.algorithm);
  }
  EXPECT_TRUE(copies.take_back()) << to_string(spec) << ": a canary was overwritten";
  for (const AllReduceWorkspace& workspace : workspaces) workspace.check_error();
  expect_same_outputs(expected, actual);
}

void expect_oracles_bytes(const Spec& spec) {
  auto workspaces = workspaces_on(gpu(), spec);
  expect_oracles_bytes(spec, workspaces);
}

constexpr std::array kLayouts{ScaleLayoutId::kSwizzled128x4, ScaleLayoutId::kSwizzled8x4,
                              ScaleLayoutId::kLinear};

bool has_layout(AllReduceQuantization quantization) {
  return quantization == AllReduceQuantization::kNvfp4 ||
         quantization == AllReduceQuantization::kNvfp4PerToken ||
         quantization == AllReduceQuantization::kMxfp8 ||
         quantization == AllReduceQuantization::kMxfp4;
}

int64_t column_multiple_of(const AllReduceProblem& problem) {
  const AllReduceQuantization quantization = quantization_of(problem);
  if (quantization == AllReduceQuantization::kFp8GroupUe8m0) return problem.group;
  return has_layout(quantization) ? 32 : 8;
}

// A random call of a pattern, as far as the pattern allows.
Spec random_spec(AllReducePattern pattern, Random& random, int64_t most_tokens,
                 std::initializer_list<int64_t> hidden_sizes) {
  Spec spec;
  AllReduceProblem& problem = spec.problem;
  problem.pattern = pattern;
  problem.element = is_moe(pattern) ? random.pick({DType::kBF16, DType::kF16})
                                    : random.pick({DType::kBF16, DType::kF16, DType::kF32});
  if (is_moe(pattern)) {
    problem.moe_quantization =
        random.pick({AllReduceQuantization::kNone, AllReduceQuantization::kNvfp4,
                     AllReduceQuantization::kFp8Block1x128, AllReduceQuantization::kMxfp4});
  }
  if (has_layout(quantization_of(problem)))
    problem.scale_layout = kLayouts[static_cast<size_t>(random.range(0, 2))];
  if (quantization_of(problem) == AllReduceQuantization::kFp8GroupUe8m0) {
    problem.group = random.pick({16, 32, 64, 128, 256});
  }
  problem.accumulation =
      random.pick({AllReduceAccumulation::kFp32, AllReduceAccumulation::kElement});
  problem.algorithm = random.pick({AllReduceAlgorithm::kOneShot, AllReduceAlgorithm::kTwoShot});
  problem.tokens = random.chance(30) ? random.range(0, 3) : random.range(1, most_tokens);
  problem.hidden = round_up(random.pick(hidden_sizes), column_multiple_of(problem));
  spec.ranks = static_cast<int>(random.range(1, 8));
  if (spec.ranks == 1) problem.algorithm = AllReduceAlgorithm::kAuto;
  spec.seed = random.bits32();
  spec.fill = random.pick({Fill::kNormal, Fill::kNormalRows, Fill::kSpecials, Fill::kDenormals,
                           Fill::kSparse, Fill::kRandomBits, Fill::kExtremes, Fill::kZeros});
  spec.is_in_place = random.chance(25);
  spec.weight_bias = random.chance(25) ? 1.0F : 0.0F;
  spec.has_element_weights = random.chance(50);
  spec.has_shared_expert = random.chance(50);
  spec.has_all_outputs = random.chance(50);
  return spec;
}

AllReducePattern pattern_number(int number) { return static_cast<AllReducePattern>(number); }

class AllReducePatternCuda : public GpuTestWith<int> {};

TEST_P(AllReducePatternCuda, SmallRowsGiveTheOraclesBytes) {
  Random random(100 + static_cast<uint64_t>(GetParam()));
  for (int i = 0; i < 4; ++i) {
    expect_oracles_bytes(
        random_spec(pattern_number(GetParam()), random, 7, {8, 16, 24, 32, 264, 544, 1544}));
  }
}

TEST_P(AllReducePatternCuda, RowsOfModelsGiveTheOraclesBytes) {
  Random random(500 + static_cast<uint64_t>(GetParam()));
  for (int i = 0; i < 12; ++i) {
    expect_oracles_bytes(random_spec(pattern_number(GetParam()), random, 33,
                                     {1024, 2048, 2880, 3584, 4096, 5120, 7168, 8192}));
  }
}

INSTANTIATE_TEST_SUITE_P(Patterns, AllReducePatternCuda, ::testing::Range(0, kNumAllReducePatterns),
                         [](const auto& test) {
                           return std::string(name(pattern_number(test.param)));
                         });

// Every layout, rank count and algorithm of the FP4 patterns, whose scales are padded.
TEST_F(AllReduceCuda, PaddedScalesOfAllLayouts) {
  for (const ScaleLayoutId layout : kLayouts) {
    for (const int64_t tokens : {1, 8, 127, 128, 129}) {
      for (const auto pattern : {AllReducePattern::kNvfp4, AllReducePattern::kMxfp8}) {
        Spec spec{.problem = {.tokens = tokens,
                              .hidden = 2880,
                              .pattern = pattern,
                              .scale_layout = layout,
                              .algorithm = AllReduceAlgorithm::kTwoShot}};
        expect_oracles_bytes(spec);
      }
    }
  }
}

TEST_F(AllReduceCuda, LongRowsAndManyTokens) {
  const std::array<std::pair<int64_t, int64_t>, 5> sizes{
      {{1024, 7168}, {200, 12288}, {64, 16384}, {33, 32768}, {3, 65536}}};
  for (const auto& [tokens, hidden] : sizes) {
    for (const auto algorithm : {AllReduceAlgorithm::kOneShot, AllReduceAlgorithm::kTwoShot}) {
      Spec spec{.problem = {.tokens = tokens,
                            .hidden = hidden,
                            .pattern = AllReducePattern::kNormNvfp4,
                            .algorithm = algorithm}};
      expect_oracles_bytes(spec);
    }
  }
}

// One token is spread over the CTAs of a cluster, which share the sums and the maximum of the row.
TEST_F(AllReduceCuda, ATokenOverAClusterGivesTheOraclesBytes) {
  for (const auto pattern : {AllReducePattern::kResidualRmsNorm, AllReducePattern::kNvfp4,
                             AllReducePattern::kNormFp8Token, AllReducePattern::kNvfp4PerToken,
                             AllReducePattern::kFp8Block}) {
    for (const int64_t hidden : {2080, 7168}) {
      for (const int ranks : {1, 2}) {
        expect_oracles_bytes(
            {.problem = {.tokens = 1, .hidden = hidden, .pattern = pattern}, .ranks = ranks});
      }
    }
  }
}

// Sizes, patterns and algorithms change from call to call: slots are packed differently each time.
TEST_F(AllReduceCuda, RandomSequencesOnOneWorkspace) {
  for (const int ranks : {2, 3, 8}) {
    Random random(static_cast<uint64_t>(ranks));
    auto workspaces =
        AllReduceWorkspace::create_local(ranks, options_of(gpu(), DType::kBF16, 1 << 20));
    for (int i = 0; i < 24; ++i) {
      const auto pattern = pattern_number(static_cast<int>(random.range(0, 19)));
      Spec spec = random_spec(pattern, random, 40, {16, 1544, 2880, 7168});
      spec.ranks = ranks;
      if (spec.problem.element == DType::kF32) spec.problem.element = DType::kBF16;
      if (spec.problem.algorithm == AllReduceAlgorithm::kAuto) {
        spec.problem.algorithm = AllReduceAlgorithm::kOneShot;
      }
      expect_oracles_bytes(spec, workspaces);
    }
  }
}

// The epilogue is that of the stand-alone operation.
TEST_F(AllReduceCuda, EqualsAllReduceThenAddRmsNormQuantize) {
  for (const auto& [pattern, format] :
       {std::pair{AllReducePattern::kNormNvfp4PerToken, FormatId::kNvfp4PerToken},
        std::pair{AllReducePattern::kNormMxfp8, FormatId::kMxfp8},
        std::pair{AllReducePattern::kNormMxfp4, FormatId::kMxfp4}}) {
    const Spec spec{.problem = {.tokens = 33, .hidden = 2880, .pattern = pattern}};
    AllReduceCase fused(spec);
    AllReduceCase apart({.problem = {.tokens = 33, .hidden = 2880}});
    auto workspaces = workspaces_on(gpu(), spec);
    const DeviceCopies copies(fused.buffers(), {});
    allreduce_virtual_ranks(workspaces, spec.problem, fused.all_args(copies), copies.stream());
    ASSERT_TRUE(copies.take_back());

    Buffers buffers = apart.buffers();
    const AllReduceCase tensors(spec);  // Residual, gamma and outputs of the second step.
    for (const GuardedBuffer* buffer : tensors.buffers()) buffers.push_back(buffer);
    const DeviceCopies steps(buffers, {});
    allreduce_virtual_ranks(workspaces, apart.spec().problem, apart.all_args(steps),
                            steps.stream());
    for (int rank = 0; rank < spec.ranks; ++rank) {
      const AllReduceArgs args = tensors.args(rank, steps);
      QuantizedLayout layout = quantized_layout(format, 33, 2880, {});
      const QuantizedView output =
          layout.bind(args.quant_out.data, args.scale_out.data,
                      static_cast<float*>(args.row_scale_out.data), args.quant_out.device);
      add_rmsnorm_quantize(apart.args(rank, steps).ar_out, args.residual_in, args.gamma, output,
                           {.eps = 1e-6F, .norm_output = args.norm_out}, {}, steps.stream());
    }
    ASSERT_TRUE(steps.take_back());
    for (int rank = 0; rank < spec.ranks; ++rank) {
      const auto want = tensors.outputs(rank);
      const auto got = fused.outputs(rank);
      for (size_t i = 0; i < want.size(); ++i) {
        if (want[i].name == "residual_out") continue;  // Updated in place there.
        EXPECT_EQ(want[i].bytes, got[i].bytes) << name(format) << ": " << want[i].name;
      }
    }
  }
}

// One launch a rank, each on its own stream, with control words of its own: the kernels that
// several GPUs run.
TEST_F(AllReduceCuda, OneLaunchForEachRank) {
  for (const int ranks : {2, 3, 4, 6, 8}) {
    for (const auto algorithm : {AllReduceAlgorithm::kOneShot, AllReduceAlgorithm::kTwoShot}) {
      for (const DType element : {DType::kBF16, DType::kF16, DType::kF32}) {
        const Spec spec{.problem = {.tokens = 19,
                                    .hidden = 2880,
                                    .element = element,
                                    .pattern = AllReducePattern::kNormNvfp4,
                                    .algorithm = algorithm},
                        .ranks = ranks};
        const AllReduceCase expected(spec);
        run_oracle(expected);
        const AllReduceCase actual(spec);
        auto workspaces = workspaces_on(gpu(), spec);
        const DeviceCopies copies(actual.buffers(), {});
        std::vector<std::unique_ptr<CudaStream>> streams;
        for (int rank = 0; rank < ranks; ++rank) streams.push_back(std::make_unique<CudaStream>());
        synchronize_device();
        for (int call = 0; call < 4; ++call) {
          for (int rank = 0; rank < ranks; ++rank) {
            const auto r = static_cast<size_t>(rank);
            allreduce(workspaces[r], spec.problem, actual.args(rank, copies), streams[r]->get());
          }
        }
        synchronize_device();
        for (const AllReduceWorkspace& workspace : workspaces) workspace.check_error();
        EXPECT_TRUE(copies.take_back());
        expect_same_outputs(expected, actual);
      }
    }
  }
}

TEST_F(AllReduceCuda, ReplaysOfAGraphContinueTheSequence) {
  for (const auto algorithm : {AllReduceAlgorithm::kOneShot, AllReduceAlgorithm::kTwoShot}) {
    const Spec spec{.problem = {.tokens = 7,
                                .hidden = 7168,
                                .pattern = AllReducePattern::kNormNvfp4,
                                .algorithm = algorithm},
                    .ranks = 4};
    AllReduceCase expected(spec);
    AllReduceCase actual(spec);
    auto workspaces = workspaces_on(gpu(), spec);
    const DeviceCopies copies(actual.buffers(), {});
    const CudaStream stream;
    const CapturedGraph graph(stream, [&] {
      allreduce_virtual_ranks(workspaces, spec.problem, actual.all_args(copies), stream.get());
    });
    EXPECT_EQ(graph.num_other_nodes(), 0);
    for (uint64_t replay = 0; replay < 20; ++replay) {
      expected.refill(replay);
      actual.refill(replay);
      run_oracle(expected);
      copies.send();
      graph.replay(replay % 4 == 0 ? 2 : 5);
      ASSERT_TRUE(copies.take_back());
      expect_same_outputs(expected, actual);
    }
  }
}

// Three calls, each between kernels that write its inputs and read its outputs long after they have
// triggered the next launch (allreduce spec 9).
class LateChain {
 public:
  explicit LateChain(int ranks)
      : work_(spec_of(ranks, 1)), workspaces_(workspaces_on(gpu(), work_.spec())) {
    for (uint64_t step = 0; step < kSteps; ++step) {
      steps_.emplace_back(spec_of(ranks, step + 1));
      // The weight is a constant, which may be read early.
      for (int rank = 0; rank < ranks; ++rank) {
        const TensorView gamma = work_.args(rank).gamma;
        std::memcpy(steps_.back().args(rank).gamma.data, gamma.data, 2 * kHidden);
      }
    }
    Buffers buffers = work_.buffers();
    for (const AllReduceCase& step : steps_) {
      for (const GuardedBuffer* buffer : step.buffers()) buffers.push_back(buffer);
    }
    copies_ = std::make_unique<DeviceCopies>(buffers);
  }

  void queue(int rank, Stream stream) {
    const AllReduceArgs args = work_.args(rank, *copies_);
    constexpr int64_t kWords = kTokens * kHidden / 2;
    for (const AllReduceCase& step : steps_) {
      const AllReduceArgs of_step = step.args(rank, *copies_);
      copy_late(args.input.data, of_step.input.data, kWords, stream);
      copy_late(args.residual_in.data, of_step.residual_in.data, kWords, stream);
      allreduce(workspaces_[static_cast<size_t>(rank)], work_.spec().problem, args, stream);
      copy_late(of_step.residual_out.data, args.residual_out.data, kWords, stream);
      copy_late(of_step.norm_out.data, args.norm_out.data, kWords, stream);
    }
  }

  void expect_oracles_norms() {
    ASSERT_TRUE(copies_->take_back());
    for (const AllReduceCase& step : steps_) {
      const AllReduceCase expected(step.spec());
      for (int rank = 0; rank < step.spec().ranks; ++rank) {
        std::memcpy(expected.args(rank).gamma.data, work_.args(0).gamma.data, 2 * kHidden);
      }
      run_oracle(expected);
      expect_same_outputs(expected, step);
    }
  }

 private:
  static constexpr uint64_t kSteps = 3;
  static constexpr int64_t kTokens = 5;
  static constexpr int64_t kHidden = 2880;

  static Spec spec_of(int ranks, uint64_t seed) {
    return {.problem = {.tokens = kTokens,
                        .hidden = kHidden,
                        .pattern = AllReducePattern::kResidualRmsNorm},
            .ranks = ranks,
            .seed = seed};
  }

  AllReduceCase work_;
  std::vector<AllReduceCase> steps_;
  std::vector<AllReduceWorkspace> workspaces_;
  std::unique_ptr<DeviceCopies> copies_;
};

TEST_F(AllReduceCuda, WaitsForKernelsThatWriteLate) {
  for (const int ranks : {1, 2}) {
    LateChain chain(ranks);
    std::vector<std::unique_ptr<CudaStream>> streams;
    synchronize_device();
    for (int rank = 0; rank < ranks; ++rank) {
      streams.push_back(std::make_unique<CudaStream>());
      chain.queue(rank, streams.back()->get(true));
    }
    synchronize_device();
    chain.expect_oracles_norms();
  }
}

TEST_F(AllReduceCuda, WaitsForKernelsThatWriteLateInGraphs) {
  LateChain chain(1);
  const CudaStream stream;
  const CapturedGraph graph(stream, [&] { chain.queue(0, stream.get(true)); });
  graph.replay(3);
  chain.expect_oracles_norms();
}

// A rank that never comes is an error within the deadline, on every rank that waits; after a reset
// the workspace works again.
TEST_F(AllReduceCuda, AMissingRankIsAnErrorWithinTheDeadline) {
  for (const auto algorithm : {AllReduceAlgorithm::kOneShot, AllReduceAlgorithm::kTwoShot}) {
    const Spec spec{.problem = {.tokens = 5,
                                .hidden = 2880,
                                .pattern = AllReducePattern::kNormFp8Token,
                                .algorithm = algorithm},
                    .ranks = 3};
    AllReduceWorkspaceOptions options =
        options_of(gpu(), DType::kBF16, message_bytes(spec.problem));
    options.deadline = std::chrono::milliseconds(200);
    auto workspaces = AllReduceWorkspace::create_local(3, options);
    const AllReduceCase actual(spec);
    const DeviceCopies copies(actual.buffers(), {});
    const CudaStream first;
    const CudaStream second;
    allreduce(workspaces[0], spec.problem, actual.args(0, copies), first.get());
    allreduce(workspaces[2], spec.problem, actual.args(2, copies), second.get());
    synchronize_device();
    for (const size_t rank : {0, 2}) {
      expect_error(ErrorKind::kDevice, {"all-reduce", "reset()"},
                   [&] { workspaces[rank].check_error(); });
      expect_error(ErrorKind::kDevice, {"earlier call"}, [&] {
        allreduce(workspaces[rank], spec.problem, actual.args(static_cast<int>(rank), copies));
      });
    }
    for (AllReduceWorkspace& workspace : workspaces) workspace.reset();
    expect_oracles_bytes(spec, workspaces);
  }
}

TEST_F(AllReduceCuda, AnIndexOutOfRangeIsNeverDereferenced) {
  const Spec spec{
      .problem = {.tokens = 5, .hidden = 1544, .pattern = AllReducePattern::kMoeFinalize}};
  const AllReduceCase actual(spec);
  AllReduceArgs args = actual.args(1);
  static_cast<int32_t*>(args.moe.slot_to_row.data)[3] = 1 << 30;
  static_cast<int32_t*>(args.moe.slot_to_row.data)[4] = -7;
  auto workspaces = workspaces_on(gpu(), spec);
  const DeviceCopies copies(actual.buffers(), {});
  allreduce_virtual_ranks(workspaces, spec.problem, actual.all_args(copies), copies.stream());
  synchronize_device();
  workspaces[0].check_error();
  expect_error(ErrorKind::kDevice, {"slot_to_row"}, [&] { workspaces[1].check_error(); });
}

// No token, and a call that is refused, leave the state of the protocol alone.
TEST_F(AllReduceCuda, NoTokensAndRefusedCallsChangeNothing) {
  Spec spec{.problem = {.tokens = 0, .hidden = 2880, .algorithm = AllReduceAlgorithm::kOneShot}};
  auto workspaces = AllReduceWorkspace::create_local(2, options_of(gpu(), DType::kBF16, 1 << 20));
  expect_oracles_bytes(spec, workspaces);
  AllReduceProblem wrong = spec.problem;
  wrong.tokens = 3;
  const AllReduceCase empty(spec);
  const DeviceCopies copies(empty.buffers(), {});
  expect_error(ErrorKind::kInvalidArgument, {"input"},
               [&] { allreduce(workspaces[0], wrong, empty.args(0, copies), copies.stream()); });
  spec.problem.tokens = 4;
  expect_oracles_bytes(spec, workspaces);
}

}  // namespace
}  // namespace narrowfloat::testing
