// Each rank has as many tokens with random experts. Without a layer all results are 1, so that the
// sums are known: the number of ranks that a token went to, or the sum of its weights.
#include "bench_cli/expert_parallel_measure.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>

#include <fmt/format.h>

#include "cli_common/moe/layer_runner.h"
#include "cli_common/moe/random_weights.h"
#include "narrowfloat/error.h"

namespace narrowfloat::cli {
namespace {

constexpr int64_t kExchangesPerReplay = 10;
constexpr int kLeastExchangeReplays = 5;
constexpr int kMostExchangeReplays = 1000;
constexpr uint64_t kTokenSeed = 30;

// The arguments of a rank's calls, in host memory.
struct HostTokens {
  std::vector<int32_t> ids;
  std::vector<float> weights;
  std::vector<float> expected;  // The sums of each token where all results are 1.
  int64_t sent_rows = 0;

  HostTokens(const ExpertRow& row, const RoutingConfig& routing, int ranks, int rank) {
    const auto slots = static_cast<size_t>(row.tokens * routing.top_k);
    const std::vector<float> logits =
        random_logits(row.tokens, routing.experts, 0, kTokenSeed + static_cast<uint64_t>(rank));
    weights.reserve(slots);
    for (int64_t token = 0; token < row.tokens; ++token) {
      const float* const scores = logits.data() + token * routing.experts;
      std::vector<int32_t> best(static_cast<size_t>(routing.experts));
      for (size_t i = 0; i < best.size(); ++i) best[i] = static_cast<int32_t>(i);
      std::partial_sort(best.begin(), best.begin() + routing.top_k, best.end(),
                        [&](int32_t a, int32_t b) { return scores[a] > scores[b]; });
      std::vector<bool> is_sent(static_cast<size_t>(ranks));
      float sum = 0;
      for (int32_t slot = 0; slot < routing.top_k; ++slot) {
        ids.push_back(best[static_cast<size_t>(slot)]);
        weights.push_back(1.0F / static_cast<float>(2 + slot));
        sum = std::fma(weights.back(), 1.0F, sum);
        is_sent[static_cast<size_t>(owner_of(ids.back(), routing.experts, ranks))] = true;
      }
      const auto destinations = std::count(is_sent.begin(), is_sent.end(), true);
      sent_rows += destinations;
      expected.push_back(row.order == CombineOrder::kTopK ? sum : static_cast<float>(destinations));
    }
  }

 private:
  static int owner_of(int32_t expert, int32_t experts, int ranks) {
    for (int rank = 0;; ++rank) {
      const narrowfloat::ExpertShard shard = expert_shard(experts, ranks, rank);
      if (expert < shard.offset + shard.count) return rank;
    }
  }
};

// One row on one rank.
class ExpertRun {
 public:
  ExpertRun(LocalRanks& ranks, const ExpertSettings& settings, const ExpertRow& row,
            const MoeLayer* layer)
      : ranks_(ranks),
        settings_(settings),
        row_(row),
        layer_(layer),
        host_(row, settings.shape.routing, ranks.ranks(), ranks.first_rank()),
        group_(ExpertParallel::create(ranks.group(), config_of(settings, row),
                                      {.device = ranks.machine().device(),
                                       .transport = settings.transport,
                                       .all_to_all = {},
                                       .deadline = settings.setup.workspace.deadline})) {}

  [[nodiscard]] double sent_rows() const {
    return static_cast<double>(host_.sent_rows) / static_cast<double>(row_.tokens);
  }

  void load() {
    Machine& machine = ranks_.machine();
    const int64_t hidden = settings_.shape.hidden;
    const int64_t top_k = settings_.shape.routing.top_k;
    const uint64_t rows_bytes = aligned(static_cast<uint64_t>(row_.tokens * hidden * 2));
    const uint64_t slot_bytes = aligned(static_cast<uint64_t>(row_.tokens * top_k * 4));
    const uint64_t out_bytes = aligned(static_cast<uint64_t>(row_.tokens * hidden * 4));
    const int64_t all_tokens = row_.tokens * ranks_.ranks();
    const uint64_t summed_bytes = aligned(static_cast<uint64_t>(all_tokens * hidden * 2));
    const auto space =
        static_cast<uint64_t>(layer_ == nullptr ? 0 : group_.required_workspace(*layer_));
    std::byte* next = machine.reserve(rows_bytes + 2 * slot_bytes + out_bytes + 2 * summed_bytes +
                                      aligned(space));
    const auto take = [&](uint64_t size_bytes) {
      std::byte* const taken = next;
      next += size_bytes;
      return taken;
    };
    const Device device = machine.device();
    std::byte* const rows = take(rows_bytes);
    std::byte* const ids = take(slot_bytes);
    std::byte* const weights = take(slot_bytes);
    out_ = take(out_bytes);
    std::byte* const summed = take(2 * summed_bytes);
    machine.fill_random(rows, DType::kBF16, 0, row_.tokens * hidden);
    machine.write(ids, reinterpret_cast<const std::byte*>(host_.ids.data()),
                  host_.ids.size() * sizeof(int32_t));
    machine.write(weights, reinterpret_cast<const std::byte*>(host_.weights.data()),
                  host_.weights.size() * sizeof(float));
    machine.fill_bytes(summed, 0, 2 * summed_bytes);
    machine.fill_bytes(out_, kPoison, out_bytes);
    rows_.values = TensorView::contiguous(rows, DType::kBF16, {row_.tokens, hidden}, device);
    ids_ = TensorView::contiguous(ids, DType::kI32, {row_.tokens, top_k}, device);
    weights_ = TensorView::contiguous(weights, DType::kF32, {row_.tokens, top_k}, device);
    out_view_ = TensorView::contiguous(out_, DType::kF32, {row_.tokens, hidden}, device);
    layer_out_ = TensorView::contiguous(out_, DType::kBF16, {row_.tokens, hidden}, device);
    workspace_ = TensorView::contiguous(next, DType::kU8, {static_cast<int64_t>(space)}, device);
    sum_.input = TensorView::contiguous(summed, DType::kBF16, {all_tokens, hidden}, device);
    sum_.ar_out =
        TensorView::contiguous(summed + summed_bytes, DType::kBF16, {all_tokens, hidden}, device);
    machine.wait();
  }

  // The results of the experts are 1, whatever they received.
  void store_ones() {
    Machine& machine = ranks_.machine();
    ReceivedTokens received;
    machine.run_once([&](int64_t /*call*/, Stream stream) {
      received = group_.dispatch(rows_, ids_, weights_, stream);
    });
    const TensorView results = group_.results();
    const std::vector<uint16_t> ones(static_cast<size_t>(results.num_elements()), 0x3F80);
    machine.write(static_cast<std::byte*>(results.data),
                  reinterpret_cast<const std::byte*>(ones.data()), ones.size() * 2);
    machine.run_once(
        [&](int64_t /*call*/, Stream stream) { group_.combine(received, out_view_, stream); });
    wait_and_check();
  }

  void exchange(Stream stream) {
    const ReceivedTokens received = group_.dispatch(rows_, ids_, weights_, stream);
    group_.combine(received, out_view_, stream);
  }
  void run_layer(Stream stream) {
    group_.run(*layer_, rows_, ids_, weights_, layer_out_, workspace_, stream);
  }
  void all_reduce(Stream stream) {
    ranks_.call({.tokens = row_.tokens * ranks_.ranks(),
                 .hidden = settings_.shape.hidden,
                 .exactness = AllReduceExactness::kFast,
                 .algorithm = AllReduceAlgorithm::kNccl},
                {&sum_, 1}, stream);
  }
  void wait_and_check() {
    ranks_.wait_and_check();
    group_.check_error();
  }

  // The first token whose sums are others, or nothing.
  [[nodiscard]] std::string difference() const {
    const auto hidden = static_cast<size_t>(settings_.shape.hidden);
    std::vector<float> got(host_.expected.size() * hidden);
    ranks_.machine().read(reinterpret_cast<std::byte*>(got.data()), out_,
                          got.size() * sizeof(float));
    for (size_t i = 0; i < got.size(); ++i) {
      const float want = host_.expected[i / hidden];
      if (got[i] == want) continue;
      return fmt::format("rank {}, token {}, column {}: expected {}, got {}", ranks_.first_rank(),
                         i / hidden, i % hidden, want, got[i]);
    }
    return "";
  }

  [[nodiscard]] ExpertTransport transport() const { return group_.transport(); }
  void destroy() { group_.destroy(); }

 private:
  static ExpertParallelConfig config_of(const ExpertSettings& settings, const ExpertRow& row) {
    return {.hidden = settings.shape.hidden,
            .experts = settings.shape.routing.experts,
            .top_k = settings.shape.routing.top_k,
            .max_tokens = row.tokens,
            .payload = row.payload,
            .order = row.order};
  }

  LocalRanks& ranks_;
  const ExpertSettings& settings_;
  const ExpertRow& row_;
  const MoeLayer* layer_;
  HostTokens host_;
  ExpertParallel group_;
  CodedRows rows_;
  TensorView ids_, weights_, out_view_, layer_out_, workspace_;
  AllReduceArgs sum_;
  std::byte* out_ = nullptr;
};

// The median of this rank; all ranks make as many calls.
template <typename Call>
double time_calls(LocalRanks& ranks, const ExpertSettings& settings, ExpertRun& run, Call&& call) {
  Machine& machine = ranks.machine();
  const auto queued = [&](int64_t /*call*/, Stream stream) { call(stream); };
  machine.run_once(queued);  // Loads code.
  run.wait_and_check();
  const double once_us = std::max(machine.run_once(queued), 0.5);
  ReplayPlan plan{.calls = kExchangesPerReplay};
  const double wanted = std::ceil(settings.measure.min_seconds * 1e6 /
                                  (once_us * static_cast<double>(kExchangesPerReplay)));
  plan.replays =
      static_cast<int>(std::clamp<double>(wanted, kLeastExchangeReplays, kMostExchangeReplays));
  ranks.broadcast(std::as_writable_bytes(std::span(&plan, 1)));
  ranks.barrier();
  const CallTime time = machine.time_calls(queued, plan);
  run.wait_and_check();
  return time.median_us;
}

void measure_row(LocalRanks& ranks, const ExpertSettings& settings, const ExpertRow& row,
                 const MoeLayer* layer, ExpertResult& result) {
  ExpertRun run(ranks, settings, row, layer);
  ranks.together("buffers of a row", [&] { run.load(); });
  result.sent_rows = run.sent_rows();
  result.transport = run.transport();
  run.store_ones();
  result.exchange_us =
      time_calls(ranks, settings, run, [&](Stream stream) { run.exchange(stream); });
  const std::string wrong = run.difference();
  result.is_wrong = !wrong.empty();
  std::copy_n(wrong.data(), std::min(wrong.size(), sizeof(result.message) - 1), result.message);
  if (layer != nullptr) {
    result.layer_us =
        time_calls(ranks, settings, run, [&](Stream stream) { run.run_layer(stream); });
  }
  if (ranks.has_nccl()) {
    result.all_reduce_us =
        time_calls(ranks, settings, run, [&](Stream stream) { run.all_reduce(stream); });
  }
  ranks.barrier();
  run.destroy();
}

// The experts of one rank, with random weights.
MoeConfig layer_of(const ExpertSettings& settings, const LocalRanks& ranks, int64_t most_tokens) {
  const Machine& machine = ranks.machine();
  MoeConfig config =
      layer_config(settings.shape, settings.mode, {ranks.first_rank(), ranks.ranks()},
                   most_tokens * ranks.ranks(), memory_limit(0, machine));
  config.routing.options.negative_one_is_empty = true;
  config.slot_dtype = DType::kBF16;
  config.out_dtype = DType::kBF16;
  return config;
}

}  // namespace

MeasuredExperts measure_experts(const ExpertSettings& settings,
                                const std::vector<ExpertRow>& rows) {
  const auto ranks_count = static_cast<size_t>(settings.setup.ranks);
  const SharedBytes facts_memory(sizeof(RunFacts));
  const SharedBytes results_memory(rows.size() * ranks_count * sizeof(ExpertResult));
  RunFacts& facts = facts_memory.as<RunFacts>(1).front();
  const std::span<ExpertResult> results =
      results_memory.as<ExpertResult>(rows.size() * ranks_count);
  int64_t most_tokens = 0;
  for (const ExpertRow& row : rows) most_tokens = std::max(most_tokens, row.tokens);
  const std::vector<RankEnd> ends = run_ranks(settings.setup, [&](LocalRanks& ranks) {
    const auto rank = static_cast<size_t>(ranks.first_rank());
    std::optional<LayerRunner> runner;
    ranks.together("layer", [&] {
      if (!settings.has_layer) return;
      const MoeConfig config = layer_of(settings, ranks, most_tokens);
      if (config.routing.experts != settings.shape.routing.experts) {
        throw Error(ErrorKind::kUnsupported,
                    fmt::format("the memory holds {} of {} experts; use more ranks, or --no-layer",
                                config.routing.experts, settings.shape.routing.experts));
      }
      RandomWeights weights(config, settings.shape.has_bias);
      if (ranks.machine().is_host()) weights.fill();
      runner.emplace(ranks.machine(), weights, config);
    });
    if (rank == 0) facts = facts_of(ranks);
    for (size_t i = 0; i < rows.size(); ++i) {
      measure_row(ranks, settings, rows[i], runner ? &runner->layer() : nullptr,
                  results[i * ranks_count + rank]);
    }
  });
  if (const std::optional<Error> failure = first_failure(settings.setup, ends)) {
    throw Error(*failure);
  }
  MeasuredExperts measured{.facts = facts, .rows = {}};
  for (size_t i = 0; i < rows.size(); ++i) {
    ExpertResult slowest;
    slowest.transport = results[i * ranks_count].transport;
    for (size_t rank = 0; rank < ranks_count; ++rank) {
      const ExpertResult& one = results[i * ranks_count + rank];
      slowest.exchange_us = std::max(slowest.exchange_us, one.exchange_us);
      slowest.layer_us = std::max(slowest.layer_us, one.layer_us);
      slowest.all_reduce_us = std::max(slowest.all_reduce_us, one.all_reduce_us);
      slowest.sent_rows += one.sent_rows / static_cast<double>(ranks_count);
      if (!one.is_wrong || slowest.is_wrong) continue;
      slowest.is_wrong = true;
      std::copy(std::begin(one.message), std::end(one.message), std::begin(slowest.message));
    }
    measured.rows.push_back(slowest);
  }
  return measured;
}

}  // namespace narrowfloat::cli
