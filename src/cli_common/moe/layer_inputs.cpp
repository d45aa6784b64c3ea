// Precomputed ids come with weight 1: the time does not depend on it. The router runs on the CPU;
// what it chose tells the load of the experts, and goes to an oracle that has the chosen experts
// only.
#include "cli_common/moe/layer_inputs.h"

#include <algorithm>
#include <array>
#include <map>
#include <utility>

#include <fmt/format.h>

#include "cli_common/moe/layer_runner.h"
#include "cli_common/moe/random_weights.h"
#include "narrowfloat/error.h"
#include "narrowfloat/route.h"

namespace narrowfloat::cli {
namespace {

constexpr double kZipfExponent = 1;
constexpr uint64_t kLogitSeed = 42;
constexpr uint64_t kRowSeed = 7;
constexpr std::string_view kZipf = "zipf";
// Runs on few tokens take others each time: the same experts again and again would stay in caches.
constexpr int64_t kMinTokens = 256;
constexpr int64_t kMaxRanges = 32;
// The oracle is slow: it computes so much for each number of tokens.
constexpr double kCheckFlops = 5e8;
constexpr int64_t kMaxChecked = 64;

bool is_file(std::string_view kind) { return kind != "uniform" && kind != kZipf; }

const TensorInfo* find_by_ending(const SafetensorsReader& file, std::string_view ending) {
  for (const TensorInfo& tensor : file.tensors()) {
    if (tensor.name.ends_with(ending)) return &tensor;
  }
  return nullptr;
}

void check_cols(const SafetensorsReader& file, const TensorInfo& tensor, std::string_view what,
                int64_t cols) {
  if (tensor.shape.size() == 2 && tensor.shape[1] == cols) return;
  throw Error(
      ErrorKind::kCorruptData,
      fmt::format("{}: tensor '{}': expected [tokens, {}] ({}), got [{}]", printable(file.path()),
                  printable(tensor.name), cols, what, fmt::join(tensor.shape, ", ")));
}

template <typename Value>
std::vector<Value> selected_rows(const std::vector<Value>& values, int64_t cols,
                                 std::span<const int64_t> rows) {
  std::vector<Value> result;
  for (const int64_t row : rows) {
    const auto begin = values.begin() + row * cols;
    result.insert(result.end(), begin, begin + cols);
  }
  return result;
}

// The tokens of a run, by whether experts of this rank had a part in them.
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

// A few of `tokens`, evenly spread.
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

// Returns the local experts that are named, in order; ids become positions in it, and those of
// other ranks one past the end.
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
  oracle.routing = {};
  oracle.routing.top_k = config.routing.top_k;
  oracle.routing.experts = std::max(experts + 1, config.routing.top_k);
  oracle.expert_offset = 0;
  oracle.local_experts = experts;
  return oracle;
}

}  // namespace

BenchRouting::BenchRouting(const std::string& kind, const RoutingConfig& config, int64_t tokens,
                           int32_t shape_experts)
    : config_(config) {
  const int64_t wanted = std::max(tokens, kMinTokens);
  if (is_file(kind)) {
    read_file(kind, wanted, shape_experts);
    if (this->tokens() >= tokens) return;
    throw Error(ErrorKind::kInvalidArgument,
                fmt::format("--routing {}: it routes {} tokens, --tokens asks for {}",
                            printable(kind), this->tokens(), tokens));
  }
  logits_ = random_logits(wanted, config.experts, kind == kZipf ? kZipfExponent : 0, kLogitSeed);
}

int64_t BenchRouting::tokens() const {
  return ids_.empty() ? static_cast<int64_t>(logits_.size()) / config_.experts
                      : static_cast<int64_t>(ids_.size()) / config_.top_k;
}

void BenchRouting::read_file(const std::string& path, int64_t tokens, int32_t shape_experts) {
  const SafetensorsReader file(path);
  if (const TensorInfo* ids = find_by_ending(file, "topk_ids")) {
    read_ids(file, *ids, tokens);
    const int64_t largest = ids_.empty() ? -1 : *std::max_element(ids_.begin(), ids_.end());
    return require_experts(path, largest + 1, shape_experts);
  }
  const TensorInfo* logits = find_by_ending(file, "router_logits");
  if (logits == nullptr) {
    throw Error(
        ErrorKind::kCorruptData,
        fmt::format("{}: there is neither a tensor *topk_ids nor *router_logits", printable(path)));
  }
  check_cols(file, *logits, "experts", shape_experts);
  require_experts(path, shape_experts, shape_experts);
  const int64_t rows = std::min(tokens, logits->shape[0]);
  const auto elements = static_cast<uint64_t>(rows * config_.experts);
  logits_ = read_floats(file, *logits, elements * static_cast<uint64_t>(bits(logits->dtype)) / 8);
}

void BenchRouting::read_ids(const SafetensorsReader& file, const TensorInfo& tensor,
                            int64_t tokens) {
  check_cols(file, tensor, "experts a token", config_.top_k);
  if (tensor.dtype != DType::kI32) {
    throw Error(ErrorKind::kCorruptData,
                fmt::format("{}: tensor '{}': expected I32, got {}", printable(file.path()),
                            printable(tensor.name), name(tensor.dtype)));
  }
  const int64_t rows = std::min(tokens, tensor.shape[0]);
  ids_.resize(static_cast<size_t>(rows * config_.top_k));
  file.read(tensor, 0, std::as_writable_bytes(std::span(ids_)));
}

void BenchRouting::require_experts(const std::string& path, int64_t experts,
                                   int32_t shape_experts) const {
  if (experts <= config_.experts) return;
  const std::string_view remedy = config_.experts < shape_experts && experts <= shape_experts
                                      ? "fit; see --max-memory, --ep"
                                      : "are in the layer";
  throw Error(ErrorKind::kInvalidArgument,
              fmt::format("--routing {}: the file routes to {} experts, only {} {}",
                          printable(path), experts, config_.experts, remedy));
}

Routing BenchRouting::range(int64_t begin, int64_t count) const {
  Routing routing;
  if (ids_.empty()) {
    routing.logits = TensorView::contiguous(logits_.data() + begin * config_.experts, DType::kF32,
                                            {count, config_.experts});
  } else {
    routing.ids = TensorView::contiguous(ids_.data() + begin * config_.top_k, DType::kI32,
                                         {count, config_.top_k});
  }
  return routing;
}

Routing BenchRouting::of(std::span<const int64_t> tokens, BenchRouting& copy) const {
  copy.config_ = config_;
  copy.logits_.clear();
  copy.ids_.clear();
  if (ids_.empty()) {
    copy.logits_ = selected_rows(logits_, config_.experts, tokens);
  } else {
    copy.ids_ = selected_rows(ids_, config_.top_k, tokens);
  }
  return copy.range(0, static_cast<int64_t>(tokens.size()));
}

void check_routing(const std::string& kind, const RoutingConfig& config, int64_t tokens,
                   int32_t shape_experts) {
  if (is_file(kind)) BenchRouting(kind, config, tokens, shape_experts);
}

TensorView BenchInputs::rows_of(TokenRange range) const {
  const auto hidden = static_cast<size_t>(layer.config.hidden);
  const auto first = static_cast<size_t>(range.begin) * hidden;
  return matrix_view(std::span(rows).subspan(first, static_cast<size_t>(range.count) * hidden),
                     layer.config.hidden);
}

std::vector<TokenRange> BenchInputs::ranges(int64_t tokens) const {
  std::vector<TokenRange> ranges;
  const int64_t count = std::min(routing.tokens() / tokens, kMaxRanges);
  for (int64_t i = 0; i < count; ++i) ranges.push_back({i * tokens, tokens});
  return ranges;
}

LoadSummary BenchInputs::load_of(TokenRange range) const {
  const ChosenExperts chosen =
      chosen_experts(routing.range(range.begin, range.count), layer.config.routing, range.count);
  return summarise(expert_load(chosen.ids, layer.config));
}

BenchInputs bench_inputs(const BenchLayer& layer, int64_t max_tokens) {
  const MoeConfig& config = layer.config;
  BenchRouting routing(layer.routing, config.routing, max_tokens, layer.shape_experts);
  const auto elements = static_cast<size_t>(routing.tokens() * config.hidden);
  return {layer, std::move(routing), to_bf16(random_normal(elements, kRowSeed))};
}

RunSample sample_run(const MoeConfig& config, const std::vector<float>& output,
                     std::span<const int32_t> ids, int64_t begin) {
  const auto tokens = static_cast<int64_t>(ids.size()) / config.routing.top_k;
  const TokenSplit split = split_tokens(ids, config, tokens);
  RunSample sample;
  sample.tokens = sample_of(config, split.local);
  sample.output = selected_rows(output, config.hidden, sample.tokens);
  for (int64_t& token : sample.tokens) token += begin;
  if (split.other.empty()) return sample;
  const int64_t unused = split.other[split.other.size() / 2];
  const std::vector<float> zeros = selected_rows(output, config.hidden, std::array{unused});
  sample.has_zeros =
      std::all_of(zeros.begin(), zeros.end(), [](float value) { return value == 0; });
  return sample;
}

CheckedRun check_run(const BenchInputs& inputs, const RunSample& sample) {
  CheckedRun checked;
  if (sample.tokens.empty()) {
    if (!sample.has_zeros) checked.verdict = Verdict::kWrong;
    return checked;
  }
  const MoeConfig& config = inputs.layer.config;
  checked.tokens = static_cast<int64_t>(sample.tokens.size());
  const std::vector<uint16_t> rows = selected_rows(inputs.rows, config.hidden, sample.tokens);
  BenchRouting sampled = inputs.routing;
  ChosenExperts chosen =
      chosen_experts(inputs.routing.of(sample.tokens, sampled), config.routing, checked.tokens);
  const std::vector<int32_t> experts = compact_experts(config, chosen.ids);
  RandomWeights weights(config, inputs.layer.has_bias, experts);
  weights.fill();
  Routing routing;
  const int32_t top_k = config.routing.top_k;
  routing.ids = TensorView::contiguous(chosen.ids.data(), DType::kI32, {checked.tokens, top_k});
  routing.weights =
      TensorView::contiguous(chosen.weights.data(), DType::kF32, {checked.tokens, top_k});
  const MoeConfig oracle = oracle_config(config, static_cast<int32_t>(experts.size()));
  const std::vector<float> expected =
      run_reference(weights.weights(), oracle, {.accumulation = Accumulation::kFp64},
                    matrix_view(rows, config.hidden), routing);
  checked.error = distance(sample.output, expected, config.hidden);
  const bool is_correct =
      sample.has_zeros && is_within(checked.error, tolerance(config.mode), checked.tokens);
  checked.verdict = is_correct ? Verdict::kCorrect : Verdict::kWrong;
  return checked;
}

}  // namespace narrowfloat::cli
