// Rows come in as bf16, so a mode's quantization of its input is timed with it; so is the router.
// The oracle is prepared after the timed layer has gone: two copies of the weights are the most
// that is in memory.
#include "cli/moe/bench_case.h"

#include <algorithm>

#include <fmt/format.h>

#include "cli/float_tensors.h"
#include "cli/moe/bench_routing.h"
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
// A relative error over fewer rows is that of one row.
constexpr int64_t kMinForRel = 16;

// Evenly spread over [0, tokens).
std::vector<int64_t> sample_of(const MoeConfig& config, int64_t tokens) {
  const double flops = 2.0 * config.routing.top_k * weights_per_expert(config);
  const auto affordable = static_cast<int64_t>(kCheckFlops / flops);
  const int64_t count = std::min(tokens, std::clamp<int64_t>(affordable, 2, kMaxChecked));
  std::vector<int64_t> sample;
  for (int64_t i = 0; i < count; ++i) sample.push_back(i * tokens / count);
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

// The timed part: what a result needs for its check later is kept in `outputs`.
std::vector<MoeBenchResult> time_all(const MoeBenchProblem& problem, const MoeWeights& weights,
                                     const std::vector<uint16_t>& rows, const BenchRouting& routing,
                                     std::span<const int64_t> tokens,
                                     std::vector<std::vector<float>>& outputs) {
  const MoeConfig& config = problem.config;
  LayerRunner runner(weights, config, *std::max_element(tokens.begin(), tokens.end()));
  std::vector<MoeBenchResult> results;
  for (const int64_t count : tokens) {
    const auto elements = static_cast<size_t>(count * config.hidden);
    const TensorView input = matrix_view(std::span(rows).first(elements), config.hidden);
    const Routing view = routing.first(count);
    MoeBenchResult result;
    result.tokens = count;
    result.timing = time_runs([&] { runner.run(input, view); }, problem.min_seconds);
    result.load = summarise(expert_load(runner.ids(), config));
    result.work = work_of(config, result.load, count);
    outputs.push_back(rows_at(sample_of(config, count), runner.output(), config.hidden));
    results.push_back(result);
  }
  return results;
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
  const BenchRouting routing(problem.routing, config.routing, max_tokens);
  const RandomWeights weights(config, problem.has_bias);
  const std::vector<uint16_t> rows =
      to_bf16(random_normal(static_cast<size_t>(max_tokens * config.hidden), kRowSeed));
  std::vector<std::vector<float>> outputs;
  std::vector<MoeBenchResult> results =
      time_all(problem, weights.weights(), rows, routing, tokens, outputs);

  MoeConfig oracle_config = config;
  oracle_config.accumulation = Accumulation::kFp64;
  LayerRunner oracle(weights.weights(), oracle_config, std::min(kMaxChecked, max_tokens));
  for (size_t i = 0; i < results.size(); ++i) {
    const std::vector<int64_t> sample = sample_of(config, results[i].tokens);
    const std::vector<uint16_t> input = rows_at(sample, rows, config.hidden);
    BenchRouting sampled = routing;
    const Routing view = routing.of(sample, sampled);
    oracle.run(matrix_view(input, config.hidden), view);
    results[i].checked_tokens = static_cast<int64_t>(sample.size());
    results[i].error = distance(outputs[i], oracle.output(), config.hidden);
    results[i].is_correct =
        is_within(results[i].error, tolerance(config.mode), results[i].checked_tokens);
  }
  return results;
}

}  // namespace narrowfloat::cli
