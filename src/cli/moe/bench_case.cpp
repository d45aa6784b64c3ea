// Runs take one range of the tokens after the other, round and round, so that few tokens do not
// find their experts in a cache. Rows come in as bf16, so a mode's quantization of its input is
// timed with it; so is the router. The oracle is prepared after the timed layer has gone: two
// copies of the weights are the most that is in memory.
#include "cli/moe/bench_case.h"

#include <algorithm>
#include <array>
#include <utility>

#include <fmt/format.h>

#include "cli/float_tensors.h"
#include "cli/moe/bench_routing.h"
#include "cli/moe/gpu_layer.h"
#include "cli/moe/layer_runner.h"
#include "cli/moe/random_layer.h"
#include "cli/size_text.h"
#include "narrowfloat/error.h"

namespace narrowfloat::cli {
namespace {

constexpr uint64_t kRowSeed = 7;
// Of the oracle, for each number of tokens: it is slow.
constexpr double kCheckFlops = 5e8;
constexpr int64_t kMaxChecked = 64;
// Of one graph on a GPU: ranges of tokens whose experts differ.
constexpr int64_t kMaxGraphRuns = 32;
// A relative error over fewer rows is that of one row.
constexpr int64_t kMinForRel = 16;

// Tokens of a run, by whether experts of this rank had a part in them.
struct TokenSplit {
  std::vector<int64_t> local, other;
};
TokenSplit split_tokens(std::span<const int32_t> ids, const MoeConfig& config, int64_t tokens) {
  const int32_t first = config.expert_offset;
  const int32_t last = first + config.local_experts;
  const size_t width = ids.size() / static_cast<size_t>(tokens);
  TokenSplit split;
  for (int64_t token = 0; token < tokens; ++token) {
    const auto slots = ids.subspan(static_cast<size_t>(token) * width, width);
    const bool is_local = std::any_of(slots.begin(), slots.end(),
                                      [&](int32_t id) { return id >= first && id < last; });
    (is_local ? split.local : split.other).push_back(token);
  }
  return split;
}

// Evenly spread over `tokens`.
std::vector<int64_t> sample_of(const MoeConfig& config, std::span<const int64_t> tokens) {
  const double flops = 2.0 * config.routing.top_k * weights_per_expert(config);
  const auto affordable = static_cast<int64_t>(kCheckFlops / flops);
  const auto num_tokens = static_cast<int64_t>(tokens.size());
  const int64_t count = std::min(num_tokens, std::clamp<int64_t>(affordable, 2, kMaxChecked));
  std::vector<int64_t> sample;
  for (int64_t i = 0; i < count; ++i) {
    sample.push_back(tokens[static_cast<size_t>(i * num_tokens / count)]);
  }
  return sample;
}

template <typename Value>
std::vector<Value> rows_at(std::span<const int64_t> rows, const std::vector<Value>& values,
                           int64_t cols) {
  std::vector<Value> result;
  for (const int64_t row : rows) {
    const auto begin = values.begin() + row * cols;
    result.insert(result.end(), begin, begin + cols);
  }
  return result;
}

bool is_within(const Distance& error, const Distance& limit, int64_t rows) {
  return error.row <= limit.row && (rows < kMinForRel || error.rel <= limit.rel);
}

// Bytes of a run's buffers: sums of the first GEMM, intermediate and slot results of every row.
double buffer_bytes(const MoeConfig& config, int64_t tokens) {
  const auto slots = static_cast<double>(tokens * config.routing.top_k);
  const auto width =
      static_cast<double>(2 * config.inter * 8 + config.inter * 4 + config.hidden * 4);
  return slots * width + static_cast<double>(tokens * config.hidden * 8);
}

// Groups need at least two experts each, and the kept ones k together.
void fit_groups(RoutingConfig& routing) {
  if (routing.n_group <= 1) return;
  const int32_t per_group = routing.experts / routing.n_group;
  const bool fits = routing.experts % routing.n_group == 0 && per_group >= 2 &&
                    per_group * routing.topk_group >= routing.top_k;
  if (!fits) routing.n_group = routing.topk_group = 1;
}

void check_extents(const MoeShape& shape, const MoeModeInfo& mode, const ExpertShard& shard) {
  if (shape.hidden % mode.multiple != 0 || shape.inter % mode.multiple != 0) {
    throw Error(ErrorKind::kInvalidArgument,
                fmt::format("--mode {}: hidden and intermediate size must be multiples of {}, {} "
                            "has {} and {}",
                            mode.name, mode.multiple, shape.name, shape.hidden, shape.inter));
  }
  if (shape.routing.experts % shard.num_ranks != 0) {
    throw Error(ErrorKind::kInvalidArgument,
                fmt::format("--ep {}/{}: the {} experts of {} cannot be shared evenly", shard.rank,
                            shard.num_ranks, shape.routing.experts, shape.name));
  }
}

// What all cases of a layer have in common.
struct BenchInputs {
  const MoeConfig& config;
  BenchRouting routing;
  std::vector<uint16_t> rows;  // bf16, as many as there are tokens in `routing`.

  [[nodiscard]] TensorView range(int64_t begin, int64_t count) const {
    const auto hidden = static_cast<size_t>(config.hidden);
    const auto first = static_cast<size_t>(begin) * hidden;
    return matrix_view(std::span(rows).subspan(first, static_cast<size_t>(count) * hidden),
                       config.hidden);
  }
};

// A timed case, and what its check needs.
struct TimedCase {
  MoeBenchResult result;
  std::vector<int64_t> sample;  // Tokens of one run, with local slots.
  std::vector<float> output;    // Of those tokens.
  bool has_zeros = true;        // The output of a token of that run without local slots.
};

// Of a run that began at token `begin`.
void take_sample(const MoeConfig& config, const std::vector<float>& output,
                 std::span<const int32_t> ids, int64_t begin, TimedCase& timed) {
  const TokenSplit split = split_tokens(ids, config, timed.result.tokens);
  timed.sample = sample_of(config, split.local);
  timed.output = rows_at(timed.sample, output, config.hidden);
  for (int64_t& token : timed.sample) token += begin;
  if (split.other.empty()) return;
  const int64_t unused = split.other[split.other.size() / 2];
  const std::vector<float> zeros = rows_at(std::array{unused}, output, config.hidden);
  timed.has_zeros = std::all_of(zeros.begin(), zeros.end(), [](float value) { return value == 0; });
}

TimedCase time_case(const BenchInputs& inputs, int64_t tokens, double min_seconds,
                    LayerRunner& runner) {
  const MoeConfig& config = inputs.config;
  const int64_t num_ranges = inputs.routing.tokens() / tokens;
  int64_t num_runs = 0;
  int64_t begin = 0;
  int64_t checked = 0;  // Begin of the last run with local slots.
  TimedCase timed;
  MoeBenchResult& result = timed.result;
  const auto run = [&] {
    begin = num_runs++ % num_ranges * tokens;
    runner.run(inputs.range(begin, tokens), inputs.routing.range(begin, tokens));
  };
  const auto count_load = [&] {
    const LoadSummary load = summarise(expert_load(runner.ids(), config));
    result.experts_hit += static_cast<double>(load.num_hit);
    result.local_slots += static_cast<double>(load.num_slots);
    result.largest_load = std::max(result.largest_load, load.largest);
    if (load.num_slots > 0) checked = begin;
  };
  result.tokens = tokens;
  result.timing = time_runs(run, min_seconds, count_load);
  result.experts_hit /= static_cast<double>(result.timing.num_runs);
  result.local_slots /= static_cast<double>(result.timing.num_runs);
  result.work =
      work_of(config, result.experts_hit, result.local_slots, tokens, inputs.routing.has_ids());
  if (checked != begin) {
    runner.run(inputs.range(checked, tokens), inputs.routing.range(checked, tokens));
  }
  take_sample(config, runner.output(), runner.ids(), checked, timed);
  return timed;
}

// The same ranges once for their load, then all of them in one graph.
TimedCase time_case_on_gpu(const BenchInputs& inputs, int64_t tokens, double min_seconds,
                           GpuLayer& layer) {
  const MoeConfig& config = inputs.config;
  const int64_t num_ranges = std::min(inputs.routing.tokens() / tokens, kMaxGraphRuns);
  std::vector<TokenRange> ranges;
  TokenRange checked{0, tokens};
  TimedCase timed;
  MoeBenchResult& result = timed.result;
  result.tokens = tokens;
  for (int64_t i = 0; i < num_ranges; ++i) {
    ranges.push_back({i * tokens, tokens});
    layer.run(ranges.back());
    const LoadSummary load = summarise(expert_load(layer.ids(), config));
    result.experts_hit += static_cast<double>(load.num_hit) / static_cast<double>(num_ranges);
    result.local_slots += static_cast<double>(load.num_slots) / static_cast<double>(num_ranges);
    result.largest_load = std::max(result.largest_load, load.largest);
    if (load.num_slots > 0) checked = ranges.back();
  }
  result.timing = layer.time_runs(ranges, min_seconds);
  result.work =
      work_of(config, result.experts_hit, result.local_slots, tokens, inputs.routing.has_ids());
  layer.run(checked);
  take_sample(config, layer.output(), layer.ids(), checked.begin, timed);
  return timed;
}

std::vector<TimedCase> time_cases(const MoeBenchProblem& problem, const BenchInputs& inputs,
                                  const RandomWeights& weights, std::span<const int64_t> tokens) {
  const MoeConfig& config = problem.config;
  const int64_t max_tokens = *std::max_element(tokens.begin(), tokens.end());
  std::vector<TimedCase> cases;
  if (problem.gpu != nullptr) {
    GpuLayer layer(*problem.gpu, weights.weights(), config);
    const int64_t all = inputs.routing.tokens();
    layer.load(inputs.range(0, all), inputs.routing.range(0, all), max_tokens);
    for (const int64_t count : tokens) {
      cases.push_back(time_case_on_gpu(inputs, count, problem.min_seconds, layer));
    }
    return cases;
  }
  LayerRunner runner(weights.weights(), config, max_tokens);
  for (const int64_t count : tokens) {
    cases.push_back(time_case(inputs, count, problem.min_seconds, runner));
  }
  return cases;
}

void check_case(const BenchInputs& inputs, LayerRunner& oracle, TimedCase& timed) {
  MoeBenchResult& result = timed.result;
  if (timed.sample.empty()) {
    if (!timed.has_zeros) result.verdict = Verdict::kWrong;
    return;
  }
  const MoeConfig& config = inputs.config;
  const std::vector<uint16_t> rows = rows_at(timed.sample, inputs.rows, config.hidden);
  BenchRouting sampled = inputs.routing;
  const Routing routing = inputs.routing.of(timed.sample, sampled);
  oracle.run(matrix_view(rows, config.hidden), routing);
  result.checked_tokens = static_cast<int64_t>(timed.sample.size());
  result.error = distance(timed.output, oracle.output(), config.hidden);
  const bool is_correct =
      timed.has_zeros && is_within(result.error, tolerance(config.mode), result.checked_tokens);
  result.verdict = is_correct ? Verdict::kCorrect : Verdict::kWrong;
}

}  // namespace

MoeConfig bench_config(const MoeShape& shape, MoeMode mode, const ExpertShard& shard,
                       int64_t max_tokens, uint64_t max_bytes) {
  check_extents(shape, moe_mode_info(mode), shard);
  MoeConfig config;
  config.hidden = shape.hidden;
  config.inter = shape.inter;
  config.mode = mode;
  config.activation = shape.activation;
  config.gate_order = shape.gate_order;
  config.routing = shape.routing;
  config.local_experts = 1;
  const double for_weights = static_cast<double>(max_bytes) - buffer_bytes(config, max_tokens);
  const double each = 2 * RandomWeights::bytes(config);  // Canonical, and prepared.
  const int32_t wanted = shape.routing.experts / shard.num_ranks;
  const int32_t fewest = (shape.routing.top_k + shard.num_ranks - 1) / shard.num_ranks;
  const auto affordable = static_cast<int64_t>(std::max(for_weights, 0.0) / each);
  if (affordable < fewest) {
    throw Error(ErrorKind::kInvalidArgument,
                fmt::format("--shape {}: even {} experts in mode {} need {}, more than the {} that "
                            "may be used; see --max-memory, --tokens and --ep",
                            shape.name, fewest, name(mode),
                            format_bytes(static_cast<uint64_t>(fewest * each +
                                                               buffer_bytes(config, max_tokens))),
                            format_bytes(max_bytes)));
  }
  config.local_experts = static_cast<int32_t>(std::min<int64_t>(affordable, wanted));
  const int32_t groups = std::max(config.routing.n_group, 1);
  // Whole groups, so that the router stays the model's.
  if (config.local_experts < wanted && config.local_experts * shard.num_ranks > 2 * groups &&
      groups % shard.num_ranks == 0) {
    config.local_experts -= config.local_experts % (groups / shard.num_ranks);
  }
  config.routing.experts = config.local_experts * shard.num_ranks;
  config.expert_offset = config.local_experts * shard.rank;
  fit_groups(config.routing);
  return config;
}

std::vector<MoeBenchResult> run_moe_bench(const MoeBenchProblem& problem,
                                          std::span<const int64_t> tokens) {
  const MoeConfig& config = problem.config;
  const int64_t max_tokens = *std::max_element(tokens.begin(), tokens.end());
  BenchRouting routing(problem.routing, config.routing, max_tokens, problem.shape_experts);
  const auto elements = static_cast<size_t>(routing.tokens() * config.hidden);
  const BenchInputs inputs{config, std::move(routing), to_bf16(random_normal(elements, kRowSeed))};
  const RandomWeights weights(config, problem.has_bias);
  std::vector<TimedCase> cases = time_cases(problem, inputs, weights, tokens);
  MoeConfig oracle_config = config;
  oracle_config.accumulation = Accumulation::kFp64;
  LayerRunner oracle(weights.weights(), oracle_config, std::min(kMaxChecked, max_tokens));
  std::vector<MoeBenchResult> results;
  for (TimedCase& timed : cases) {
    check_case(inputs, oracle, timed);
    results.push_back(timed.result);
  }
  return results;
}

}  // namespace narrowfloat::cli
