// Runs take one range of the tokens after the other, round and round, so that few tokens do not
// find their experts in a cache. Rows come in as bf16, so a mode's quantization of its input is
// timed with it; so is the router.
#include "cli/moe/bench_case.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "cli/float_tensors.h"
#include "cli/moe/gpu_layer.h"
#include "cli/moe/layer_runner.h"
#include "cli/moe/random_layer.h"

namespace narrowfloat::cli {
namespace {

constexpr uint64_t kRowSeed = 7;
// Of one graph on a GPU: ranges of tokens whose experts differ.
constexpr int64_t kMaxGraphRuns = 32;
// Of the time of a case, for each stage.
constexpr double kStageShare = 0.25;

// A timed case, and what its check needs.
struct TimedCase {
  MoeBenchResult result;
  RunSample sample;
};

// Seconds and launches of runs that end behind a stage.
struct StageEnd {
  double median_seconds = 0;
  int64_t launches = 0;
};

// Differences between a stage's end and that of the one before; none is below 0.
std::vector<StageTime> stage_times(const std::function<StageEnd(MoeStage)>& time_until) {
  std::vector<StageTime> stages;
  StageEnd before;
  for (const MoeStage stage : all_moe_stages()) {
    const StageEnd end = time_until(stage);
    stages.push_back({stage, std::max(end.median_seconds - before.median_seconds, 0.0),
                      std::max<int64_t>(end.launches - before.launches, 0)});
    before = {std::max(end.median_seconds, before.median_seconds),
              std::max(end.launches, before.launches)};
  }
  return stages;
}

void add_load(const LoadSummary& load, MoeBenchResult& result) {
  result.experts_hit += static_cast<double>(load.num_hit);
  result.local_slots += static_cast<double>(load.num_slots);
  result.largest_load = std::max(result.largest_load, load.largest);
}

// What was added up over so many runs.
void finish_load(const BenchInputs& inputs, int64_t runs, MoeBenchResult& result) {
  result.experts_hit /= static_cast<double>(runs);
  result.local_slots /= static_cast<double>(runs);
  result.work = work_of(inputs.config, result.experts_hit, result.local_slots, result.tokens,
                        inputs.routing.has_ids());
}

TimedCase time_case(const MoeBenchProblem& problem, const BenchInputs& inputs, int64_t tokens,
                    LayerRunner& runner) {
  const MoeConfig& config = inputs.config;
  const int64_t num_ranges = inputs.routing.tokens() / tokens;
  int64_t num_runs = 0;
  int64_t begin = 0;
  int64_t checked = 0;  // Begin of the last run with local slots.
  TimedCase timed;
  MoeBenchResult& result = timed.result;
  const auto run = [&](MoeStage last) {
    begin = num_runs++ % num_ranges * tokens;
    runner.run(inputs.range(begin, tokens), inputs.routing.range(begin, tokens), last);
  };
  const auto count_load = [&] {
    const LoadSummary load = summarise(expert_load(runner.ids(), config));
    add_load(load, result);
    if (load.num_slots > 0) checked = begin;
  };
  result.tokens = tokens;
  result.token_tile = runner.token_tile(tokens);
  result.timing = time_runs([&] { run(MoeStage::kCombine); }, problem.min_seconds, count_load);
  finish_load(inputs, result.timing.num_runs, result);
  if (checked != begin) {
    runner.run(inputs.range(checked, tokens), inputs.routing.range(checked, tokens));
  }
  timed.sample = sample_run(config, runner.output(), runner.ids(), checked);
  if (problem.has_stages) {
    result.stages = stage_times([&](MoeStage last) {
      const double min_seconds = kStageShare * problem.min_seconds;
      return StageEnd{time_runs([&] { run(last); }, min_seconds).median_seconds, 0};
    });
  }
  return timed;
}

// The ranges once for their load, then all of them in one graph, the last one of which is checked.
TimedCase time_case_on_gpu(const MoeBenchProblem& problem, const BenchInputs& inputs,
                           int64_t tokens, GpuLayer& layer) {
  const MoeConfig& config = inputs.config;
  const int64_t num_ranges = std::min(inputs.routing.tokens() / tokens, kMaxGraphRuns);
  std::vector<TokenRange> ranges;
  size_t checked = 0;
  TimedCase timed;
  MoeBenchResult& result = timed.result;
  result.tokens = tokens;
  result.token_tile = layer.token_tile(tokens);
  for (int64_t i = 0; i < num_ranges; ++i) {
    ranges.push_back({i * tokens, tokens});
    layer.run(ranges.back());
    const LoadSummary load = summarise(expert_load(layer.ids(), config));
    add_load(load, result);
    if (load.num_slots > 0) checked = ranges.size() - 1;
  }
  std::swap(ranges[checked], ranges.back());
  finish_load(inputs, num_ranges, result);
  result.timing = layer.time_runs(ranges, problem.min_seconds);
  timed.sample = sample_run(config, layer.output(), layer.ids(), ranges.back().begin);
  result.launches = layer.count_launches(ranges.back());
  if (problem.has_stages) {
    result.stages = stage_times([&](MoeStage last) {
      const Timing timing = layer.time_runs(ranges, kStageShare * problem.min_seconds, last);
      return StageEnd{timing.median_seconds, layer.count_launches(ranges.back(), last)};
    });
  }
  return timed;
}

std::vector<TimedCase> time_cases(const MoeBenchProblem& problem, const BenchInputs& inputs,
                                  std::span<const int64_t> tokens) {
  const MoeConfig& config = problem.config;
  const int64_t max_tokens = *std::max_element(tokens.begin(), tokens.end());
  RandomWeights weights(config, problem.has_bias);
  std::vector<TimedCase> cases;
  if (problem.gpu != nullptr) {
    GpuLayer layer(*problem.gpu, weights, config);
    const int64_t all = inputs.routing.tokens();
    layer.take(problem.tuning);
    layer.load(inputs.range(0, all), inputs.routing.range(0, all), max_tokens);
    for (const int64_t count : tokens) {
      cases.push_back(time_case_on_gpu(problem, inputs, count, layer));
    }
    return cases;
  }
  weights.fill();
  LayerRunner runner(weights.weights(), config, max_tokens);
  runner.take(problem.tuning);
  for (const int64_t count : tokens) cases.push_back(time_case(problem, inputs, count, runner));
  return cases;
}

}  // namespace

BenchInputs bench_inputs(const MoeBenchProblem& problem, int64_t max_tokens) {
  const MoeConfig& config = problem.config;
  BenchRouting routing(problem.routing, config.routing, max_tokens, problem.shape_experts);
  const auto elements = static_cast<size_t>(routing.tokens() * config.hidden);
  return {config, std::move(routing), to_bf16(random_normal(elements, kRowSeed))};
}

std::vector<MoeBenchResult> run_moe_bench(const MoeBenchProblem& problem,
                                          std::span<const int64_t> tokens) {
  const int64_t max_tokens = *std::max_element(tokens.begin(), tokens.end());
  const BenchInputs inputs = bench_inputs(problem, max_tokens);
  std::vector<MoeBenchResult> results;
  for (TimedCase& timed : time_cases(problem, inputs, tokens)) {
    timed.result.check = check_run(inputs, problem.has_bias, timed.sample);
    results.push_back(std::move(timed.result));
  }
  return results;
}

}  // namespace narrowfloat::cli
