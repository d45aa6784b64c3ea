// The soak of narrowfloat-bench allreduce. All problems have their inputs, outputs and expected
// outputs in memory from the start, so a call costs little more than its comparison and many are
// affordable.
#include <algorithm>
#include <chrono>
#include <csignal>
#include <random>
#include <thread>

#include <fmt/format.h>

#include "bench_cli/allreduce_measure.h"

namespace narrowfloat::cli {
namespace {

constexpr size_t kProblemsPerPattern = 4;
constexpr uint64_t kSeed = 24;

using Random = std::mt19937_64;

int64_t pick(Random& random, int64_t count) {
  return static_cast<int64_t>(random() % static_cast<uint64_t>(count));
}

// The first problem of a pattern has all tokens, the second one alone, the others any number.
std::vector<AllReduceProblem> soak_problems(const SoakOptions& options) {
  Random random(kSeed);
  std::vector<AllReduceProblem> problems;
  for (const AllReducePattern pattern : options.patterns) {
    for (size_t i = 0; i < kProblemsPerPattern; ++i) {
      AllReduceProblem problem{.tokens = i == 0   ? options.most_tokens
                                         : i == 1 ? 1
                                                  : 1 + pick(random, options.most_tokens),
                               .hidden = options.hidden,
                               .element = options.element,
                               .pattern = pattern};
      const AllReduceQuantization quantization = quantization_of(problem);
      if (quantization == AllReduceQuantization::kFp8GroupUe8m0) problem.group = 32;
      if (has_layouts(quantization)) problem.scale_layout = static_cast<ScaleLayoutId>(i % 3);
      problems.push_back(problem);
    }
  }
  return problems;
}

// One problem in memory: inputs and outputs of the ranks here, and the outputs that each must have.
struct SoakCase {
  AllReduceProblem problem;
  std::vector<RankTensors> tensors;
  std::byte* inputs = nullptr;
  std::byte* outputs = nullptr;
  std::byte* expected = nullptr;
  std::vector<AllReduceArgs> args;

  [[nodiscard]] uint64_t input_bytes() const {
    return tensors.size() * tensors.front().input_bytes();
  }
  [[nodiscard]] uint64_t output_bytes() const {
    return tensors.size() * tensors.front().output_bytes();
  }
};

std::vector<SoakCase> place_cases(const LocalRanks& ranks, const SoakOptions& options) {
  std::vector<SoakCase> cases;
  uint64_t size_bytes = 0;
  for (const AllReduceProblem& problem : soak_problems(options)) {
    SoakCase& one = cases.emplace_back();
    one.problem = problem;
    for (int i = 0; i < ranks.count(); ++i) {
      one.tensors.emplace_back(problem, ranks.ranks(), ranks.first_rank() + i);
    }
    size_bytes += one.input_bytes() + 2 * one.output_bytes();
  }
  std::byte* at = ranks.machine().reserve(size_bytes);
  for (SoakCase& one : cases) {
    one.inputs = at;
    one.outputs = one.inputs + one.input_bytes();
    one.expected = one.outputs + one.output_bytes();
    at = one.expected + one.output_bytes();
    for (size_t i = 0; i < one.tensors.size(); ++i) {
      const RankTensors& tensors = one.tensors[i];
      std::byte* const inputs = one.inputs + i * tensors.input_bytes();
      tensors.fill_inputs(ranks.machine(), inputs);
      one.args.push_back(
          tensors.args(inputs, one.outputs + i * tensors.output_bytes(), ranks.machine().device()));
    }
  }
  return cases;
}

void set_message(SoakResult& result, std::string_view text) {
  if (result.message[0] != 0) return;
  text = text.substr(0, sizeof(result.message) - 1);
  std::copy(text.begin(), text.end(), result.message);
}

// Rank 0 asks the oracle, all take its answer. The first token of a pattern's problems must have
// the same outputs, however many others there are.
void fill_expected(LocalRanks& ranks, std::vector<SoakCase>& cases, std::span<std::byte> shared,
                   SoakResult& result) {
  std::vector<std::byte> of_most_tokens;
  for (size_t i = 0; i < cases.size(); ++i) {
    SoakCase& one = cases[i];
    const RankTensors& tensors = one.tensors.front();
    ranks.together("expected outputs", [&] {
      if (ranks.first_rank() > 0) return;
      const std::vector<std::byte> outputs = reference_outputs(one.problem, ranks.ranks());
      std::copy(outputs.begin(), outputs.end(), shared.begin());
    });
    const std::span<std::byte> expected = shared.first(tensors.output_bytes());
    for (int rank = 0; rank < ranks.count(); ++rank) {
      ranks.machine().write(one.expected + static_cast<uint64_t>(rank) * expected.size(),
                            expected.data(), expected.size());
    }
    const size_t first = i - i % kProblemsPerPattern;
    if (i == first) of_most_tokens.assign(expected.begin(), expected.end());
    if (!tensors.has_first_row_of(expected.data(), cases[first].tensors.front(),
                                  of_most_tokens.data())) {
      set_message(result, fmt::format("{}: the first token has other bytes than among {}",
                                      to_string(one.problem), cases[first].problem.tokens));
    }
    // Rank 0 writes the next ones.
    ranks.barrier();
  }
}

std::vector<AllReduceAlgorithm> algorithms_of(const LocalRanks& ranks) {
  std::vector<AllReduceAlgorithm> algorithms = {
      AllReduceAlgorithm::kAuto, AllReduceAlgorithm::kOneShot, AllReduceAlgorithm::kTwoShot};
  if (ranks.transport() == AllReduceTransport::kNone) algorithms.resize(1);
  if (ranks.has_nccl()) algorithms.push_back(AllReduceAlgorithm::kNcclExact);
  return algorithms;
}

void sleep_now_and_then(Random& random) {
  constexpr int64_t kEvery = 256;
  constexpr int64_t kMostMicroseconds = 300;
  if (pick(random, kEvery) > 0) return;
  std::this_thread::sleep_for(std::chrono::microseconds(pick(random, kMostMicroseconds)));
}

void soak(LocalRanks& ranks, const SoakOptions& options, std::span<std::byte> shared,
          SoakResult& result) {
  std::vector<SoakCase> cases;
  ranks.together("buffers", [&] { cases = place_cases(ranks, options); });
  fill_expected(ranks, cases, shared, result);
  result.problems = static_cast<int64_t>(cases.size());
  const std::vector<AllReduceAlgorithm> algorithms = algorithms_of(ranks);
  Machine& machine = ranks.machine();
  Random random(kSeed);  // All ranks make the same choices,
  Random own(kSeed + 1 + static_cast<uint64_t>(ranks.first_rank()));  // but sleep on their own.
  const double start = steady_seconds();
  for (; result.calls < options.calls; ++result.calls) {
    SoakCase& one = cases[static_cast<size_t>(pick(random, result.problems))];
    AllReduceProblem problem = one.problem;
    problem.algorithm =
        algorithms[static_cast<size_t>(pick(random, static_cast<int64_t>(algorithms.size())))];
    if (ranks.first_rank() == options.kill_rank && result.calls == options.calls / 2) {
      result.kill_seconds = steady_seconds();
      std::raise(SIGKILL);
    }
    sleep_now_and_then(own);
    machine.fill_bytes(one.outputs, kPoison, one.output_bytes());
    AllReduceAlgorithm ran = AllReduceAlgorithm::kAuto;
    machine.run_once(
        [&](int64_t /*call*/, Stream stream) { ran = ranks.call(problem, one.args, stream); });
    ranks.wait_and_check();
    ++result.algorithms[static_cast<size_t>(ran)];
    if (!machine.is_equal(one.outputs, one.expected, one.output_bytes())) {
      set_message(result, fmt::format("call {}: {} ({} ran): wrong bytes", result.calls,
                                      to_string(problem), name(ran)));
    }
  }
  result.seconds = steady_seconds() - start;
}

}  // namespace

SoakOutcome run_soak(const RankSetup& setup, const SoakOptions& options) {
  const auto bodies = static_cast<size_t>(setup.bodies());
  uint64_t most_bytes = 0;
  for (const AllReduceProblem& problem : soak_problems(options)) {
    most_bytes = std::max(most_bytes, RankTensors(problem, setup.ranks, 0).output_bytes());
  }
  const SharedBytes facts_memory(sizeof(RunFacts));
  const SharedBytes results_memory(bodies * sizeof(SoakResult));
  const SharedBytes expected(most_bytes);
  RunFacts& facts = facts_memory.as<RunFacts>(1).front();
  const std::span<SoakResult> results = results_memory.as<SoakResult>(bodies);
  SoakOutcome outcome;
  outcome.ends = run_ranks(setup, [&](LocalRanks& ranks) {
    if (ranks.first_rank() == 0) facts = facts_of(ranks);
    soak(ranks, options, expected.bytes(), results[static_cast<size_t>(ranks.first_rank())]);
  });
  outcome.facts = facts;
  outcome.results.assign(results.begin(), results.end());
  return outcome;
}

}  // namespace narrowfloat::cli
