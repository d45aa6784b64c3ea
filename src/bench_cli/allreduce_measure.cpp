// Times of a row. A set of buffers has the inputs of the ranks that run here, then their outputs;
// calls rotate through as many sets as the cache cannot hold. All ranks time the same number of
// calls, which rank 0 decides.
#include "bench_cli/allreduce_measure.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include <fmt/format.h>

#include "narrowfloat/error.h"

namespace narrowfloat::cli {
namespace {

// The calls of a replay, as in CUDA graphs of a few layers.
constexpr int64_t kCallsPerReplay = 10;
constexpr int kLeastReplays = 5;
constexpr int kMostReplays = 1000;

// The rest of the characters is 0 already.
template <size_t kSize>
void set_text(char (&to)[kSize], std::string_view text) {
  text = text.substr(0, kSize - 1);
  std::copy(text.begin(), text.end(), to);
}

// The buffers of one problem, for the ranks that run here.
class RowBuffers {
 public:
  RowBuffers(const LocalRanks& ranks, const AllReduceProblem& problem) : machine_(ranks.machine()) {
    for (int i = 0; i < ranks.count(); ++i) {
      tensors_.emplace_back(problem, ranks.ranks(), ranks.first_rank() + i);
    }
    num_sets_ = sets_beyond_cache(machine_.facts(), set_bytes());
    if (ranks.is_virtual()) exchange_bytes_ = exchange_bytes();
    const uint64_t all = set_bytes() * static_cast<uint64_t>(num_sets_);
    base_ = machine_.reserve(all + exchange_bytes_ + kBufferAlignment);
    exchange_ = base_ + all;
  }

  void fill() {
    for (size_t i = 0; i < tensors_.size(); ++i) {
      tensors_[i].fill_inputs(machine_, base_ + i * tensors_[i].input_bytes());
    }
    for (int64_t set = 1; set < num_sets_; ++set) machine_.copy(at(set), base_, input_bytes());
    if (exchange_bytes_ > 0) machine_.fill_bytes(exchange_, 1, exchange_bytes_);
    for (int64_t set = 0; set < num_sets_; ++set) args_.push_back(args_of(set));
    poison();
    machine_.wait();
  }
  void poison() {
    for (int64_t set = 0; set < num_sets_; ++set) {
      machine_.fill_bytes(outputs(set), kPoison, output_bytes());
    }
  }

  [[nodiscard]] int64_t num_sets() const { return num_sets_; }
  [[nodiscard]] const RankTensors& tensors() const { return tensors_.front(); }
  [[nodiscard]] std::span<const AllReduceArgs> args(int64_t call_idx) const {
    return args_[static_cast<size_t>(call_idx % num_sets_)];
  }

  // Traffic of all ranks here, with the tensors of a set.
  [[nodiscard]] Traffic traffic(int64_t call_idx, AllReduceAlgorithm algorithm) const {
    const RankTraffic one = tensors().traffic(algorithm);
    const auto ranks = static_cast<uint64_t>(tensors_.size());
    const int64_t set = call_idx % num_sets_;
    return {.from = at(set),
            .read_bytes = ranks * one.read_bytes,
            .to = outputs(set),
            .write_bytes = ranks * one.write_bytes,
            .exchange = exchange_,
            .exchange_read_bytes = ranks * one.exchange_read_bytes,
            .exchange_write_bytes = ranks * one.exchange_write_bytes};
  }

  // Whether all calls have given these outputs on all ranks here.
  void compare(std::span<const std::byte> expected, RankResult& result) {
    for (int64_t set = 1; set < num_sets_; ++set) {
      if (machine_.is_equal(outputs(set), outputs(0), output_bytes())) continue;
      result.is_inexact = result.is_wrong = true;
      return set_text(result.message, fmt::format("calls {} and 0 on the same inputs differ", set));
    }
    std::vector<std::byte> got(output_bytes());
    machine_.read(got.data(), outputs(0), got.size());
    for (size_t i = 0; i < tensors_.size(); ++i) {
      const std::byte* const mine = got.data() + i * expected.size();
      std::string wrong = tensors_[i].difference(mine, expected.data());
      if (wrong.empty()) continue;
      result.is_inexact = true;
      if (result.algorithm == AllReduceAlgorithm::kNccl) {
        wrong = tensors_[i].distance(mine, expected.data());
      }
      if (wrong.empty()) continue;
      result.is_wrong = true;
      return set_text(result.message, wrong);
    }
  }

 private:
  [[nodiscard]] uint64_t input_bytes() const { return tensors_.size() * tensors().input_bytes(); }
  [[nodiscard]] uint64_t output_bytes() const { return tensors_.size() * tensors().output_bytes(); }
  [[nodiscard]] uint64_t set_bytes() const { return input_bytes() + output_bytes(); }
  // Enough for the algorithm that exchanges the most.
  [[nodiscard]] uint64_t exchange_bytes() const {
    const RankTraffic most = tensors().traffic(AllReduceAlgorithm::kOneShot);
    return tensors_.size() * std::max(most.exchange_read_bytes, most.exchange_write_bytes);
  }
  [[nodiscard]] std::byte* at(int64_t set) const {
    return base_ + static_cast<uint64_t>(set) * set_bytes();
  }
  [[nodiscard]] std::byte* outputs(int64_t set) const { return at(set) + input_bytes(); }
  [[nodiscard]] std::vector<AllReduceArgs> args_of(int64_t set) const {
    std::vector<AllReduceArgs> args;
    for (size_t i = 0; i < tensors_.size(); ++i) {
      args.push_back(tensors_[i].args(at(set) + i * tensors_[i].input_bytes(),
                                      outputs(set) + i * tensors_[i].output_bytes(),
                                      machine_.device()));
    }
    return args;
  }

  Machine& machine_;
  std::vector<RankTensors> tensors_;
  int64_t num_sets_ = 0;
  uint64_t exchange_bytes_ = 0;
  std::byte* base_ = nullptr;
  std::byte* exchange_ = nullptr;
  std::vector<std::vector<AllReduceArgs>> args_;
};

// The time of the best shape.
double memory_only_us(Machine& machine, const RowBuffers& buffers, AllReduceAlgorithm algorithm,
                      ReplayPlan plan) {
  constexpr int kReplays = 20;
  plan.replays = std::min(plan.replays, kReplays);
  double best = 0;
  for (const TrafficShape& shape : machine.traffic_shapes(buffers.traffic(0, algorithm))) {
    const auto move = [&](int64_t i, Stream stream) {
      machine.queue_traffic(buffers.traffic(i, algorithm), shape, stream);
    };
    const double median_us = machine.time_calls(move, plan).median_us;
    if (best == 0 || median_us < best) best = median_us;
  }
  return best;
}

ReplayPlan plan_of(const LocalRanks& ranks, const MeasureOptions& options, double once_us,
                   int64_t sets) {
  ReplayPlan plan{.calls = std::max(kCallsPerReplay, sets),
                  .is_programmatic =
                      options.is_programmatic && ranks.machine().facts().has_programmatic_launch};
  const double replay_us = std::max(once_us, 0.5) * static_cast<double>(plan.calls);
  const double wanted = std::ceil(options.min_seconds * 1e6 / replay_us);
  plan.replays = static_cast<int>(std::clamp<double>(wanted, kLeastReplays, kMostReplays));
  ranks.broadcast(std::as_writable_bytes(std::span(&plan, 1)));
  return plan;
}

void measure_row(LocalRanks& ranks, const AllReduceProblem& problem, const MeasureOptions& options,
                 std::span<std::byte> expected, RankResult& result) {
  Machine& machine = ranks.machine();
  std::optional<RowBuffers> buffers;
  ranks.together("buffers of a row", [&] {
    buffers.emplace(ranks, problem);
    buffers->fill();
    if (ranks.first_rank() > 0) return;
    const std::vector<std::byte> outputs = reference_outputs(problem, ranks.ranks());
    std::copy(outputs.begin(), outputs.end(), expected.begin());
  });
  expected = expected.first(buffers->tensors().output_bytes());
  result.buffer_sets = buffers->num_sets();
  const auto call = [&](int64_t i, Stream stream) {
    result.algorithm = ranks.call(problem, buffers->args(i), stream);
  };
  // The first call loads code.
  ranks.together("first call", [&] {
    machine.run_once(call);
    ranks.wait_and_check();
  });
  const double once_us = machine.run_once(call);
  const ReplayPlan plan = plan_of(ranks, options, once_us, buffers->num_sets());
  buffers->poison();
  machine.wait();
  ranks.barrier();
  ranks.together("timed calls", [&] {
    result.time = machine.time_calls(call, plan);
    ranks.wait_and_check();
    buffers->compare(expected, result);
  });
  if (ranks.is_virtual()) {
    result.memory_only_us = memory_only_us(machine, *buffers, result.algorithm, plan);
  }
  result.status = RankResult::Status::kMeasured;
}

uint64_t largest_output_bytes(const std::vector<AllReduceRow>& rows, int ranks) {
  uint64_t most = 0;
  for (const AllReduceRow& row : rows) {
    most = std::max(most, RankTensors(row.problem, ranks, 0).output_bytes());
  }
  return most;
}

}  // namespace

RunFacts facts_of(const LocalRanks& ranks) {
  const MachineFacts& machine = ranks.machine().facts();
  RunFacts facts;
  set_text(facts.machine, machine.name);
  set_text(facts.driver, machine.driver);
  set_text(facts.cuda_runtime, machine.cuda_runtime);
  if (ranks.has_nccl()) set_text(facts.nccl, nccl_info().version);
  facts.transport = ranks.transport();
  return facts;
}

const RankResult& RowResult::slowest() const {
  const RankResult* found = &ranks.front();
  for (const RankResult& rank : ranks) {
    if (rank.status != RankResult::Status::kMeasured) return rank;
    if (found->is_wrong) continue;
    if (rank.is_wrong || rank.time.median_us > found->time.median_us) found = &rank;
  }
  return *found;
}

bool RowResult::is_measured() const {
  return std::ranges::all_of(
      ranks, [](const RankResult& rank) { return rank.status == RankResult::Status::kMeasured; });
}

bool RowResult::is_exact() const {
  return std::ranges::none_of(ranks, [](const RankResult& rank) { return rank.is_inexact; });
}

bool RowResult::is_correct() const {
  return is_measured() &&
         std::ranges::none_of(ranks, [](const RankResult& rank) { return rank.is_wrong; });
}

MeasuredRows measure_rows(const RankSetup& setup, const std::vector<AllReduceRow>& rows,
                          const MeasureOptions& options) {
  const auto bodies = static_cast<size_t>(setup.bodies());
  const SharedBytes facts_memory(sizeof(RunFacts));
  const SharedBytes results_memory(rows.size() * bodies * sizeof(RankResult));
  const SharedBytes expected(largest_output_bytes(rows, setup.ranks));
  RunFacts& facts = facts_memory.as<RunFacts>(1).front();
  const std::span<RankResult> results = results_memory.as<RankResult>(rows.size() * bodies);
  const std::vector<RankEnd> ends = run_ranks(setup, [&](LocalRanks& ranks) {
    const auto body = static_cast<size_t>(ranks.first_rank());
    if (body == 0) facts = facts_of(ranks);
    for (size_t i = 0; i < rows.size(); ++i) {
      RankResult& result = results[i * bodies + body];
      if (rows[i].is_baseline && !ranks.has_nccl()) {
        result.status = RankResult::Status::kLeftOut;
        continue;
      }
      try {
        measure_row(ranks, rows[i].problem, options, expected.bytes(), result);
      } catch (const Error& error) {
        // All ranks have the same error, since each step ends with an agreement.
        result.status = RankResult::Status::kFailed;
        result.error = error.kind();
        set_text(result.message, error.what());
        if (error.kind() != ErrorKind::kUnsupported) throw;
      }
    }
  });
  if (const std::optional<Error> failure = first_failure(setup, ends)) throw Error(*failure);
  MeasuredRows measured{.facts = facts, .rows = {}};
  for (size_t i = 0; i < rows.size(); ++i) {
    const std::span<RankResult> row = results.subspan(i * bodies, bodies);
    measured.rows.push_back({{row.begin(), row.end()}});
  }
  return measured;
}

}  // namespace narrowfloat::cli
