// The all-reduce on a GPU, with all ranks on one: every pattern, element type, layout and algorithm
// gives the bytes of the golden model, also in graphs, in any order on one workspace, and after a
// rank was late.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <memory>

#include <fmt/format.h>

#include "base/int_math.h"
#include "cuda/gpu_test.h"
#include "cuda/late_copy.h"
#include "narrowfloat/allreduce.h"
#include "narrowfloat/quantize.h"
#include "ops/allreduce/allreduce_problem.h"
#include "support/allreduce_ranks.h"
#include "support/device_copies.h"
#include "support/expect_error.h"

namespace narrowfloat::testing {
namespace {

class AllReduceCuda : public OwnCodeTest {};

// The same arguments for the copies of their tensors.
AllReduceArgs on_device(AllReduceArgs args, const DeviceCopies& copies) {
  AllReduceMoe& moe = args.moe;
  for (TensorView* view :
       {&args.input, &args.residual_in, &args.gamma, &args.ar_out, &args.residual_out,
        &args.norm_out, &args.quant_out, &args.scale_out, &args.row_scale_out, &args.global_scale,
        &moe.expert_rows, &moe.expert_scales, &moe.num_experts, &moe.token_input,
        &moe.permuted_rows, &moe.slot_to_row, &moe.slot_weights, &moe.shared_expert}) {
    *view = copies.view(*view);
  }
  return args;
}

// The tensors of all ranks.
class Tensors {
 public:
  explicit Tensors(const GoldenInputs& in, const RankOptions& options = {}) {
    for (size_t rank = 0; rank < in.ranks.size(); ++rank) {
      ranks_.emplace_back(in, static_cast<int>(rank), options);
    }
  }
  [[nodiscard]] const RankTensors& operator[](int rank) const {
    return ranks_[static_cast<size_t>(rank)];
  }
  [[nodiscard]] Buffers buffers() const {
    Buffers all;
    for (const RankTensors& rank : ranks_) {
      for (const GuardedBuffer* buffer : rank.buffers()) all.push_back(buffer);
    }
    return all;
  }
  [[nodiscard]] std::vector<AllReduceArgs> args(const DeviceCopies& copies) const {
    std::vector<AllReduceArgs> all;
    for (const RankTensors& rank : ranks_) all.push_back(on_device(rank.args(), copies));
    return all;
  }
  // Takes the contents of tensors of the same problem and options.
  void assign(const Tensors& other) const {
    const Buffers mine = buffers();
    const Buffers theirs = other.buffers();
    for (size_t i = 0; i < mine.size(); ++i) {
      std::ranges::copy(theirs[i]->span(), mine[i]->data());
    }
  }
  void expect(const GoldenOutputs& expected, const std::string& what) const {
    for (size_t rank = 0; rank < ranks_.size(); ++rank) {
      EXPECT_EQ(ranks_[rank].difference(expected), "") << what << ", rank " << rank;
    }
  }

 private:
  std::vector<RankTensors> ranks_;
};

struct Call {
  AllReduceProblem problem;
  int ranks = 2;
  uint64_t seed = 1;
  Fill fill = Fill::kNormal;
  RankOptions options;
};

std::string text_of(const Call& call) {
  return fmt::format("{} on {} ranks, seed {}, {}", to_string(call.problem), call.ranks, call.seed,
                     name(call.fill));
}

GoldenInputs inputs_of(const Call& call) {
  return random_inputs(call.problem, call.ranks, call.fill, call.seed);
}

// Capacities of exactly `bytes`.
AllReduceWorkspaceOptions options_of(DType element, int64_t bytes) {
  return {.device = gpu(),
          .element = element,
          .oneshot_bytes = bytes,
          .twoshot_bytes = bytes,
          .deadline = std::chrono::milliseconds(20'000)};
}

int64_t message_bytes(const AllReduceProblem& problem) {
  return std::max<int64_t>(problem.tokens * problem.hidden * bits(problem.element) / 8, 16);
}

std::vector<AllReduceWorkspace> workspaces_for(const Call& call) {
  return AllReduceWorkspace::create_local(
      call.ranks, options_of(call.problem.element, message_bytes(call.problem)));
}

// Runs the call on all ranks at once and compares it with the golden model.
void expect_golden_bytes(const Call& call, std::span<AllReduceWorkspace> workspaces) {
  const GoldenInputs in = inputs_of(call);
  const Tensors tensors(in, call.options);
  const DeviceCopies copies(tensors.buffers());
  const AllReduceAlgorithm ran =
      allreduce_virtual_ranks(workspaces, call.problem, tensors.args(copies), copies.stream());
  if (call.problem.algorithm != AllReduceAlgorithm::kAuto) {
    EXPECT_EQ(ran, call.problem.algorithm);
  }
  EXPECT_TRUE(copies.take_back()) << text_of(call) << ": a canary was overwritten";
  for (const AllReduceWorkspace& workspace : workspaces) workspace.check_error();
  tensors.expect(allreduce_golden(in), text_of(call));
}

void expect_golden_bytes(const Call& call) {
  auto workspaces = workspaces_for(call);
  expect_golden_bytes(call, workspaces);
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
Call random_call(AllReducePattern pattern, Random& random, int64_t most_tokens,
                 std::initializer_list<int64_t> hidden_sizes) {
  Call call;
  AllReduceProblem& problem = call.problem;
  problem.pattern = pattern;
  problem.element = is_moe(pattern) ? random.pick({DType::kBF16, DType::kF16})
                                    : random.pick({DType::kBF16, DType::kF16, DType::kF32});
  if (is_moe(pattern)) {
    problem.moe_quantization =
        random.pick({AllReduceQuantization::kNone, AllReduceQuantization::kNvfp4,
                     AllReduceQuantization::kFp8Block1x128, AllReduceQuantization::kMxfp4});
  }
  if (has_layout(quantization_of(problem))) {
    problem.scale_layout = kLayouts[static_cast<size_t>(random.range(0, 2))];
  }
  if (quantization_of(problem) == AllReduceQuantization::kFp8GroupUe8m0) {
    problem.group = random.pick({16, 32, 64, 128, 256});
  }
  problem.accumulation =
      random.pick({AllReduceAccumulation::kFp32, AllReduceAccumulation::kElement});
  problem.algorithm = random.pick({AllReduceAlgorithm::kOneShot, AllReduceAlgorithm::kTwoShot});
  problem.tokens = random.chance(30) ? random.range(0, 3) : random.range(1, most_tokens);
  problem.hidden = round_up(random.pick(hidden_sizes), column_multiple_of(problem));
  call.ranks = static_cast<int>(random.range(1, 8));
  if (call.ranks == 1) problem.algorithm = AllReduceAlgorithm::kAuto;
  call.seed = random.bits32();
  call.fill = random.pick({Fill::kNormal, Fill::kNormalRows, Fill::kSpecials, Fill::kDenormals,
                           Fill::kSparse, Fill::kRandomBits, Fill::kExtremes, Fill::kZeros});
  call.options.alias =
      random.pick({Alias::kNone, Alias::kNone, Alias::kResidual, Alias::kInputIsArOut,
                   Alias::kInputIsResidualOut, Alias::kInputIsNormOut});
  call.options.leaves_out_optional = random.chance(50);
  call.options.poison = random.pick({uint8_t{0xCC}, uint8_t{0x5A}});
  return call;
}

AllReducePattern pattern_number(int number) { return static_cast<AllReducePattern>(number); }

class AllReducePatternCuda : public OwnCodeTestWith<int> {};

TEST_P(AllReducePatternCuda, SmallRowsGiveTheGoldenBytes) {
  Random random(100 + static_cast<uint64_t>(GetParam()));
  for (int i = 0; i < 4; ++i) {
    expect_golden_bytes(
        random_call(pattern_number(GetParam()), random, 7, {8, 16, 24, 32, 264, 544, 1544}));
  }
}

TEST_P(AllReducePatternCuda, RowsOfModelsGiveTheGoldenBytes) {
  Random random(500 + static_cast<uint64_t>(GetParam()));
  for (int i = 0; i < 12; ++i) {
    expect_golden_bytes(random_call(pattern_number(GetParam()), random, 33,
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
        const Call call{.problem = {.tokens = tokens,
                                    .hidden = 2880,
                                    .pattern = pattern,
                                    .scale_layout = layout,
                                    .algorithm = AllReduceAlgorithm::kTwoShot}};
        expect_golden_bytes(call);
      }
    }
  }
}

TEST_F(AllReduceCuda, LongRowsAndManyTokens) {
  const std::array<std::pair<int64_t, int64_t>, 5> sizes{
      {{1024, 7168}, {200, 12288}, {64, 16384}, {33, 32768}, {3, 65536}}};
  for (const auto& [tokens, hidden] : sizes) {
    for (const auto algorithm : {AllReduceAlgorithm::kOneShot, AllReduceAlgorithm::kTwoShot}) {
      const Call call{.problem = {.tokens = tokens,
                                  .hidden = hidden,
                                  .pattern = AllReducePattern::kNormNvfp4,
                                  .algorithm = algorithm}};
      expect_golden_bytes(call);
    }
  }
}

// One token is spread over the CTAs of a cluster, which share the sums and the maximum of the row.
TEST_F(AllReduceCuda, ATokenOverAClusterGivesTheGoldenBytes) {
  for (const auto pattern : {AllReducePattern::kResidualRmsNorm, AllReducePattern::kNvfp4,
                             AllReducePattern::kNormFp8Token, AllReducePattern::kNvfp4PerToken,
                             AllReducePattern::kFp8Block}) {
    for (const int64_t hidden : {2080, 7168}) {
      for (const int ranks : {1, 2}) {
        expect_golden_bytes(
            {.problem = {.tokens = 1, .hidden = hidden, .pattern = pattern}, .ranks = ranks});
      }
    }
  }
}

// Sizes, patterns and algorithms change from call to call: slots are packed differently each time.
TEST_F(AllReduceCuda, RandomSequencesOnOneWorkspace) {
  for (const int ranks : {2, 3, 8}) {
    Random random(static_cast<uint64_t>(ranks));
    auto workspaces = AllReduceWorkspace::create_local(ranks, options_of(DType::kBF16, 1 << 20));
    for (int i = 0; i < 24; ++i) {
      const auto pattern = pattern_number(static_cast<int>(random.range(0, 19)));
      Call call = random_call(pattern, random, 40, {16, 1544, 2880, 7168});
      call.ranks = ranks;
      if (call.problem.element == DType::kF32) call.problem.element = DType::kBF16;
      if (call.problem.algorithm == AllReduceAlgorithm::kAuto) {
        call.problem.algorithm = AllReduceAlgorithm::kOneShot;
      }
      expect_golden_bytes(call, workspaces);
    }
  }
}

// Expects that `apart`, all-reduce and then the stand-alone operation, has the bytes of `fused`.
void expect_same_quantized(const AllReduceArgs& fused, const AllReduceArgs& apart,
                           const std::string& what) {
  for (const auto member : {&AllReduceArgs::norm_out, &AllReduceArgs::quant_out,
                            &AllReduceArgs::scale_out, &AllReduceArgs::row_scale_out}) {
    const TensorView& want = apart.*member;
    const TensorView& got = fused.*member;
    if (want.is_absent()) continue;
    const auto bytes =
        static_cast<size_t>(want.dtype == DType::kF4 ? want.num_elements()
                                                     : want.num_elements() * bits(want.dtype) / 8);
    EXPECT_EQ(std::memcmp(want.data, got.data, bytes), 0) << what;
  }
}

// The epilogue is that of the stand-alone operation.
TEST_F(AllReduceCuda, EqualsAllReduceThenAddRmsNormQuantize) {
  for (const auto& [pattern, format] :
       {std::pair{AllReducePattern::kNormNvfp4PerToken, FormatId::kNvfp4PerToken},
        std::pair{AllReducePattern::kNormMxfp8, FormatId::kMxfp8},
        std::pair{AllReducePattern::kNormMxfp4, FormatId::kMxfp4}}) {
    const Call call{.problem = {.tokens = 33, .hidden = 2880, .pattern = pattern}};
    GoldenInputs in = inputs_of(call);
    in.weight_bias = 0.0F;
    GoldenInputs plain = in;
    plain.problem.pattern = AllReducePattern::kAllReduce;
    const Tensors fused(in);
    const Tensors sums(plain);
    const Tensors apart(in);  // Residual, weight and outputs of the second step.
    Buffers buffers = fused.buffers();
    for (const Tensors* tensors : {&sums, &apart}) {
      for (const GuardedBuffer* buffer : tensors->buffers()) buffers.push_back(buffer);
    }
    const DeviceCopies copies(buffers);
    auto workspaces = workspaces_for(call);
    allreduce_virtual_ranks(workspaces, in.problem, fused.args(copies), copies.stream());
    allreduce_virtual_ranks(workspaces, plain.problem, sums.args(copies), copies.stream());
    for (int rank = 0; rank < call.ranks; ++rank) {
      const AllReduceArgs args = on_device(apart[rank].args(), copies);
      const QuantizedView output =
          quantized_layout(format, 33, 2880, {})
              .bind(args.quant_out.data, args.scale_out.data,
                    static_cast<float*>(args.row_scale_out.data), args.quant_out.device);
      add_rmsnorm_quantize(copies.view(sums[rank].args().ar_out), args.residual_in, args.gamma,
                           output, {.eps = in.eps, .norm_output = args.norm_out}, {},
                           copies.stream());
    }
    ASSERT_TRUE(copies.take_back());
    for (int rank = 0; rank < call.ranks; ++rank) {
      expect_same_quantized(fused[rank].args(), apart[rank].args(), std::string(name(format)));
    }
  }
}

// One launch a rank, each on its own stream, with control words of its own: the kernels that
// several GPUs run.
void expect_golden_bytes_of_launches(const Call& call) {
  const GoldenInputs in = inputs_of(call);
  const Tensors tensors(in);
  auto workspaces = workspaces_for(call);
  const DeviceCopies copies(tensors.buffers());
  const std::vector<AllReduceArgs> args = tensors.args(copies);
  std::vector<std::unique_ptr<CudaStream>> streams;
  for (int rank = 0; rank < call.ranks; ++rank) streams.push_back(std::make_unique<CudaStream>());
  synchronize_device();
  for (int repeat = 0; repeat < 4; ++repeat) {
    for (size_t rank = 0; rank < args.size(); ++rank) {
      allreduce(workspaces[rank], call.problem, args[rank], streams[rank]->get());
    }
  }
  synchronize_device();
  for (const AllReduceWorkspace& workspace : workspaces) workspace.check_error();
  EXPECT_TRUE(copies.take_back());
  tensors.expect(allreduce_golden(in), text_of(call));
}

TEST_F(AllReduceCuda, OneLaunchForEachRank) {
  for (const int ranks : {2, 3, 4, 6, 8}) {
    for (const auto algorithm : {AllReduceAlgorithm::kOneShot, AllReduceAlgorithm::kTwoShot}) {
      for (const DType element : {DType::kBF16, DType::kF16, DType::kF32}) {
        expect_golden_bytes_of_launches({.problem = {.tokens = 19,
                                                     .hidden = 2880,
                                                     .element = element,
                                                     .pattern = AllReducePattern::kNormNvfp4,
                                                     .algorithm = algorithm},
                                         .ranks = ranks});
      }
    }
  }
}

TEST_F(AllReduceCuda, ReplaysOfAGraphContinueTheSequence) {
  for (const auto algorithm : {AllReduceAlgorithm::kOneShot, AllReduceAlgorithm::kTwoShot}) {
    Call call{.problem = {.tokens = 7,
                          .hidden = 7168,
                          .pattern = AllReducePattern::kNormNvfp4,
                          .algorithm = algorithm},
              .ranks = 4};
    const GoldenInputs first = inputs_of(call);
    const Tensors tensors(first);
    auto workspaces = workspaces_for(call);
    const DeviceCopies copies(tensors.buffers());
    const CudaStream stream;
    const CapturedGraph graph(stream, [&] {
      allreduce_virtual_ranks(workspaces, call.problem, tensors.args(copies), stream.get());
    });
    EXPECT_EQ(graph.num_other_nodes(), 0);
    for (uint64_t replay = 0; replay < 20; ++replay) {
      call.seed = replay;
      GoldenInputs in = inputs_of(call);
      // These numbers are part of the graph.
      in.eps = first.eps;
      in.weight_bias = first.weight_bias;
      tensors.assign(Tensors(in));
      copies.send();
      graph.replay(replay % 4 == 0 ? 2 : 5);
      ASSERT_TRUE(copies.take_back());
      tensors.expect(allreduce_golden(in), text_of(call));
    }
  }
}

// Three calls, each between kernels that write its inputs and read its outputs long after they have
// triggered the next launch.
class LateChain {
 public:
  explicit LateChain(int ranks)
      : inputs_(inputs_of_steps(ranks)),
        work_(inputs_[0]),
        workspaces_(workspaces_for({.problem = inputs_[0].problem, .ranks = ranks})) {
    Buffers buffers = work_.buffers();
    for (const GoldenInputs& in : inputs_) {
      const Tensors& step = *steps_.emplace_back(std::make_unique<Tensors>(in));
      for (const GuardedBuffer* buffer : step.buffers()) buffers.push_back(buffer);
    }
    copies_ = std::make_unique<DeviceCopies>(buffers);
  }

  void queue(int rank, Stream stream) {
    const AllReduceArgs args = on_device(work_[rank].args(), *copies_);
    constexpr int64_t kWords = kTokens * kHidden / 2;
    for (const auto& step : steps_) {
      const AllReduceArgs of_step = on_device((*step)[rank].args(), *copies_);
      copy_late(args.input.data, of_step.input.data, kWords, stream);
      copy_late(args.residual_in.data, of_step.residual_in.data, kWords, stream);
      allreduce(workspaces_[static_cast<size_t>(rank)], inputs_[0].problem, args, stream);
      copy_late(of_step.residual_out.data, args.residual_out.data, kWords, stream);
      copy_late(of_step.norm_out.data, args.norm_out.data, kWords, stream);
    }
  }

  void expect_golden_norms() const {
    ASSERT_TRUE(copies_->take_back());
    for (size_t step = 0; step < steps_.size(); ++step) {
      steps_[step]->expect(allreduce_golden(inputs_[step]), fmt::format("step {}", step));
    }
  }

 private:
  static constexpr int64_t kTokens = 5;
  static constexpr int64_t kHidden = 2880;

  // The weight is a constant, which may be read early.
  static std::vector<GoldenInputs> inputs_of_steps(int ranks) {
    std::vector<GoldenInputs> steps;
    for (uint64_t seed = 1; seed <= 3; ++seed) {
      GoldenInputs in = inputs_of({.problem = {.tokens = kTokens,
                                               .hidden = kHidden,
                                               .pattern = AllReducePattern::kResidualRmsNorm},
                                   .ranks = ranks,
                                   .seed = seed});
      if (!steps.empty()) {
        in.gamma = steps[0].gamma;
        in.eps = steps[0].eps;
        in.weight_bias = steps[0].weight_bias;
      }
      steps.push_back(std::move(in));
    }
    return steps;
  }

  std::vector<GoldenInputs> inputs_;
  Tensors work_;
  std::vector<std::unique_ptr<Tensors>> steps_;
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
    chain.expect_golden_norms();
  }
}

TEST_F(AllReduceCuda, WaitsForKernelsThatWriteLateInGraphs) {
  LateChain chain(1);
  const CudaStream stream;
  const CapturedGraph graph(stream, [&] { chain.queue(0, stream.get(true)); });
  graph.replay(3);
  chain.expect_golden_norms();
}

// A rank that never comes is an error within the deadline, on every rank that waits; after a reset
// the workspace works again.
TEST_F(AllReduceCuda, AMissingRankIsAnErrorWithinTheDeadline) {
  for (const auto algorithm : {AllReduceAlgorithm::kOneShot, AllReduceAlgorithm::kTwoShot}) {
    const Call call{.problem = {.tokens = 5,
                                .hidden = 2880,
                                .pattern = AllReducePattern::kNormFp8Token,
                                .algorithm = algorithm},
                    .ranks = 3};
    AllReduceWorkspaceOptions options = options_of(DType::kBF16, message_bytes(call.problem));
    options.deadline = std::chrono::milliseconds(200);
    auto workspaces = AllReduceWorkspace::create_local(3, options);
    const Tensors tensors(inputs_of(call));
    const DeviceCopies copies(tensors.buffers());
    const std::vector<AllReduceArgs> args = tensors.args(copies);
    const CudaStream first;
    const CudaStream second;
    allreduce(workspaces[0], call.problem, args[0], first.get());
    allreduce(workspaces[2], call.problem, args[2], second.get());
    synchronize_device();
    for (const size_t rank : {0, 2}) {
      expect_error(ErrorKind::kDevice, {"all-reduce", "reset()"},
                   [&] { workspaces[rank].check_error(); });
      expect_error(ErrorKind::kDevice, {"earlier call"},
                   [&] { allreduce(workspaces[rank], call.problem, args[rank]); });
    }
    for (AllReduceWorkspace& workspace : workspaces) workspace.reset();
    expect_golden_bytes(call, workspaces);
  }
}

TEST_F(AllReduceCuda, AnIndexOutOfRangeIsNeverDereferenced) {
  const Call call{
      .problem = {.tokens = 5, .hidden = 1544, .pattern = AllReducePattern::kMoeFinalize}};
  const Tensors tensors(inputs_of(call));
  auto* const rows = static_cast<int32_t*>(tensors[1].args().moe.slot_to_row.data);
  rows[3] = 1 << 30;
  rows[4] = -7;
  auto workspaces = workspaces_for(call);
  const DeviceCopies copies(tensors.buffers());
  allreduce_virtual_ranks(workspaces, call.problem, tensors.args(copies), copies.stream());
  synchronize_device();
  workspaces[0].check_error();
  expect_error(ErrorKind::kDevice, {"slot_to_row"}, [&] { workspaces[1].check_error(); });
}

// No token, and a call that is refused, leave the state of the protocol alone.
TEST_F(AllReduceCuda, NoTokensAndRefusedCallsChangeNothing) {
  Call call{.problem = {.tokens = 0, .hidden = 2880, .algorithm = AllReduceAlgorithm::kOneShot}};
  auto workspaces = AllReduceWorkspace::create_local(2, options_of(DType::kBF16, 1 << 20));
  expect_golden_bytes(call, workspaces);
  AllReduceProblem wrong = call.problem;
  wrong.tokens = 3;
  const Tensors empty(inputs_of(call));
  const DeviceCopies copies(empty.buffers());
  expect_error(ErrorKind::kInvalidArgument, {"input"}, [&] {
    allreduce(workspaces[0], wrong, on_device(empty[0].args(), copies), copies.stream());
  });
  call.problem.tokens = 4;
  expect_golden_bytes(call, workspaces);
}

}  // namespace
}  // namespace narrowfloat::testing
