// The router runs on the CPU; what it chose goes to a layer of the experts that it chose.
#include "cli/moe/bench_check.h"

#include <algorithm>
#include <array>
#include <map>

#include "cli/moe/random_layer.h"
#include "narrowfloat/route.h"

namespace narrowfloat::cli {
namespace {

// Of the oracle, for each number of tokens: it is slow.
constexpr double kCheckFlops = 5e8;
constexpr int64_t kMaxChecked = 64;
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

// A routing as precomputed ids and weights.
struct ChosenExperts {
  std::vector<int32_t> ids;
  std::vector<float> weights;
};
ChosenExperts chosen_experts(const Routing& routing, const RoutingConfig& config, int64_t tokens) {
  const auto slots = static_cast<size_t>(tokens * config.top_k);
  ChosenExperts chosen{std::vector<int32_t>(slots), std::vector<float>(slots)};
  RouteOutputs outputs;
  outputs.ids = TensorView::contiguous(chosen.ids.data(), DType::kI32, {tokens, config.top_k});
  outputs.weights =
      TensorView::contiguous(chosen.weights.data(), DType::kF32, {tokens, config.top_k});
  route(routing, config, outputs);
  return chosen;
}

// The local experts that are named, in order; ids become positions in it, and those of other ranks
// one past the end.
std::vector<int32_t> compact_experts(const MoeConfig& config, std::vector<int32_t>& ids) {
  const auto is_local = [&](int32_t id) {
    return id >= config.expert_offset && id < config.expert_offset + config.local_experts;
  };
  std::map<int32_t, int32_t> positions;
  for (const int32_t id : ids) {
    if (is_local(id)) positions[id - config.expert_offset] = 0;
  }
  std::vector<int32_t> experts;
  for (auto& [expert, position] : positions) {
    position = static_cast<int32_t>(experts.size());
    experts.push_back(expert);
  }
  const auto count = static_cast<int32_t>(experts.size());
  for (int32_t& id : ids) id = is_local(id) ? positions[id - config.expert_offset] : count;
  return experts;
}

MoeConfig oracle_config(const MoeConfig& config, int32_t experts) {
  MoeConfig oracle = config;
  oracle.accumulation = Accumulation::kFp64;
  oracle.routing = {};
  oracle.routing.top_k = config.routing.top_k;
  oracle.routing.experts = std::max(experts + 1, config.routing.top_k);
  oracle.expert_offset = 0;
  oracle.local_experts = experts;
  return oracle;
}

}  // namespace

RunSample sample_run(const MoeConfig& config, const std::vector<float>& output,
                     std::span<const int32_t> ids, int64_t begin) {
  const auto tokens = static_cast<int64_t>(ids.size()) / config.routing.top_k;
  const TokenSplit split = split_tokens(ids, config, tokens);
  RunSample sample;
  sample.tokens = sample_of(config, split.local);
  sample.output = rows_at(sample.tokens, output, config.hidden);
  for (int64_t& token : sample.tokens) token += begin;
  if (split.other.empty()) return sample;
  const int64_t unused = split.other[split.other.size() / 2];
  const std::vector<float> zeros = rows_at(std::array{unused}, output, config.hidden);
  sample.has_zeros =
      std::all_of(zeros.begin(), zeros.end(), [](float value) { return value == 0; });
  return sample;
}

CheckedRun check_run(const BenchInputs& inputs, bool has_bias, const RunSample& sample) {
  CheckedRun checked;
  if (sample.tokens.empty()) {
    if (!sample.has_zeros) checked.verdict = Verdict::kWrong;
    return checked;
  }
  const MoeConfig& config = inputs.config;
  checked.tokens = static_cast<int64_t>(sample.tokens.size());
  const std::vector<uint16_t> rows = rows_at(sample.tokens, inputs.rows, config.hidden);
  BenchRouting sampled = inputs.routing;
  ChosenExperts chosen =
      chosen_experts(inputs.routing.of(sample.tokens, sampled), config.routing, checked.tokens);
  const std::vector<int32_t> experts = compact_experts(config, chosen.ids);
  RandomWeights weights(config, has_bias, experts);
  weights.fill();
  LayerRunner oracle(weights.weights(), oracle_config(config, static_cast<int32_t>(experts.size())),
                     checked.tokens);
  Routing routing;
  const int32_t top_k = config.routing.top_k;
  routing.ids = TensorView::contiguous(chosen.ids.data(), DType::kI32, {checked.tokens, top_k});
  routing.weights =
      TensorView::contiguous(chosen.weights.data(), DType::kF32, {checked.tokens, top_k});
  oracle.run(matrix_view(rows, config.hidden), routing);
  checked.error = distance(sample.output, oracle.output(), config.hidden);
  const bool is_correct =
      sample.has_zeros && is_within(checked.error, tolerance(config.mode), checked.tokens);
  checked.verdict = is_correct ? Verdict::kCorrect : Verdict::kWrong;
  return checked;
}

}  // namespace narrowfloat::cli
